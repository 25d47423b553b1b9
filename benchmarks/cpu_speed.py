"""Tokens a second on a CPU: the bridge, transformers' `generate`, and vLLM's own DeepSeek-V4, one after another in one run.

    python benchmarks/cpu_speed.py                      a tiny checkpoint is made for the run
    python benchmarks/cpu_speed.py --checkpoint DIR

Every engine gets the same checkpoint (bf16 layout), prompts, number of new tokens, batch and threads, in a process of its
own; each measurement is repeated, and the median counts. vLLM's own model does not start on a CPU without help: it is
given Triton's interpreter and the bridge's engine kernels, and the two keys that its scheduler table lacks.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

PROMPT, NEW, REPEATS = 24, 64, 3
REQUESTS = (1, 8)
ENGINES = {
    "bridge, float32": ("bridge", "float32"),
    "bridge, bfloat16": ("bridge", "bfloat16"),
    "transformers, float32": ("transformers", "float32"),
    "vLLM's own, bfloat16": ("vllm", "bfloat16"),
}


def prompts(count: int) -> list[list[int]]:
    """Token ids without meaning; a model's speed does not depend on them."""
    return [[3 + (31 * i + 7 * j) % 900 for j in range(PROMPT)] for i in range(count)]


def measured(generate: Callable[[list[list[int]]], int]) -> dict[int, float]:
    """Median tokens a second for each number of requests; `generate` returns how many tokens it made."""
    speed = {}
    for count in REQUESTS:
        generate(prompts(count))
        runs = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            made = generate(prompts(count))
            runs.append(made / (time.perf_counter() - start))
        speed[count] = statistics.median(runs)
    return speed


def run_transformers(checkpoint: Path, dtype: str) -> dict[int, float]:
    import torch
    from transformers import DeepseekV4ForCausalLM

    model = DeepseekV4ForCausalLM.from_pretrained(
        checkpoint, dtype=getattr(torch, dtype), attn_implementation="eager"
    )

    @torch.inference_mode()
    def generate(batch: list[list[int]]) -> int:
        ids = torch.tensor(batch)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
        )
        return out[:, PROMPT:].numel()

    return measured(generate)


def engine_of(checkpoint: Path, dtype: str, **options: Any) -> Any:
    """vLLM's engine in this process, as all measurements have it."""
    from vllm import LLM

    return LLM(
        str(checkpoint),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=1000,
        kv_cache_memory_bytes=1 << 30,
        seed=0,
        **options,
    )


def run_vllm(checkpoint: Path, dtype: str, own: bool) -> dict[int, float]:
    if own:
        help_vllms_own_model()
    from vllm import SamplingParams

    engine = engine_of(checkpoint, dtype)
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)

    def generate(batch: list[list[int]]) -> int:
        outputs = engine.generate(
            [{"prompt_token_ids": ids} for ids in batch], sampling, use_tqdm=False
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return measured(generate)


def help_vllms_own_model() -> None:
    """What vLLM 0.32's own CPU model lacks to run at all on a machine without AMX."""
    from atom_vllm_bridge import engine_kernels
    from atom_vllm_bridge.engine_kernels import interpreter

    interpreter.install()
    engine_kernels.register()
    from vllm.models.deepseek_v4.cpu import cpu_mla

    owner: Any = next(
        cls
        for cls in vars(cpu_mla).values()
        if getattr(cls, "__module__", "") == cpu_mla.__name__
        and "build_tile_scheduler" in vars(cls)
    )
    build = owner.build_tile_scheduler

    def with_every_key(self: Any, num_decode_tokens: int) -> dict[str, Any]:
        return dict.fromkeys(("c1a", "c2a")) | build(self, num_decode_tokens)

    owner.build_tile_scheduler = with_every_key


def one(engine: str, dtype: str, checkpoint: Path) -> None:
    """Measure one engine in this process and print its speeds as the last line."""
    if engine == "transformers":
        speed = run_transformers(checkpoint, dtype)
    else:
        speed = run_vllm(checkpoint, dtype, own=engine == "vllm")
    print(json.dumps(speed))


def in_a_process(
    command: list[str], threads: int, environment: dict[str, str] | None = None
) -> Any:
    """What a script of this folder prints last, by number of requests; or the last line of what went wrong."""
    every = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    done = subprocess.run(
        [sys.executable, *command],
        env=every | (environment or {}),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    return {int(k): v for k, v in json.loads(done.stdout.splitlines()[-1]).items()}


def speeds_of(engine: str, dtype: str, checkpoint: Path, threads: int) -> Any:
    """Speeds of one engine, by number of requests, or what went wrong."""
    environment = {}
    if engine == "vllm":
        environment = {
            "ATOM_BRIDGE_DISABLE": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }
    command = [__file__, "--one", engine, dtype, str(checkpoint)]
    return in_a_process(command, threads, environment)


def main(
    checkpoint: Annotated[
        Path | None, typer.Option(help="A DeepSeek-V4 checkpoint in bf16.")
    ] = None,
    threads: Annotated[int, typer.Option(help="OpenMP threads of each engine.")] = 2,
) -> None:
    """Print tokens a second at 1 and 8 requests, and how the bridge compares."""
    from tabulate import tabulate

    from atom_vllm_bridge.checkpoint.make import make

    with tempfile.TemporaryDirectory() as folder:
        if checkpoint is None:
            checkpoint = make(Path(folder) / "tiny", layout="bf16", draft="none")
        speeds = {
            name: speeds_of(engine, dtype, checkpoint, threads)
            for name, (engine, dtype) in ENGINES.items()
        }
    rows = []
    for name, (engine, dtype) in ENGINES.items():
        speed, ours = speeds[name], speeds[f"bridge, {dtype}"]
        if isinstance(speed, str):
            rows.append([name, speed, "", "", ""])
            continue
        ratios = ["", ""]
        if engine != "bridge":
            ratios = [f"{ours[count] / speed[count]:.1f} ×" for count in REQUESTS]
        rows.append([name, *(f"{speed[count]:.1f}" for count in REQUESTS), *ratios])
    titles = [f"{count} at once" for count in REQUESTS]
    print(
        f"Tokens a second, {PROMPT} prompt and {NEW} new tokens, {threads} threads, "
        f"median of {REPEATS}; and the bridge's speed as a multiple.\n"
    )
    print(tabulate(rows, ["engine", *titles, *titles], tablefmt="github"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
    else:
        typer.run(main)
