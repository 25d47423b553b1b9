"""Products with weights at DeepSeek-V4-Flash's dimensions: µs, bytes that must move, and their rate as a share of a copy's.

    python benchmarks/gpu_ops_products.py                    the table: each provider beside the others
    python benchmarks/gpu_ops_products.py --providers triton,vllm experts
    python benchmarks/gpu_ops_products.py experts            some ops
    python benchmarks/gpu_ops_products.py --hints experts    Triton's under other launch hints

`triton` and `vllm` (engine_ops.py) keep weights as the checkpoint has them, fp8 and, experts, mxfp4; `torch` has them in bfloat16. A time is
of one launch in a graph of twenty, each with weights of its own, or with experts of its own, so that they come from memory.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import typer
from gpu_ops import (
    BATCHES,
    CHOSEN,
    EXPERTS,
    HIDDEN,
    INNER,
    LAUNCHES,
    copy_speed,
    microseconds,
    size,
)

from atom_vllm_bridge.models.ops.registry import resolve_from
from atom_vllm_bridge.models.ops.triton.products import Hint
from atom_vllm_bridge.models.quantization.kept import PLANES, Band, Kept

BF16 = {"dtype": torch.bfloat16, "device": "cuda"}
RANK, QUERIES, INDEX, GROUPS = 1024, 64 * 512, 64 * 128, 8
# A CSA layer's input projection: wq_a and wkv, which are fp8; compressors and the indexer's weights.
FIRST, REST = RANK + 512, 2 * 1024 + 2 * 256 + 64
PREFILL = 2048
# To try; experts have no use for the programs.
HINTS = tuple(
    Hint(1 << 62, *hint)
    for hint in (
        (16, 64, 4, 4, False, 528),
        (16, 64, 4, 3, False, 1056),
        (16, 64, 4, 3, True, 528),
        (16, 128, 4, 3, True, 264),
        (32, 64, 4, 3, False, 264),
        (64, 64, 4, 3, True, 132),
        (64, 128, 4, 2, True, 132),
        (128, 128, 8, 3, True, 132),
    )
)


@dataclass(frozen=True)
class Products:
    """An op on weights.

    Attributes:
        op: its stem.
        weights: makes the weights of one launch, kept or plain.
        call: the op, a batch and weights → what to run, and the bytes that it moves.
        shared: whether launches share weights, because each takes others of them.
    """

    op: str
    weights: Callable[[bool], Sequence[torch.Tensor | Kept]]
    call: Callable[..., tuple[Callable[[], Any], int]]
    shared: bool = False


def kept(
    formats: Sequence[str], outputs: Sequence[int], inputs: int, count: int | None
) -> Kept:
    """Random bits; scales that keep values small."""
    w = Kept(outputs, inputs, count, torch.bfloat16, torch.device("cuda"))
    for i, (name, band) in enumerate(zip(formats, w.bands, strict=True)):
        if name == "plain":
            band.fill(0, torch.randn(band.rows, inputs, **BF16) * inputs**-0.5)
            continue
        planes = PLANES[name]
        steps = -(-inputs // planes.step)
        words = torch.randint(
            -(2**31), 2**31, (band.rows, steps * 32), device="cuda", dtype=torch.int32
        )
        scales = torch.randint(
            112, 118, (band.rows, steps * planes.groups), device="cuda"
        )
        scales = (scales + planes.offset).to(torch.uint8)
        w.bands[i] = Band(
            band.rows, inputs, band.dtype, band.device, name, words, scales
        )
    return w


def matrix(
    keeps: bool,
    formats: Sequence[str],
    outputs: Sequence[int],
    inputs: int,
    count: int | None = None,
    by_output: bool = False,
) -> torch.Tensor | Kept:
    if keeps:
        return kept(formats, outputs, inputs, count)
    one = (sum(outputs), inputs) if by_output else (inputs, sum(outputs))
    shape = one if count is None else (count, *one)
    return torch.randn(shape, **BF16) * inputs**-0.5


def held(w: torch.Tensor | Kept) -> int:
    """Bytes."""
    if isinstance(w, torch.Tensor):
        return size(w)
    return sum(
        size(b.values) + (size(b.scales) if b.scales is not None else 0)
        for b in w.bands
    )


def linear(formats: Sequence[str], outputs: Sequence[int], inputs: int) -> Products:
    def call(op, batch, w):
        x = torch.randn(batch, inputs, **BF16)
        return partial(op, x, w), held(w) + size(x) + 2 * batch * sum(outputs)

    return Products(
        "linear", lambda keeps: [matrix(keeps, formats, outputs, inputs)], call
    )


def projection_weights(keeps: bool) -> Sequence[torch.Tensor | Kept]:
    width, low = QUERIES // GROUPS, GROUPS * RANK
    wo_a = matrix(keeps, ["fp8"], [RANK], width, GROUPS, by_output=True)
    return wo_a, matrix(keeps, ["fp8"], [HIDDEN], low)


def projection(op, batch, wo_a, wo_b):
    o = torch.randn(batch, 64, 512, **BF16)
    moved = held(wo_a) + held(wo_b) + size(o) + 2 * batch * (2 * GROUPS * RANK + HIDDEN)
    return partial(op, o, wo_a, wo_b), moved


def shared_weights(keeps: bool) -> Sequence[torch.Tensor | Kept]:
    w13 = matrix(keeps, ["fp8"], [2 * INNER], HIDDEN)
    return w13, matrix(keeps, ["fp8"], [HIDDEN], INNER)


def shared_expert(op, batch, w13, w2):
    x = torch.randn(batch, HIDDEN, **BF16)
    moved = held(w13) + held(w2) + 2 * size(x) + 2 * batch * 6 * INNER
    return partial(op, x, w13, w2, 10.0), moved


def expert_weights(keeps: bool) -> Sequence[torch.Tensor | Kept]:
    w13 = matrix(keeps, ["mxfp4"], [2 * INNER], HIDDEN, EXPERTS)
    return w13, matrix(keeps, ["mxfp4"], [HIDDEN], INNER, EXPERTS)


def routed_experts(op, batch, w13, w2):
    x = torch.randn(batch, HIDDEN, **BF16)
    chosen = torch.rand(batch, EXPERTS, device="cuda").topk(CHOSEN).indices
    weights = torch.rand(batch, CHOSEN, device="cuda")
    hit = len(chosen.unique())
    moved = (held(w13) + held(w2)) * hit // EXPERTS
    moved += size(x) + 2 * batch * CHOSEN * (3 * INNER + 2 * HIDDEN)
    return partial(op, x, chosen, weights, w13, w2, 10.0), moved


CASES: dict[str, Products] = {
    "linear w_in": linear(["fp8", "plain"], [FIRST, REST], HIDDEN),
    "linear wq_b": linear(["fp8"], [QUERIES + INDEX], RANK),
    "linear wo_b": linear(["fp8"], [HIDDEN], GROUPS * RANK),
    "grouped_output_projection": Products(
        "grouped_output_projection", projection_weights, projection
    ),
    "feed_forward": Products("feed_forward", shared_weights, shared_expert),
    "experts": Products("experts", expert_weights, routed_experts, shared=True),
}


def timed(case: Products, provider: str, batch: int) -> tuple[float, int]:
    """µs and bytes."""
    keeps, op = provider != "torch", resolve_from(provider, case.op)
    launches = LAUNCHES if batch < PREFILL else 4
    shared = case.weights(keeps) if case.shared else None
    calls, moved = [], 0
    for _ in range(launches):
        call, bytes_ = case.call(op, batch, *(shared or case.weights(keeps)))
        calls.append(call)
        moved += bytes_
    return microseconds(calls), moved // launches


def lines(
    names: list[str], providers: Sequence[str], batches: Sequence[int], speed: float
) -> Iterator[list[str]]:
    for name, case in CASES.items():
        if names and case.op not in names and name not in names:
            continue
        for provider in providers:
            line = [name, provider]
            for batch in batches:
                try:
                    took, moved = timed(case, provider, batch)
                # Whatever one raises (the compiler has errors of its own), the others are measured.
                except Exception as error:
                    line.append(f"{type(error).__name__}: {error}"[:60])
                    continue
                share = moved / took * 1e6 / speed
                line.append(f"{took:.1f} µs, {moved / 1e6:.1f} MB, {share:.0%}")
                torch.cuda.empty_cache()
            yield line


def hinted(names: list[str], speed: float) -> Iterator[list[str]]:
    """Triton's, under each of HINTS alone."""
    from atom_vllm_bridge.models.ops.triton import experts as of_experts
    from atom_vllm_bridge.models.ops.triton import linear as of_linear

    for hint in HINTS:
        of_linear.HINTS = (hint,)
        of_experts.HINTS = (hint,)
        for line in lines(names, ["triton"], BATCHES, speed):
            yield [str(hint[1:]), *line]


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Ops; all if none.")] = None,
    hints: Annotated[bool, typer.Option("--hints", help="Try launch hints.")] = False,
    providers: Annotated[str, typer.Option(help="Whose ops.")] = "triton,torch",
) -> None:
    torch.manual_seed(0)
    if "vllm" in providers.split(","):
        from atom_vllm_bridge import engine_ops

        engine_ops.configure("")
    with torch.inference_mode():
        speed = copy_speed()
        print(f"{torch.cuda.get_device_name()}, a copy moves {speed / 1e12:.2f} TB/s")
        batches = [*BATCHES, PREFILL]
        table = (
            hinted(names or [], speed)
            if hints
            else lines(names or [], providers.split(","), batches, speed)
        )
        for line in table:
            print("  ".join(line), flush=True)


if __name__ == "__main__":
    typer.run(main)
