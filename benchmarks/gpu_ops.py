"""Microseconds of the row ops in Triton on a GPU at DeepSeek-V4-Flash's dimensions, beside the bytes that it must move.

    python benchmarks/gpu_ops.py                     every op, batches of 1, 16, 64 and 128 tokens
    python benchmarks/gpu_ops.py hc_pre router       some ops
    python benchmarks/gpu_ops.py --provider torch    the reference's time, of those ops that a graph can capture

An op is captured 20 times in a CUDA graph, each time on tensors of its own, so that a layer's weights and rows come from
memory as they do in a model, as far as 20 of them exceed the cache. The share is bytes a second against those of a copy; an op
of a small batch moves too little to come near it, and there the microseconds count.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import typer
from tabulate import tabulate

from atom_vllm_bridge.models.ops.registry import resolve_from
from atom_vllm_bridge.models.quantization.kv_codecs import (
    RowCodec,
    fp8_ds_mla,
    fp8_row,
    raw,
)

BATCHES = (1, 16, 64, 128)
LAUNCHES, REPEATS = 20, 10
COPIED = 1 << 30
HIDDEN, HEADS, DIM, PAIRS, RANK = 4096, 64, 512, 32, 1024
STREAMS, EXPERTS, CHOSEN, INNER, INDEX_DIM = 4, 256, 6, 2048, 128
MIXES = (2 + STREAMS) * STREAMS
EPS, ITERATIONS = 1e-6, 20


@dataclass(frozen=True)
class Case:
    """One op on tensors made for it.

    Attributes:
        op: its stem.
        arguments: of the call.
        moved: bytes that it has to read and write, each once.
    """

    op: str
    arguments: tuple[Any, ...]
    moved: int


def size(*tensors: torch.Tensor) -> int:
    """Bytes of tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def fp32(*shape: int) -> torch.Tensor:
    return draw(*shape, dtype=torch.float32)


def rotation(tokens: int) -> torch.Tensor:
    return torch.polar(torch.ones(tokens, PAIRS, device="cuda"), fp32(tokens, PAIRS))


def rows(codec: RowCodec, count: int) -> torch.Tensor:
    """A cache [B, 64, C] with at least `count` rows."""
    blocks = -(-count // 64) + 1
    return torch.zeros(blocks, 64, codec.width, device="cuda", dtype=codec.dtype)


def hc_pre(tokens: int) -> Case:
    streams, fn = draw(tokens, STREAMS, HIDDEN), fp32(MIXES, STREAMS * HIDDEN)
    rest = fp32(MIXES), fp32(3), ITERATIONS, EPS, EPS, fp32(HIDDEN)
    # Streams are read twice: their collapse needs all of them to be projected first.
    moved = 2 * size(streams) + size(fn) + 2 * tokens * HIDDEN
    return Case("hc_pre", (streams, fn, *rest), moved)


def hc_post(tokens: int) -> Case:
    x, streams = draw(tokens, HIDDEN), draw(tokens, STREAMS, HIDDEN)
    post, comb = fp32(tokens, STREAMS), fp32(tokens, STREAMS, STREAMS)
    moved = size(x, streams, streams, post, comb)
    return Case("hc_post", (x, streams, post, comb), moved)


def hc_head(tokens: int) -> Case:
    streams, fn = draw(tokens, STREAMS, HIDDEN), fp32(STREAMS, STREAMS * HIDDEN)
    moved = 2 * size(streams) + size(fn) + 2 * tokens * HIDDEN
    return Case("hc_head", (streams, fn, fp32(STREAMS), fp32(1), EPS, EPS), moved)


def write_keys(codec: RowCodec) -> Callable[[int], Case]:
    def build(tokens: int) -> Case:
        x, turn = draw(tokens, codec.dim), rotation(tokens)
        cache, ids = rows(codec, tokens), torch.randperm(tokens, device="cuda")
        weight = fp32(codec.dim)
        moved = size(x, turn, ids, weight) + size(cache[0, 0]) * tokens
        return Case("write_keys", (x, weight, EPS, turn, cache, ids, codec), moved)

    return build


def query_heads(tokens: int) -> Case:
    x, turn = draw(tokens, HEADS * DIM), rotation(tokens)
    return Case("query_heads", (x, HEADS, EPS, turn), 3 * size(x) + size(turn))


def inverse_rope(tokens: int) -> Case:
    x, turn = fp32(tokens, HEADS, DIM), rotation(tokens)
    moved = 2 * tokens * HEADS * 8 * PAIRS + size(turn)
    return Case("inverse_rope", (x, turn), moved)


def compressor_pool(ratio: int, dim: int) -> Callable[[int], Case]:
    """Every token completes an entry: of ratio 4 with overlap, which reads 8 tokens, of ratio 128 without."""
    sources, parts = (8, 4) if ratio == 4 else (ratio, 2)

    def build(entries: int) -> Case:
        state = fp32(entries, sources * parts, dim)
        part = torch.arange(entries * sources, device="cuda") * parts
        kv = part.view(entries, 1, sources)
        ids = torch.cat((kv, kv + parts // 2), 1)
        unseen = torch.zeros(entries, sources, dtype=torch.bool, device="cuda")
        moved = 4 * entries * dim * (2 * sources + 1) + size(ids, unseen)
        return Case("compressor_pool", (state, ids, unseen), moved)

    return build


def write_inputs(half: int) -> Callable[[int], Case]:
    def build(tokens: int) -> Case:
        inputs, ape = draw(tokens, 2 * half), fp32(4, half)
        ids = torch.randperm(tokens, device="cuda")
        cache = rows(raw(2 * half, torch.float32), tokens)
        moved = 3 * size(inputs) + size(ape, ids, ids)
        return Case("write_inputs", (inputs, ape, ids % 4, cache, ids), moved)

    return build


def router(tokens: int) -> Case:
    x, gate = draw(tokens, HIDDEN), fp32(EXPERTS, HIDDEN)
    moved = size(x, gate) + 12 * tokens * CHOSEN
    return Case("router", (x, gate, 1.5, CHOSEN, fp32(EXPERTS)), moved)


def rms_norm(tokens: int) -> Case:
    x = draw(tokens, RANK)
    return Case("rms_norm", (x, fp32(RANK), EPS), 2 * size(x) + 4 * RANK)


def swiglu(tokens: int) -> Case:
    hidden = draw(tokens, 2 * INNER)
    return Case("swiglu", (hidden, 10.0), size(hidden) * 3 // 2)


CASES: dict[str, Callable[[int], Case]] = {
    "hc_pre": hc_pre,
    "hc_post": hc_post,
    "hc_head": hc_head,
    "write_keys, bfloat16": write_keys(raw(DIM, torch.bfloat16)),
    "write_keys, fp8_ds_mla": write_keys(fp8_ds_mla(DIM, 2 * PAIRS)),
    "write_keys, fp8_row": write_keys(fp8_row(INDEX_DIM)),
    "query_heads": query_heads,
    "inverse_rope": inverse_rope,
    "compressor_pool, 4": compressor_pool(4, DIM),
    "compressor_pool, 128": compressor_pool(128, DIM),
    "compressor_pool, index": compressor_pool(4, INDEX_DIM),
    "write_inputs": write_inputs(2 * DIM),
    "router": router,
    "rms_norm": rms_norm,
    "swiglu": swiglu,
}


def microseconds(calls: Sequence[Callable[[], Any]]) -> float:
    """Of one call, in the replay of a CUDA graph of all of them; the best of several replays."""
    stream = torch.cuda.Stream()
    # What calls read is still being made on this one.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times) * 1e3 / len(calls)


def copy_speed() -> float:
    """Bytes a second read and written by a copy of a GiB."""
    source = torch.zeros(COPIED // 4, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    # By a kernel: in a graph a plain copy is given to another engine of the device, which is slower.
    return 2e6 * COPIED / microseconds([lambda: torch.neg(source, out=target)] * 3)


def measured(
    names: list[str], provider: str, batches: tuple[int, ...], speed: float
) -> Iterator[list[str]]:
    """A line a case: its name, then µs, bytes and share for each batch."""
    for name, build in CASES.items():
        if names and name.split(",")[0] not in names:
            continue
        line = [name]
        for batch in batches:
            try:
                cases = [build(batch) for _ in range(LAUNCHES)]
                function = resolve_from(provider, cases[0].op)
                calls = [partial(function, *case.arguments) for case in cases]
                took = microseconds(calls)
            # Whatever one op raises (the compiler has errors of its own), the others are measured.
            except Exception as error:
                line.append(f"{type(error).__name__}: {error}"[:60])
                continue
            share = cases[0].moved / took * 1e6 / speed
            line.append(f"{took:.1f} µs, {cases[0].moved / 1e6:.2f} MB, {share:.0%}")
        yield line


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Ops; all if none.")] = None,
    provider: Annotated[str, typer.Option(help="Whose ops.")] = "triton",
) -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        speed = copy_speed()
        print(f"{torch.cuda.get_device_name()}, a copy moves {speed / 1e12:.2f} TB/s")
        lines = list(measured(names or [], provider, BATCHES, speed))
    headers = ["op", *(f"batch {batch}" for batch in BATCHES)]
    print(tabulate(lines, headers, disable_numparse=True))


if __name__ == "__main__":
    typer.run(main)
