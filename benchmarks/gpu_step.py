"""A decode step and a prefill of the model alone at DeepSeek-V4-Flash's dimensions, on a GPU: what they take, and where.

    python benchmarks/gpu_step.py                               batches of 1, 16, 64 and 128 at 1,024 tokens, and a prefill of 8,192
    python benchmarks/gpu_step.py --context 32768 --batch 1,16  longer
    python benchmarks/gpu_step.py --limit 1048576               with the graph captured for a longer limit than the context
    python benchmarks/gpu_step.py --ops experts=vllm            with ops of another provider, where vLLM is installed

Weights are random, in the published layout (fp8, mxfp4 experts), caches fp8. A step, output head included, is captured in a CUDA
graph and replayed. Its floor is what must be moved, each byte once (all weights that the step's tokens need, and the cache
entries that they read), at the speed of a copy.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
import typer
from gpu_ops import REPEATS, copy_speed
from tabulate import tabulate

from atom_vllm_bridge.checkpoint.presets import build_config
from atom_vllm_bridge.models.deepseek_v4.checkpoint import TensorSpec, tensor_table
from atom_vllm_bridge.models.deepseek_v4.config import CSA, HCA, DeepseekV4Config
from atom_vllm_bridge.models.deepseek_v4.loading import load
from atom_vllm_bridge.models.deepseek_v4.local_state import LocalState
from atom_vllm_bridge.models.deepseek_v4.model import DeepseekV4Model
from atom_vllm_bridge.models.ops.registry import Op
from atom_vllm_bridge.models.quantization.kv_codecs import kv_codec

KERNELS = 16


def random_tensor(spec: TensorSpec, experts: int) -> torch.Tensor:
    """Plausible values of a published tensor."""

    def bits(low: int, high: int) -> torch.Tensor:
        kind = {"dtype": torch.uint8, "device": "cuda"}
        return torch.randint(low, high, spec.shape, **kind)

    if spec.dtype == "F8_E4M3":
        sign = bits(0, 2) << 7
        return (bits(0, 0x60) | sign).view(torch.float8_e4m3fn)
    if spec.dtype == "F8_E8M0":
        return bits(112, 118).view(torch.float8_e8m0fnu)
    if spec.dtype in ("I8", "U8"):
        return bits(0, 256).view(torch.int8)
    if spec.dtype in ("I32", "I64"):
        return torch.rand(spec.shape[0], experts, device="cuda").argsort(1)[
            :, : spec.shape[1]
        ]
    dtype = {"BF16": torch.bfloat16, "F32": torch.float32}[spec.dtype]
    return 0.02 * torch.randn(spec.shape, device="cuda", dtype=dtype)


def build(layers: int) -> tuple[DeepseekV4Model, dict[str, int]]:
    """The model, and the bytes of each of its published tensors."""
    published = build_config("flash-shaped", layers=layers, draft="none")
    config = DeepseekV4Config.from_hf(published)
    model = DeepseekV4Model(
        config,
        dtype=torch.bfloat16,
        device="cuda",
        kv_codec=kv_codec("fp8_ds_mla", torch.bfloat16, config),
    )
    table = tensor_table(published, "mxfp4", stages=0)
    # Tensors of one shape share their values, but not their memory.
    made: dict[TensorSpec, torch.Tensor] = {}

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, spec in table.items():
            if spec not in made:
                made[spec] = random_tensor(spec, config.n_routed_experts)
            yield name, made[spec]

    load(model.weight_slots(), tensors())
    return model, {name: spec.nbytes for name, spec in table.items()}


def floor_bytes(
    model: DeepseekV4Model,
    sizes: dict[str, int],
    batch: int,
    context: int,
    met: list[int],
) -> float:
    """Bytes that a decode step has to move; `met`: how many experts of each layer it takes."""
    config, codec = model.config, model.codec
    of_experts = sum(size for name, size in sizes.items() if ".ffn.experts." in name)
    of_one = of_experts / len(model.layers) / config.n_routed_experts
    weights = sum(met) * of_one
    for name, size in sizes.items():
        unread = name == "embed.weight" or name.endswith("tid2eid")
        if not unread and ".ffn.experts." not in name:
            weights += size
    row = codec.kv.width * codec.kv.dtype.itemsize
    index_row = codec.index.width * codec.index.dtype.itemsize
    read = 0
    for layer_type in config.layer_types:
        read += min(context, config.sliding_window) * row
        if layer_type == CSA:
            entries = context // 4
            read += entries * index_row + min(entries, config.index_topk) * row
        elif layer_type == HCA:
            read += context // 128 * row
    return weights + batch * read


@contextmanager
def noting_experts(model: DeepseekV4Model, met: list[int]) -> Iterator[None]:
    """Append how many experts each layer takes."""
    plain = [layer.ffn.experts for layer in model.layers]

    def noting(op: Op) -> Op:
        def noted(x: torch.Tensor, chosen: torch.Tensor, *rest: Any) -> torch.Tensor:
            met.append(len(chosen.unique()))
            return op(x, chosen, *rest)

        return noted

    for layer, op in zip(model.layers, plain, strict=True):
        layer.ffn.experts = noting(op)
    yield
    for layer, op in zip(model.layers, plain, strict=True):
        layer.ffn.experts = op


class Step:
    """A decode step of `batch` requests at `context` tokens, captured."""

    def __init__(
        self, model: DeepseekV4Model, batch: int, context: int, limit: int
    ) -> None:
        config = model.config
        state = LocalState(config, batch, context, model.codec, device="cuda")
        for rows in state.rows.values():
            if rows.dtype == torch.uint8:
                rows.random_(0, 100)
        info, caches = state.step([(r, context - 1, 1) for r in range(batch)])
        info = dataclasses.replace(info, max_seq_len=max(limit, context))
        ids = torch.randint(config.vocab_size, (batch,), device="cuda")

        def step() -> torch.Tensor:
            streams, _ = model(ids, info, caches)
            return model.logits(model.reduce(streams))

        self.met: list[int] = []
        with noting_experts(model, self.met):
            step()
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            step()
        self.stream.synchronize()
        # What was derived outside the graph is derived again inside.
        tables = {id(c.table): c.table for s in caches for c in vars(s).values() if c}
        for table in tables.values():
            table._derived.clear()
        info = dataclasses.replace(info)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.logits = step()
        self.caches = caches

    def milliseconds(self) -> float:
        self.graph.replay()
        times = []
        for _ in range(REPEATS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self.graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return sorted(times)[len(times) // 2]


def kernels(run: Any, repeats: int = 3) -> list[list[Any]]:
    """Of a run: each kernel's name, calls, µs in all."""
    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    counts: dict[str, int] = defaultdict(int)
    times: dict[str, float] = defaultdict(float)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            counts[event.name] += 1
            times[event.name] += event.device_time
    order = sorted(times, key=lambda name: -times[name])
    found = [[n[:100], counts[n] / repeats, times[n] / repeats] for n in order]
    return [
        *found[:KERNELS],
        added(f"{len(found[KERNELS:])} others", found[KERNELS:]),
        added("all", found),
    ]


def added(name: str, lines: list[list[Any]]) -> list[Any]:
    return [name, *(sum(column) for column in list(zip(*lines, strict=True))[1:])]


def show(title: str, lines: list[list[Any]]) -> None:
    headers = ["kernel", "calls", "µs"]
    print(f"\n{title}\n{tabulate(lines, headers, floatfmt='.1f')}", flush=True)


def prefill(model: DeepseekV4Model, tokens: int, profiled: bool) -> float:
    """Milliseconds of one chunk of a prompt."""
    ids = torch.randint(model.config.vocab_size, (tokens,), device="cuda")

    def run() -> None:
        state = LocalState(model.config, 1, tokens, model.codec, device="cuda")
        info, caches = state.step([(0, 0, tokens)])
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        streams, _ = model(ids, info, caches)
        model.logits(model.reduce(streams[-1:]))
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))

    times: list[float] = []
    for _ in range(3):
        run()
    if profiled:
        show(f"prefill of {tokens}", kernels(run, 1))
    return min(times[1:3])


def main(
    layers: Annotated[int, typer.Option(help="Of the model.")] = 8,
    batch: Annotated[str, typer.Option(help="Requests.")] = "1,16,64,128",
    context: Annotated[int, typer.Option(help="Tokens a request.")] = 1024,
    limit: Annotated[int, typer.Option(help="Tokens that the graph is for.")] = 0,
    prompt: Annotated[int, typer.Option(help="Tokens of the prefill; 0: none.")] = 8192,
    ops: Annotated[str, typer.Option(help="As ATOM_BRIDGE_OPS.")] = "",
    profile: Annotated[bool, typer.Option(help="List the kernels.")] = False,
) -> None:
    torch.manual_seed(0)
    if ops:
        from atom_vllm_bridge import engine_ops

        engine_ops.configure(ops)
    with torch.inference_mode():
        speed = copy_speed()
        name = torch.cuda.get_device_name()
        print(f"{name}, a copy moves {speed / 1e12:.2f} TB/s; {layers} layers")
        model, sizes = build(layers)
        lines = []
        for each in map(int, batch.split(",")):
            step = Step(model, each, context, limit)
            took = step.milliseconds()
            floor = floor_bytes(model, sizes, each, context, step.met)
            floor *= 1e3 / speed
            lines.append([each, f"{took:.3f}", f"{floor:.3f}", f"{took / floor:.2f}"])
            if profile:
                show(f"batch {each}, context {context}", kernels(step.graph.replay))
            del step
            torch.cuda.empty_cache()
        if prompt:
            took = prefill(model, prompt, profile)
            lines.append([f"prefill of {prompt}", f"{took:.1f}", "", ""])
    print()
    print(tabulate(lines, ["batch", "ms", "floor", "×"], disable_numparse=True))


if __name__ == "__main__":
    typer.run(main)
