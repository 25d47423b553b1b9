"""Attention and the indexer's ops in Triton at DeepSeek-V4-Flash's dimensions, against the bytes that must move.

    python benchmarks/gpu_ops_attention.py            the table
    python benchmarks/gpu_ops_attention.py --hints    attention under other launch hints

µs of one launch in a graph of twenty, bytes read and written once, and their rate as a share of a copy's.
"""

from collections.abc import Callable, Iterator
from typing import Annotated

import torch
import typer
from gpu_ops import BATCHES, LAUNCHES, copy_speed, microseconds

from atom_vllm_bridge.models.ops.registry import resolve_from
from atom_vllm_bridge.models.ops.torch.sparse_attention import Keys
from atom_vllm_bridge.models.quantization.kv_codecs import (
    RowCodec,
    fp8_ds_mla,
    fp8_row,
    raw,
)

# (most pairs, keys a block, warps, stages) to try.
HINTS = (
    (64, 32, 8, 2),
    (64, 64, 8, 2),
    (32, 32, 8, 2),
    (32, 32, 8, 3),
    (32, 16, 8, 2),
    (16, 32, 8, 2),
    (16, 32, 4, 2),
)
Case = tuple[str, Callable[[], object], int]


def _rows(codec: RowCodec, count: int) -> torch.Tensor:
    values = torch.randn(-(-count // 64), 64, codec.dim, device="cuda")
    return codec.encode(values)


def _keys(codec: RowCodec, tiles: int, queries: int, width: int) -> Keys:
    """Rows of each tile's own, in no order."""
    rows = _rows(codec, tiles * width)
    ids = torch.randperm(tiles * width, device="cuda").view(tiles, width)
    hidden = torch.zeros(tiles, queries, width, dtype=torch.bool, device="cuda")
    return Keys(rows, ids, hidden)


def attention(tiles: int, queries: int, more: int, codec: RowCodec) -> Case:
    """64 heads of 512 over the window and `more` compressed entries."""
    query = torch.randn(tiles, queries, 64, 512, device="cuda")
    sink = torch.randn(64, device="cuda")
    window = _keys(codec, tiles, queries, 127 + queries)
    compressed = _keys(codec, tiles, queries, more) if more else None
    op = resolve_from("triton", "sparse_attention")
    size = 2 * query.nbytes + tiles * (127 + queries + more) * (
        codec.width * codec.dtype.itemsize + 8 + queries
    )
    return (
        f"sparse_attention {codec.name} {tiles} × {queries}, {127 + queries} + {more} keys",
        lambda: op(query, sink, 512**-0.5, window, compressed, codec),
        size,
    )


def logits(tiles: int, queries: int, entries: int, codec: RowCodec) -> Case:
    """64 heads of 128 over all entries."""
    query = torch.randn(tiles, queries, 64, 128, device="cuda")
    weight = torch.randn(tiles, queries, 64, device="cuda")
    keys = _keys(codec, tiles, 1, entries)
    op = resolve_from("triton", "indexer_logits")
    available = torch.full((tiles, queries), entries, device="cuda")
    row = codec.width * codec.dtype.itemsize + 8 + 4 * queries
    return (
        f"indexer_logits {codec.name} {tiles} × {queries}, {entries} entries",
        lambda: op(query, weight, keys.rows, keys.ids, codec, available),
        query.nbytes + weight.nbytes + tiles * entries * row,
    )


def topk(rows: int, entries: int, k: int) -> Case:
    """The k best of all entries."""
    scores = torch.randn(rows, entries, device="cuda")
    available = torch.full((rows,), entries, device="cuda")
    op = resolve_from("triton", "indexer_topk")
    return (
        f"indexer_topk {k} of {entries}, {rows} rows",
        lambda: op(scores, available, k),
        scores.nbytes + rows * k * 8,
    )


def cases() -> Iterator[Case]:
    """Decode at several batches, then one prefill."""
    bf16, fp8 = raw(512, torch.bfloat16), fp8_ds_mla(512, 64)
    for batch in BATCHES:
        yield attention(batch, 1, 0, fp8)
        for codec in (bf16, fp8):
            yield attention(batch, 1, 512, codec)
        for index in (raw(128, torch.bfloat16), fp8_row(128)):
            yield logits(batch, 1, 8192, index)
        yield topk(batch, 8192, 512)
    yield attention(1, 1, 8192, fp8)
    yield topk(1, 1 << 18, 512)
    yield topk(8192, 2048, 512)
    yield attention(64, 128, 64, fp8)
    yield attention(8192, 1, 512, fp8)
    yield logits(64, 128, 2048, fp8_row(128))


def show(case: Case, rate: float) -> None:
    """One line of the table."""
    name, run, size = case
    time = microseconds([run] * LAUNCHES)
    share = size / time * 1e6 / rate
    print(f"{name:60} {time:9.1f} µs {size / 1e6:9.2f} MB {share:6.1%}", flush=True)


def show_hints(rate: float) -> None:
    """Attention under each of HINTS; the numbers are those of HINTS in ops/triton/sparse_attention.py."""
    import triton.language as tl

    from atom_vllm_bridge.models.ops.triton import sparse_attention as module

    for codec in (fp8_ds_mla(512, 64), raw(512, torch.bfloat16)):
        for tiles, queries, more in ((1, 1, 512), (64, 1, 512), (16, 128, 64)):
            case = attention(tiles, queries, more, codec)
            for hints in HINTS:
                module.HINTS = {**module.HINTS, tl.bfloat16: hints}
                print(hints, end=" ")
                # Whatever the compiler raises (shared memory may not do), the others are tried.
                try:
                    show(case, rate)
                except Exception as error:
                    print(f"{type(error).__name__}: {error}"[:100])


def main(
    hints: Annotated[bool, typer.Option("--hints", help="Try launch hints.")] = False,
) -> None:
    """Print the table."""
    rate = copy_speed()
    print(f"copy: {rate / 1e12:.2f} TB/s")
    if hints:
        show_hints(rate)
        return
    for case in cases():
        show(case, rate)


if __name__ == "__main__":
    typer.run(main)
