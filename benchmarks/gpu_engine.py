"""The engine on a GPU at DeepSeek-V4-Flash's dimensions: the bridge beside vLLM's own model, in one run.

    python benchmarks/gpu_engine.py --folder DIR                     both, with full graphs of decode steps
    python benchmarks/gpu_engine.py --folder DIR --engines bridge    one of them
    python benchmarks/gpu_engine.py --folder DIR --mtp               drafting three tokens with MTP, in one graph and step by step

Both engines load one random checkpoint in the published layout (fp8, mxfp4 experts; 27 GB for 8 layers), which is made in DIR if it
is not there, with an fp8 cache, and get the same prompts. A decode step is timed from outside, scheduler and sampling included: the
difference between long and short answers of all requests, a token of each. Each engine has a process of its own and a start of its own, whose time is
told too, from the process to the first token.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

LAYERS, CONTEXT, PROMPT = 8, 1024, 8192
SHORT, LONG = 16, 80
ENGINES = ("bridge", "vllm")
# With these on its start took more than nine minutes. Kernels that it would have tuned run as they are by default.
OF_VLLM = {
    "kernel_config": {
        "enable_jit_warmup": False,
        "enable_cutedsl_warmup": False,
        "enable_flashinfer_autotune": False,
    }
}


def make(folder: Path) -> Path:
    """A random checkpoint, with an MTP layer."""
    import torch
    from gpu_step import random_tensor
    from safetensors.torch import save_file

    from atom_vllm_bridge.checkpoint.presets import build_config
    from atom_vllm_bridge.models.deepseek_v4.checkpoint import tensor_table

    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = build_config("flash-shaped", layers=LAYERS, draft="mtp")
    table = tensor_table(config, "mxfp4")
    shards: dict[str, dict[str, Any]] = {}
    for name, spec in table.items():
        part, *rest = name.split(".")
        shard = f"{part}-{rest[0]}" if part in ("layers", "mtp") else "rest"
        shards.setdefault(shard, {})[name] = spec
    index: dict[str, str] = {}
    torch.manual_seed(0)
    for shard, specs in shards.items():
        tensors = {
            name: random_tensor(spec, config["n_routed_experts"]).cpu()
            for name, spec in specs.items()
        }
        save_file(tensors, folder / f"{shard}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, f"{shard}.safetensors")
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def measure(
    engine: str, folder: str, batches: list[int], begun: float, speculation: str
) -> None:
    """One engine in this process; prints its figures as a line of JSON."""
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = dict(OF_VLLM) if engine == "vllm" else {}
    sizes = batches
    if speculation:
        config = json.loads(speculation)
        options["speculative_config"] = config
        each = 1 + config["num_speculative_tokens"]
        sizes = sorted({*batches, *(each * batch for batch in batches)})
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        kv_cache_dtype="fp8",
        max_model_len=PROMPT + 256,
        max_num_batched_tokens=PROMPT,
        max_num_seqs=max(batches),
        gpu_memory_utilization=0.45,
        kv_cache_memory_bytes=16 << 30,
        enable_prefix_caching=False,
        compilation_config={
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sizes,
        },
        seed=0,
        **options,
    )
    found: dict[str, Any] = {"ready": time.time() - begun}

    def run(requests: int, prompt: int, new: int) -> float:
        prompts: Any = [
            {"prompt_token_ids": [3 + (31 * i + 7 * j) % 99991 for j in range(prompt)]}
            for i in range(requests)
        ]
        sampling = SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        took = time.perf_counter() - start
        assert all(len(output.outputs[0].token_ids) == new for output in outputs)
        return took

    run(1, 16, 1)
    found["first token"] = time.time() - begun
    for batch in batches:
        run(batch, CONTEXT, 4)
        times = sorted(
            run(batch, CONTEXT, LONG) - run(batch, CONTEXT, SHORT) for _ in range(3)
        )
        found[f"step of {batch}"] = times[1] / (LONG - SHORT) * 1e3
    run(1, PROMPT, 1)
    found["prefill"] = min(run(1, PROMPT, 1) for _ in range(3)) * 1e3
    print(json.dumps(found), flush=True)


def in_a_process(
    engine: str, folder: Path, batches: str, speculation: str = "", **environment: str
) -> dict[str, float]:
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if engine == "vllm":
        settings |= {"ATOM_BRIDGE_DISABLE": "1", "VLLM_DEEP_GEMM_WARMUP": "skip"}
    arguments = [engine, str(folder), batches, str(time.time()), speculation]
    done = subprocess.run(
        [sys.executable, __file__, "--measure", *arguments],
        env=os.environ | settings | environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{engine} ended with {done.returncode}")
    # vLLM may have more to say.
    figures = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(figures[-1])


def main(
    folder: Annotated[Path, typer.Option(help="Of the checkpoint.")],
    engines: Annotated[str, typer.Option()] = ",".join(ENGINES),
    batch: Annotated[str, typer.Option(help="Requests at once.")] = "1,16,64,128",
    mtp: Annotated[bool, typer.Option(help="Compare ways of drafting.")] = False,
) -> None:
    from tabulate import tabulate

    make(folder)
    if mtp:
        speculation = json.dumps({"method": "mtp", "num_speculative_tokens": 3})
        found = {
            name: in_a_process(
                "bridge", folder, batch, speculation, GPU_ENGINE_UNFUSED=unfused
            )
            for name, unfused in (("one graph", ""), ("step by step", "1"))
        }
    else:
        found = {name: in_a_process(name, folder, batch) for name in engines.split(",")}
    rows = [
        [figure, *(f"{each[figure]:.2f}" for each in found.values())]
        for figure in next(iter(found.values()))
    ]
    print(
        f"\n{LAYERS} layers, {CONTEXT} tokens of context, ms a step; seconds to ready and first token"
    )
    print(tabulate(rows, ["", *found], disable_numparse=True))


def without_fused_drafts() -> None:
    from atom_vllm_bridge.attention.backend import AtomMetadataBuilder

    AtomMetadataBuilder.supports_draft_decode_metadata_update = False


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        if os.environ.get("GPU_ENGINE_UNFUSED"):
            without_fused_drafts()
        engine, folder, batches, begun, speculation = sys.argv[2:]
        counts = [int(count) for count in batches.split(",")]
        measure(engine, folder, counts, float(begun), speculation)
    else:
        typer.run(main)
