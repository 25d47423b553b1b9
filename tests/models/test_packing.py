"""A model whose matrices are packed is the same model."""

import torch
from harness import TOLERANCE, checkpoint, chunked, config_of, model, one_shot, tokens

from atom_vllm_bridge.models.deepseek_v4.loading import iterate, load
from atom_vllm_bridge.models.deepseek_v4.model import DeepseekV4Model
from atom_vllm_bridge.models.deepseek_v4.packing import pack


def loaded(dtype):
    fresh = DeepseekV4Model(config_of(checkpoint()), dtype=dtype)
    load(fresh.weight_slots(), iterate(checkpoint(), progress=False))
    return fresh


def test_packing_changes_no_probability():
    small, ids = loaded(torch.float32), tokens(150)
    pack(small)
    assert small.layers[0].ffn.w13.dtype == torch.bfloat16
    want = one_shot(model(checkpoint()), ids)
    cuts = [70, 71, 75, *range(130, 150)]
    assert (chunked(small, ids, cuts) - want).abs().max() <= TOLERANCE


def test_slots_of_a_packed_model_are_those_of_the_checkpoint():
    small = loaded(torch.float32)
    before = {name: slot.clone() for name, slot in small.weight_slots().items()}
    pack(small)
    after = small.weight_slots()
    assert after.keys() == before.keys()
    for name, slot in after.items():
        assert slot.dtype == before[name].dtype, name
        assert torch.equal(slot, before[name]), name


def test_weights_may_be_loaded_again_and_packed_again():
    small, ids = loaded(torch.float32), tokens(20)
    pack(small)
    want = one_shot(small, ids)
    slots = small.weight_slots()
    for slot in slots.values():
        if slot.is_floating_point():
            slot.fill_(torch.nan)
    load(slots, iterate(checkpoint(), progress=False))
    pack(small)
    assert torch.equal(one_shot(small, ids), want)


def test_values_that_bfloat16_does_not_hold_stay_float32():
    small, ids = loaded(torch.float32), tokens(20)
    for name, slot in small.weight_slots().items():
        if "wq_b" in name:
            slot.mul_(1 + 2**-10)
    want = one_shot(small, ids)
    pack(small)
    attention = small.layers[1].attn
    assert attention.wq_b.dtype == torch.float32
    assert attention.w_in.dtype == torch.bfloat16
    assert (one_shot(small, ids) - want).abs().max() <= TOLERANCE
