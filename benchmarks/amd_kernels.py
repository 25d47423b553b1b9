"""Compile every Triton kernel of models/ops/triton for AMD GPUs, without one, and list what each takes of a processor.

    python benchmarks/amd_kernels.py                        the table of docs/amd-kernels.md, for gfx942 and gfx950
    python benchmarks/amd_kernels.py --target gfx942 hc_pre router
    python benchmarks/amd_kernels.py --json                 a line of JSON a kernel

Ops are called as the model calls them, at DeepSeek-V4-Flash's dimensions, on tensors of a CPU; what they would launch is compiled
with the launch's own hints and thrown away. Only the compiler runs: nothing here says that a kernel computes the right thing or
is fast on such a GPU.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import triton
import typer
from tabulate import tabulate
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from atom_vllm_bridge.models.ops.blocks import Blocks
from atom_vllm_bridge.models.ops.registry import resolve_from
from atom_vllm_bridge.models.ops.torch.sparse_attention import Keys
from atom_vllm_bridge.models.quantization.kept import PLANES, Band, Kept
from atom_vllm_bridge.models.quantization.kv_codecs import (
    RowCodec,
    fp8_ds_mla,
    fp8_row,
    raw,
)

TARGETS = ("gfx942", "gfx950")
# Bytes of local memory (LDS) that a workgroup may have, by AMD's CDNA 3 and CDNA 4 instruction set documents.
LOCAL_MEMORY = {"gfx942": 64 << 10, "gfx950": 160 << 10}
WAVE = 64
HIDDEN, HEADS, DIM, PAIRS, RANK = 4096, 64, 512, 32, 1024
STREAMS, EXPERTS, CHOSEN, INNER, INDEX_DIM = 4, 256, 6, 2048, 128
GROUPS, MIXES, EPS = 8, (2 + 4) * 4, 1e-6
KV, INDEX = fp8_ds_mla(DIM, 2 * PAIRS), fp8_row(INDEX_DIM)
BF16, FP32 = raw(DIM, torch.bfloat16), raw(DIM, torch.float32)


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of one kernel.

    Attributes:
        kernel: its name in ops/triton.
        case: the op and what distinguishes the call.
        target: the architecture.
        vgprs: vector registers a lane, the accumulation registers included.
        spilled: vector registers that lie in memory instead.
        local: bytes of local memory a workgroup.
        waves: of 64 lanes, a workgroup.
    """

    kernel: str
    case: str
    target: str
    vgprs: int
    spilled: int
    local: int
    waves: int


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def fp32(*shape: int) -> torch.Tensor:
    return draw(*shape, dtype=torch.float32)


def ids(*shape: int) -> torch.Tensor:
    return draw(*shape, dtype=torch.int64)


def rotation(tokens: int) -> torch.Tensor:
    return draw(tokens, PAIRS, dtype=torch.complex64)


def rows(codec: RowCodec) -> torch.Tensor:
    return draw(2, 64, codec.width, dtype=codec.dtype)


def kept(
    formats: list[str], outputs: list[int], inputs: int, count: int | None = None
) -> Kept:
    """A matrix, or several, whose bands have these formats."""
    w = Kept(outputs, inputs, count, torch.bfloat16, torch.device("cpu"))
    for i, (name, band) in enumerate(zip(formats, w.bands, strict=True)):
        if name == "plain":
            band.fill(0, draw(band.rows, inputs))
            continue
        planes = PLANES[name]
        steps = -(-inputs // planes.step)
        words = draw(band.rows, steps * 32, dtype=torch.int32)
        scales = draw(band.rows, steps * planes.groups, dtype=torch.uint8)
        w.bands[i] = Band(
            band.rows, inputs, band.dtype, band.device, name, words, scales
        )
    return w


def keys(codec: RowCodec, tiles: int, queries: int, width: int) -> Keys:
    hidden = torch.zeros(tiles, queries, width, dtype=torch.bool)
    return Keys(rows(codec), ids(tiles, width), hidden)


def attention(codec: RowCodec, tiles: int, queries: int) -> tuple[Any, ...]:
    window, compressed = keys(codec, tiles, queries, 127 + queries), keys(
        codec, tiles, queries, 512
    )
    return (
        fp32(tiles, queries, HEADS, DIM),
        fp32(HEADS),
        0.04,
        window,
        compressed,
        codec,
    )


def logits(codec: RowCodec, tiles: int, queries: int, entries: int) -> tuple[Any, ...]:
    query, weight = fp32(tiles, queries, HEADS, INDEX_DIM), fp32(tiles, queries, HEADS)
    return query, weight, rows(codec), ids(tiles, entries), codec, ids(tiles, queries)


def routed(tokens: int) -> tuple[Any, ...]:
    """Of eight experts, so that more tokens mean more slots an expert."""
    w13, w2 = kept(["mxfp4"], [2 * INNER], HIDDEN, 8), kept(
        ["mxfp4"], [HIDDEN], INNER, 8
    )
    return (
        draw(tokens, HIDDEN),
        ids(tokens, CHOSEN),
        fp32(tokens, CHOSEN),
        w13,
        w2,
        10.0,
    )


def projections(tokens: int) -> tuple[Any, ...]:
    wo_a = kept(["fp8"], [RANK], HEADS * DIM // GROUPS, GROUPS)
    return draw(tokens, HEADS, DIM), wo_a, kept(["fp8"], [HIDDEN], GROUPS * RANK)


def pooled(ratio: int, dim: int) -> tuple[Any, ...]:
    sources, parts = (8, 4) if ratio == 4 else (ratio, 2)
    state = fp32(4, sources * parts, dim)
    return state, ids(4, 2, sources), torch.zeros(4, sources, dtype=torch.bool)


def blocks(per_block: int, parts: int = 1) -> Blocks:
    return Blocks(draw(4, 64, dtype=torch.int32), per_block, 32 * per_block, parts)


def planned(ratio: int, tokens: int) -> tuple[Any, ...]:
    sources, parts, per_block = (8, 4, 4) if ratio == 4 else (ratio, 2, 8)
    where = ids(tokens), ids(tokens), ids(tokens), 4, ratio, sources, fp32(PAIRS)
    return blocks(per_block, parts), blocks(128 // ratio), *where


def stored(codec: RowCodec) -> tuple[Any, ...]:
    tokens = 4
    return (
        draw(tokens, codec.dim),
        fp32(codec.dim),
        EPS,
        rotation(tokens),
        rows(codec),
        ids(tokens),
        codec,
    )


def read(tokens: int) -> tuple[Any, ...]:
    streams, fn = draw(tokens, STREAMS, HIDDEN), fp32(MIXES, STREAMS * HIDDEN)
    return streams, fn, fp32(MIXES), fp32(3), 20, EPS, EPS, fp32(HIDDEN)


# Op and what distinguishes the call → its arguments.
CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "hc_pre": lambda: read(4),
    "hc_pre, 128 tokens": lambda: read(128),
    "hc_post": lambda: (
        draw(4, HIDDEN),
        draw(4, STREAMS, HIDDEN),
        fp32(4, STREAMS),
        fp32(4, STREAMS, STREAMS),
    ),
    "hc_head": lambda: (
        draw(4, STREAMS, HIDDEN),
        fp32(STREAMS, STREAMS * HIDDEN),
        fp32(STREAMS),
        fp32(1),
        EPS,
        EPS,
    ),
    "request_of_token": lambda: (draw(5, dtype=torch.int32), 4),
    "tiles": lambda: (draw(5, dtype=torch.int32), ids(24), ids(24), 6, 8),
    "rotations": lambda: (ids(4), fp32(PAIRS)),
    "slot_rows": lambda: (ids(4), 64, 1, 2048),
    "ring_slots": lambda: (
        draw(4, 1, dtype=torch.int32),
        draw(5, dtype=torch.int32),
        ids(24),
        ids(24),
        136,
    ),
    "window_rows": lambda: (blocks(64), ids(4), ids(4), ids(4), None, 1, 128),
    "block_rows": lambda: (
        blocks(64),
        ids(4),
        ids(4),
        draw(4, dtype=torch.int32),
        5,
        128,
    ),
    "entry_rows": lambda: (blocks(1), ids(4), ids(4), ids(4), 1, 1024, 128),
    "selected_rows": lambda: (blocks(32), ids(4), ids(4, 512)),
    "pooled_rows": lambda: planned(4, 4),
    "pooled_rows, packed": lambda: planned(128, 24),
    "rms_norm": lambda: (draw(4, RANK), fp32(RANK), EPS),
    "rope": lambda: (fp32(4, HEADS, INDEX_DIM), rotation(4)),
    "inverse_rope": lambda: (fp32(4, HEADS, DIM), rotation(4)),
    "query_heads": lambda: (draw(4, HEADS * DIM), HEADS, EPS, rotation(4)),
    "swiglu": lambda: (draw(4, 2 * INNER), 10.0),
    "router": lambda: (
        draw(4, HIDDEN),
        fp32(EXPERTS, HIDDEN),
        1.5,
        CHOSEN,
        fp32(EXPERTS),
    ),
    "router, hash, 128 tokens": lambda: (
        draw(128, HIDDEN),
        fp32(EXPERTS, HIDDEN),
        1.5,
        CHOSEN,
        None,
        ids(128, CHOSEN),
    ),
    "write_keys, float32": lambda: stored(FP32),
    "write_keys, bfloat16": lambda: stored(BF16),
    "write_keys, fp8_ds_mla": lambda: stored(KV),
    "write_keys, fp8_row": lambda: stored(INDEX),
    "write_inputs": lambda: (
        draw(4, 4 * DIM),
        fp32(4, 2 * DIM),
        ids(4),
        fp32(2, 64, 4 * DIM),
        ids(4),
    ),
    "write_rows": lambda: (rows(BF16), ids(4), draw(4, DIM)),
    "compressor_pool, 4": lambda: pooled(4, DIM),
    "compressor_pool, 128": lambda: pooled(128, DIM),
    "compressor_pool, index": lambda: pooled(4, INDEX_DIM),
    "indexer_logits, decode": lambda: logits(INDEX, 4, 1, 4096),
    "indexer_logits, prefill": lambda: logits(INDEX, 4, 128, 16384),
    "indexer_logits, float32": lambda: logits(
        raw(INDEX_DIM, torch.float32), 4, 1, 4096
    ),
    "indexer_topk": lambda: (fp32(4, 2048), ids(4), 512),
    "indexer_topk, few": lambda: (fp32(4, 256), ids(4), 64),
    "indexer_topk, rounds": lambda: (fp32(4, 40000), ids(4), 512),
    "sparse_attention, decode": lambda: attention(KV, 4, 1),
    "sparse_attention, prefill": lambda: attention(KV, 4, 128),
    "sparse_attention, bfloat16": lambda: attention(BF16, 4, 1),
    "sparse_attention, float32": lambda: attention(FP32, 4, 1),
    "linear, fp8 beside plain": lambda: (
        draw(4, HIDDEN),
        kept(["fp8", "plain"], [1536, 2624], HIDDEN),
    ),
    "linear, 64 rows": lambda: (draw(64, RANK), kept(["fp8"], [HEADS * DIM], RANK)),
    "linear, unpacked": lambda: (draw(512, RANK), kept(["fp8"], [RANK], RANK)),
    "grouped_output_projection": lambda: projections(4),
    "feed_forward": lambda: (
        draw(4, HIDDEN),
        kept(["fp8"], [2 * INNER], HIDDEN),
        kept(["fp8"], [HIDDEN], INNER),
        10.0,
    ),
    "experts": lambda: routed(4),
    "experts, 24 slots each": lambda: routed(24),
    "experts, 96 slots each": lambda: routed(96),
    "experts, prefill": lambda: routed(512),
}


@contextmanager
def compiling(target: str) -> Iterator[list[tuple[str, Any]]]:
    """Launches become compilations for `target`; yields (name, kernel) in their order."""
    made: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["warmup"] = True
        if (
            "TERMS" in kwargs
        ):  # asks whether the tensor is a GPU's, which here it would be
            kwargs["TERMS"] = args[0].dtype == torch.bfloat16
        made.append((self.__name__, run(self, *args, **kwargs)))
        return made[-1][1]

    pretended = SimpleNamespace(
        get_current_target=lambda: GPUTarget("hip", target, WAVE),
        get_current_device=lambda: target,
        get_current_stream=lambda device: 0,
    )
    triton.runtime.driver.set_active(pretended)
    JITFunction.run, torch.version.hip = compile_only, target
    try:
        yield made
    finally:
        JITFunction.run, torch.version.hip = run, None


def described(kernel: Any, name: str, case: str, target: str) -> Compiled:
    """Read the resources from the code's metadata."""
    code = kernel.asm["amdgcn"]

    def count(field: str) -> int:
        found = re.search(rf"\.{field}:\s+(\d+)", code)
        assert found, f"{name}: the code object does not say {field}"
        return int(found[1])

    return Compiled(
        name,
        case,
        target,
        count("vgpr_count"),
        count("vgpr_spill_count"),
        kernel.metadata.shared,
        kernel.metadata.num_warps,
    )


def compiled(target: str, names: list[str]) -> Iterator[Compiled]:
    """Every kernel that these cases, or those of these ops, launch, or all; each once, however many cases launch it."""
    seen = set()
    for case, arguments in CASES.items():
        op = case.split(",")[0]
        if names and not {op, case}.intersection(names):
            continue
        with compiling(target) as made:
            resolve_from("triton", op)(*arguments())
        for name, kernel in made:
            if id(kernel) not in seen:
                seen.add(id(kernel))
                yield described(kernel, name, case, target)


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Ops or cases; all if none.")
    ] = None,
    target: Annotated[list[str] | None, typer.Option(help="Architectures.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="A line of JSON a kernel.")
    ] = False,
) -> None:
    found = [line for one in target or TARGETS for line in compiled(one, names or [])]
    if as_json:
        for line in found:
            print(json.dumps(asdict(line)))
        return
    print(tabulate(map(asdict, found), headers="keys", tablefmt="github"))


if __name__ == "__main__":
    typer.run(main)
