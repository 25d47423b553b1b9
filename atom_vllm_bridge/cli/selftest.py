"""`doctor --selftest`: every op of every provider that runs here, on small seeded inputs, against torch's in float32.

A check draws its inputs and gives the op's result; the reference gets the same draws. What an op changes in place is its
result.
"""

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch

from atom_vllm_bridge import engine_ops
from atom_vllm_bridge.checkpoint.presets import build_config
from atom_vllm_bridge.cli import index_checks
from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
from atom_vllm_bridge.models.deepseek_v4.local_state import LocalState
from atom_vllm_bridge.models.deepseek_v4.model import DeepseekV4Model
from atom_vllm_bridge.models.deepseek_v4.packing import pack as pack_model
from atom_vllm_bridge.models.ops import panels, registry
from atom_vllm_bridge.models.ops.registry import Op
from atom_vllm_bridge.models.ops.torch.sparse_attention import Keys
from atom_vllm_bridge.models.quantization import mxfp4
from atom_vllm_bridge.models.quantization.kept import Kept
from atom_vllm_bridge.models.quantization.kv_codecs import kv_codec, raw

EPS = 1e-6
# ‖out − reference‖ / ‖reference‖; the second where a provider takes bfloat16 alone.
TOLERANCE, TOLERANCE_BFLOAT16 = 1e-4, 2e-2
Result: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]


class Draw:
    """Seeded values, the same on every device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device)

    def below(self, limit: int, *shape: int) -> torch.Tensor:
        """Integers from 0."""
        drawn = torch.randint(0, limit, shape, generator=self._generator)
        return drawn.to(self.device)

    def different(self, limit: int, *shape: int) -> torch.Tensor:
        """Integers from 0, of which no two are equal."""
        order = torch.randperm(limit, generator=self._generator)
        return order[: math.prod(shape)].view(shape).to(self.device)

    def rotation(self, tokens: int, pairs: int = 4) -> torch.Tensor:
        angle = self(tokens, pairs)
        return torch.polar(torch.ones_like(angle), angle)

    def slots(self, limit: int, count: int) -> torch.Tensor:
        """Rows to write, one of them none."""
        ids = self.different(limit, count)
        ids[1] = -1
        return ids

    def matrix(self, inputs: int, outputs: int, many: int | None = None) -> Any:
        """As the device's products take it: panels on a CPU, mxfp4 on a GPU."""
        if self.device != "cpu":
            return self.mxfp4(inputs, outputs, many)
        shape = (inputs, outputs) if many is None else (many, inputs, outputs)
        return panels.cut(self(*shape) / inputs**0.5)

    def mxfp4(self, inputs: int, outputs: int, many: int | None) -> Kept:
        device = torch.device(self.device)
        kept = Kept([outputs], inputs, many, torch.bfloat16, device)
        for first in range(0, (many or 1) * outputs, outputs):
            values = self(outputs, inputs) / inputs**0.5
            kept.rows(first, first + outputs).keep(*mxfp4.quantize(values))
        return kept


def rms_norm(op: Op, draw: Draw) -> Result:
    return op(draw(5, 64), draw(64), EPS), op(draw(5, 3, 32), None, EPS)


def rope(op: Op, draw: Draw) -> Result:
    return op(draw(5, 3, 16), draw.rotation(5))


def inverse_rope(op: Op, draw: Draw) -> Result:
    x = draw(5, 3, 16)
    op(x, draw.rotation(5))
    return x


def query_heads(op: Op, draw: Draw) -> Result:
    return op(draw(5, 48), 3, EPS, draw.rotation(5))


def hc_pre(op: Op, draw: Draw) -> Result:
    weights = (draw(24, 4 * 32) / 10, draw(24), draw(3))
    return op(draw(5, 4, 32), *weights, 4, EPS, EPS, draw(32))


def hc_post(op: Op, draw: Draw) -> Result:
    return op(draw(5, 32), draw(5, 4, 32), draw(5, 4), draw(5, 4, 4))


def hc_head(op: Op, draw: Draw) -> Result:
    return op(draw(5, 4, 32), draw(4, 4 * 32) / 10, draw(4), draw(1), EPS, EPS)


def linear(op: Op, draw: Draw) -> Result:
    x = draw(5, 64)
    return op(x, draw(64, 48) / 8), op(x, draw.matrix(64, 96))


def grouped_output_projection(op: Op, draw: Draw) -> Result:
    return op(draw(5, 4, 32), draw.matrix(64, 32, many=2), draw.matrix(64, 96))


def attention_output(op: Op, draw: Draw) -> Result:
    parts = SimpleNamespace(
        inverse_rope=registry.resolve("inverse_rope", draw.device),
        grouped_output_projection=registry.resolve(
            "grouped_output_projection", draw.device
        ),
        wo_a=draw.matrix(64, 32, many=2),
        wo_b=draw.matrix(64, 96),
    )
    return op(parts, draw(5, 4, 32), draw.rotation(5), torch.float32)


def swiglu(op: Op, draw: Draw) -> Result:
    return op(draw(5, 64) * 4, 7.0)


def feed_forward(op: Op, draw: Draw) -> Result:
    return op(draw(5, 64), draw.matrix(64, 2 * 96), draw.matrix(96, 64), 7.0)


def router(op: Op, draw: Draw) -> Result:
    x, gate = draw(5, 64), draw(16, 64)
    chosen = op(x, gate, 1.5, 4, bias=draw(16))
    return (*chosen, *op(x, gate, 1.5, 4, experts=draw.below(16, 5, 4)))


def experts(op: Op, draw: Draw) -> Result:
    x, weights = draw(5, 64), draw(5, 3).softmax(1)
    chosen = torch.stack([draw.different(8, 3) for _ in range(5)])
    w13, w2 = draw.matrix(64, 2 * 96, many=8), draw.matrix(96, 64, many=8)
    return op(x, chosen, weights, w13, w2, 7.0)


def engine_experts(op: Op, draw: Draw) -> Result:
    """The engine's kernels take bfloat16 rows and mxfp4 weights of whole tiles, and leave all else to Triton's."""
    x, weights = draw(5, 128).bfloat16(), draw(5, 2).softmax(1)
    chosen = torch.stack([draw.different(8, 2) for _ in range(5)])
    w13, w2 = draw.mxfp4(128, 256, 8), draw.mxfp4(128, 128, 8)
    return op(x, chosen, weights, w13, w2, 7.0)


def hold(op: Op, draw: Draw) -> Result:
    values, device = draw(48, 64), torch.device(draw.device)
    held = op([48], 64, dtype=torch.float32, device=device)
    if isinstance(held, Kept):
        held.rows(0, 48).copy_(values)
        return held.plain(torch.float32)
    held.data.copy_(values.T)
    return held.data


def pack(op: Op, draw: Draw) -> Result:
    w, x = draw(64, 48) / 8, draw(5, 64)
    packed = op(w)
    if packed is None:
        return x @ w
    return registry.resolve("linear", draw.device)(x, packed)[:, :48]


def gather_rows(op: Op, draw: Draw) -> Result:
    return op(draw(6, 4, 16), draw.below(24, 3, 5))


def write_rows(op: Op, draw: Draw) -> Result:
    rows = draw(6, 4, 16)
    op(rows, draw.slots(24, 5), draw(5, 16))
    return rows


def write_keys(op: Op, draw: Draw) -> Result:
    rows, codec = draw(6, 4, 16), raw(16, torch.float32)
    op(draw(5, 16), draw(16), EPS, draw.rotation(5), rows, draw.slots(24, 5), codec)
    return rows


def write_inputs(op: Op, draw: Draw) -> Result:
    rows = draw(6, 4, 32)
    op(draw(5, 32), draw(4, 16), draw.below(4, 5), rows, draw.slots(24, 5))
    return rows


def compressor_pool(op: Op, draw: Draw) -> Result:
    unseen = draw(5, 8) > 1
    unseen[:, -1] = False
    return op(draw(6, 8, 16), draw.below(48, 5, 2, 8), unseen)


def indexer_logits(op: Op, draw: Draw) -> Result:
    query, weight = draw(3, 2, 4, 16), draw(3, 2, 4)
    seen = torch.full((3, 2), 7, device=draw.device)
    ids = draw.below(24, 3, 7)
    return op(query, weight, draw(6, 4, 16), ids, raw(16, torch.float32), seen)


def indexer_topk(op: Op, draw: Draw) -> Result:
    available = torch.tensor([0, 1, 7, 16, 40], device=draw.device)
    return op(draw(5, 40), available, 16)


def sparse_attention(op: Op, draw: Draw) -> Result:
    query, sink = draw(3, 2, 4, 16), draw(4)
    both = [
        Keys(draw(6, 4, 16), draw.below(24, 3, n), draw(3, 2, n) > 0.5) for n in (9, 5)
    ]
    return op(query, sink, 0.25, *both, raw(16, torch.float32))


def decoder_layers(op: Op, draw: Draw) -> Result:
    """Prompt and two decode steps of a small model whose layers `op` runs."""
    config = DeepseekV4Config.from_hf(build_config("tiny", layers=4, draft="none"))
    codec = kv_codec("auto", torch.float32, config)
    model = DeepseekV4Model(
        config, dtype=torch.float32, kv_codec=codec, device=torch.device(draw.device)
    )
    slots: Mapping[str, Any] = model.weight_slots()
    for slot in slots.values():
        if slot.is_floating_point():
            values = draw(*slot.shape)
            slot.copy_(values / slot.shape[-1] ** 0.5 if slot.dim() > 1 else values)
        else:
            slot.copy_(draw.below(config.n_routed_experts, *slot.shape))
    pack_model(model)
    state, outputs = LocalState(config, 1, 256, codec), []
    for start, count in ((0, 20), (20, 1), (21, 1)):
        batch, caches = state.step([(0, start, count)])
        ids = draw.below(config.vocab_size, count)
        streams = draw(count, config.hc_mult, config.hidden_size)
        plan = model.plan(batch)
        outputs.append(op(model.layers, streams, ids, plan, caches))
    return torch.cat(outputs)


CHECKS: dict[str, Callable[[Op, Draw], Result]] = {
    check.__name__: check
    for check in (
        *(rms_norm, rope, inverse_rope, query_heads, hc_pre, hc_post, hc_head, linear),
        attention_output,
        *(grouped_output_projection, swiglu, feed_forward, router, experts, hold, pack),
        *(gather_rows, write_rows, write_keys, write_inputs, compressor_pool),
        *(indexer_logits, indexer_topk, sparse_attention, decoder_layers),
        *index_checks.CHECKS,
    )
}


def selftest() -> list[dict[str, Any]]:
    """One row an op and provider, and one for each provider that does not run here; no setting is heeded."""
    engine_ops.configure("")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for provider in registry.providers():
        ops: tuple[str, ...] = () if provider == "torch" else registry.names()
        try:
            if refusal := registry.refusal_of(provider, device):
                rows.append(_row("all", provider, "refused", refusal))
                continue
        except Exception as error:  # A provider of others may raise anything.
            rows.append(_row("all", provider, "failed", _line(error)))
            continue
        rows += filter(None, (_tested(op, provider, device) for op in ops))
    return rows


def _row(op: str, provider: str, state: str, reason: str) -> dict[str, Any]:
    return {"op": op, "provider": provider, "state": state, "reason": reason}


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _tested(op: str, provider: str, device: str) -> dict[str, Any] | None:
    """The row of an op; None where the provider does not have it."""
    try:
        if not registry.has(provider, op):
            return None
        if lack := registry.refusal_of(provider, device, op):
            return _row(op, provider, "refused", lack)
        return _checked(op, provider, device)
    except Exception as error:  # Whatever an op raises is what the row is to say.
        return _row(op, provider, "failed", _line(error))


@torch.inference_mode()
def _checked(op: str, provider: str, device: str) -> dict[str, Any]:
    engines = (op, provider) == ("experts", "vllm")
    check = engine_experts if engines else CHECKS[op]
    tolerance = TOLERANCE_BFLOAT16 if engines else TOLERANCE
    try:
        # A check may run other ops beside: the provider's own, as far as it has them, or torch's.
        registry.configure(f"{provider},torch")
        got = _tensors(check(registry.resolve_from(provider, op), Draw(device)))
    finally:
        registry.configure("torch")
    want = _tensors(check(registry.resolve_from("torch", op), Draw(device)))
    if len(got) != len(want):
        return _row(op, provider, "wrong", f"{len(got)} tensors, not {len(want)}")
    # What a GPU could not do may only be raised here, where its results are waited for.
    off = max(map(difference, got, want))
    state = "ok" if off <= tolerance else "wrong"
    return _row(op, provider, state, f"{off:.1e} from torch, at most {tolerance:g}")


def _tensors(result: Result) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """‖got − want‖ / ‖want‖; infinity where a shape differs, a value is not finite, or an integer is another."""
    if got.shape != want.shape or not got.isfinite().all():
        return math.inf
    if not want.is_floating_point():
        return 0.0 if bool((got == want).all()) else math.inf
    error = (got.double() - want.double()).norm() / want.double().norm()
    return float(error)
