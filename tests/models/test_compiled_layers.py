"""Layers that run as one compiled call give what their ops give one by one, and leave the same caches."""

import pytest
import torch
from harness import SMALL, checkpoint, config_of, poison, tokens

from atom_vllm_bridge.models.deepseek_v4.loading import iterate, load
from atom_vllm_bridge.models.deepseek_v4.local_state import LocalState
from atom_vllm_bridge.models.deepseek_v4.model import DeepseekV4Model
from atom_vllm_bridge.models.deepseek_v4.packing import pack
from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.ops.numba import decoder_layers, layer
from atom_vllm_bridge.models.quantization.kv_codecs import kv_codec

# Whole panels, as the published sizes are.
WIDE = {"q_lora_rank": 32, "o_lora_rank": 32, "index_topk": 64}
# Until an entry of 128 tokens is read; the second request is always so far ahead.
LENGTH, LEAD = 154, 24


def built(spec, dtype=torch.float32, codec="auto", **overrides):
    directory = checkpoint(**(WIDE | overrides))
    config = config_of(directory)
    registry.configure(spec)
    try:
        model = DeepseekV4Model(
            config, dtype=dtype, kv_codec=kv_codec(codec, dtype, config)
        )
    finally:
        registry.configure("")
    load(model.weight_slots(), iterate(directory, progress=False))
    pack(model)
    return model


@pytest.fixture
def calls(monkeypatch):
    """How many layers were run as one."""
    made, run = [], layer.run_layer
    monkeypatch.setattr(layer, "run_layer", lambda *a: (made.append(1), run(*a)))
    return made


@torch.inference_mode()
def decoded(model, chunk=1, pad=0, length=LENGTH):
    """Hidden states of two requests of which one began earlier, and all caches after them."""
    state = LocalState(model.config, 2, 2 * length, model.codec, seed=1)
    poison(state)
    ids, outputs = tokens(2 * length), []
    for start in range(0, length - LEAD, chunk):
        later = (1, LEAD + start, chunk) if start else (1, 0, LEAD + chunk)
        batch, caches = state.step([(0, start, chunk), later], pad_tokens=pad)
        # 32 bits, as the engine's are.
        given = ids[: len(batch.positions)].roll(start).int()
        streams, _ = model(given, batch, caches)
        outputs.append(streams[: len(given) - pad])
    return torch.cat(outputs), state


@pytest.mark.parametrize(
    ("dtype", "codec", "chunk", "pad"),
    [
        (torch.float32, "auto", 1, 0),
        (torch.float32, "auto", 10, 3),
        (torch.float32, "auto", 65, 0),
        (torch.float32, "bfloat16", 10, 0),
        (torch.bfloat16, "auto", 10, 3),
    ],
    ids=str,
)
def test_one_call_equals_the_ops_one_by_one(calls, dtype, codec, chunk, pad):
    by_ops = built("decoder_layers=torch", dtype, codec)
    want, kept = decoded(by_ops, chunk, pad)
    assert not calls
    got, state = decoded(built("", dtype, codec), chunk, pad)
    steps = (LENGTH - LEAD) // chunk
    assert len(calls) == steps * SMALL["num_hidden_layers"]
    # One unit in the last place now and then, where a value lies between two bfloat16.
    close = (
        {"rtol": 1e-5, "atol": 2e-5} if codec == "auto" else {"rtol": 0, "atol": 0.02}
    )
    if dtype == torch.bfloat16:
        close = {"rtol": 0, "atol": 0.05}
    torch.testing.assert_close(got, want, **close)
    for name, rows in state.rows.items():
        torch.testing.assert_close(
            rows.float(), kept.rows[name].float(), equal_nan=True, **close
        )


def test_what_does_not_fit_runs_op_by_op(calls, monkeypatch):
    """An indexer that has to choose, caches that do not hold plain values, panels that are not full, ops that were chosen otherwise, many tokens."""
    decoded(built("", index_topk=8), length=70)
    few = len(calls)
    assert 0 < few < (70 - LEAD) * SMALL["num_hidden_layers"]
    decoded(built("", codec="fp8"), length=34)
    decoded(built("", o_lora_rank=16), length=34)
    decoded(built("linear=torch"), length=34)
    monkeypatch.setattr(decoder_layers, "MOST_TOKENS", 4)
    decoded(built(""), chunk=5, length=34)
    assert len(calls) == few


def test_new_weights_are_seen(calls):
    model = built("")
    before, _ = decoded(model, length=34)
    with torch.no_grad():
        for slot in model.weight_slots().values():
            if slot.dtype.is_floating_point:
                slot.mul_(1.25)
    pack(model)
    again, _ = decoded(model, length=34)
    want, _ = decoded(model_like(model), length=34)
    assert calls
    assert (again - before).abs().max() > 1e-3
    torch.testing.assert_close(again, want, rtol=1e-5, atol=2e-5)


def model_like(model):
    """The same weights, run op by op."""
    other = built("decoder_layers=torch")
    slots = other.weight_slots()
    for name, value in model.weight_slots().items():
        slots[name].copy_(value)
    pack(model)
    pack(other)
    return other
