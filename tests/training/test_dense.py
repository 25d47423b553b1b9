"""The differentiable forward gives what the served model and the drafts' oracle give, and its gradients are those of its values."""

import json

import plain_drafts
import pytest
import torch
import torch.nn.functional as F
from draft_harness import checkpoint as draft_checkpoint
from draft_harness import far, noise, plain
from harness import checkpoint, config_of, model, one_shot, tokens

from atom_vllm_bridge.models.quantization import block_fp8, mxfp4
from training.dense import Dense
from training.drafts import context_rows, dspark_blocks, mtp_hidden, mtp_step
from training.layer import Trace
from training.weights import Weights, published

# Enough for the indexer to choose 16 of 96 entries, and for three entries of HCA.
LENGTH = 384


def filled(directory, prefix=""):
    """Leaves that hold a bf16 checkpoint's values."""
    tensors, hf = plain_drafts.read_checkpoint(directory)
    weights = Weights(hf, prefix, 0, "cpu")
    names = [name for name, _ in published(weights.state())]
    values = {name: tensors[name].float() for name in names if "tid2eid" not in name}
    values |= {name: tensors[name] for name in names if "tid2eid" in name}
    for name, leaf in weights.leaves.items():
        layer, _, matrix = name.rpartition(".")
        if layer.endswith(".experts"):
            of_each = [values[f"{layer}.{e}.{matrix}.weight"] for e in range(len(leaf))]
            value = torch.stack(of_each)
        else:
            value = values[name]
        with torch.no_grad():
            leaf.copy_(value)
    return weights


@torch.no_grad()
def log_probabilities(directory, ids, **trace):
    config = config_of(directory)
    dense = Dense(config, len(ids), "cpu")
    view = filled(directory).view(rounded=False)
    streams, _ = dense.target(view, ids.unsqueeze(0), Trace(**trace), ())
    hidden = dense.hidden(view, streams)
    return F.linear(hidden, view["head.weight"])[0].log_softmax(-1)


def test_the_target_gives_the_served_models_log_probabilities():
    ids = tokens(LENGTH)
    got = log_probabilities(checkpoint(), ids)
    want = one_shot(model(checkpoint()), ids)
    assert (got - want).abs().max() < 1e-4


def test_selection_matters_at_this_length():
    ids = tokens(LENGTH)
    want = one_shot(model(checkpoint()), ids)
    got = log_probabilities(checkpoint(), ids, select=False)
    assert (got - want).abs().max() > 1e-3


def test_taps_are_the_served_models():
    directory, ids = checkpoint(), tokens(LENGTH)
    served = model(directory)
    dense = Dense(served.config, LENGTH, "cpu")
    view = filled(directory).view(rounded=False)
    with torch.inference_mode():
        _, got = dense.target(view, ids.unsqueeze(0), Trace(), (2, 4))
        from atom_vllm_bridge.models.deepseek_v4.local_state import LocalState

        state = LocalState(served.config, 1, LENGTH, served.codec)
        batch, caches = state.step([(0, 0, LENGTH)])
        _, want = served(ids, batch, caches, aux_layers=(3, 5))
    for tap, other in zip(got, want, strict=True):
        assert far(tap[0], other) < 1e-4


def test_a_dspark_block_is_the_oracles():
    tensors, hf = plain("dspark")
    config = config_of(draft_checkpoint("dspark"))
    view = filled(draft_checkpoint("dspark"), "mtp.").view(rounded=False)
    dense = Dense(config, 24, "cpu")
    taps = noise(24, len(hf["dspark_target_layer_ids"]) * hf["hidden_size"])
    parts = list(taps.unsqueeze(0).chunk(len(hf["dspark_target_layer_ids"]), -1))
    anchors, k, token = [3, 13, 19], 5, 7
    ids = torch.tensor([token] + [hf["dspark_noise_token_id"]] * (k - 1))
    embedded = F.embedding(ids, tensors["embed.weight"].float())
    with torch.no_grad():
        context = context_rows(view, parts, config.rms_norm_eps)
        got = dspark_blocks(
            dense,
            view,
            plain_drafts.count_stages(tensors),
            context,
            torch.tensor([anchors]),
            embedded.expand(1, len(anchors), -1, -1),
            Trace(),
        )
    rows = plain_drafts.dspark_context(tensors, hf, taps)
    assert far(context[0], rows) < 1e-5
    for place, anchor in enumerate(anchors):
        want, _ = plain_drafts.dspark_block(tensors, hf, rows[:anchor], 0, token, k)
        assert far(got[0, place], want) < 2e-5


def test_an_mtp_step_is_the_oracles():
    tensors, hf = plain("mtp")
    config = config_of(draft_checkpoint("mtp"))
    view = filled(draft_checkpoint("mtp"), "mtp.").view(rounded=False)
    ids, streams = tokens(24), noise(24, config.hc_mult, config.hidden_size)
    embedded = F.embedding(ids, tensors["embed.weight"].float())
    with torch.no_grad():
        got = mtp_step(
            Dense(config, 24, "cpu"), view, embedded[None], streams[None], Trace()
        )
        hidden = mtp_hidden(config, view, got)[0]
        logits = F.linear(hidden, tensors["head.weight"].float())
    want = plain_drafts.mtp_forward(tensors, hf, streams, ids, range(24))
    assert far(got[0], want) < 2e-5
    assert far(logits, plain_drafts.mtp_logits(tensors, hf, want)) < 2e-5


def test_gradients_are_the_slopes_of_the_loss():
    directory, ids = checkpoint(), tokens(LENGTH)
    config = config_of(directory)
    weights = filled(directory)
    dense = Dense(config, LENGTH, "cpu")

    def loss():
        view = weights.view(rounded=False)
        # Without selection and choice of experts, which jump.
        streams, _ = dense.target(view, ids[None], Trace(select=False), ())
        return F.linear(dense.hidden(view, streams), view["head.weight"])[
            0, :, 3
        ].mean()

    value = loss()
    value.backward()
    for name in ("layers.1.attn.compressor.wgate.weight", "layers.2.attn.wkv.weight"):
        leaf = weights.leaves[name]
        direction = leaf.grad / leaf.grad.norm()
        step = 1e-2
        with torch.no_grad():
            leaf += step * direction
            above = loss()
            leaf -= 2 * step * direction
            below = loss()
            leaf += step * direction
        slope = float(above - below) / (2 * step)
        assert slope == pytest.approx(float(leaf.grad.norm()), rel=0.05)


def test_rounded_weights_are_what_the_checkpoint_stores_and_pass_gradients():
    hf = json.loads((checkpoint() / "config.json").read_text())
    weights = Weights(hf, "", 0, "cpu")
    view = weights.view(rounded=True)
    for name, leaf in weights.leaves.items():
        one = leaf.detach()
        stored = weights.stored[
            name if name in weights.stored else f"{name[:-3]}.0.{name[-2:]}.weight"
        ]
        if stored.dtype == "I8":
            matrices = [mxfp4.dequantize(*mxfp4.quantize(each)) for each in one]
            want = torch.stack(matrices)
        elif stored.dtype == "F8_E4M3":
            want = block_fp8.dequantize(*block_fp8.quantize(one))
        elif stored.dtype == "BF16" and leaf.requires_grad:
            want = one.bfloat16().float()
        else:
            want = one
        assert torch.equal(view[name], want), name
    leaf, seen = (of["layers.0.ffn.experts.w1"] for of in (weights.leaves, view))
    assert (seen - leaf).abs().max() > 0
    seen.square().sum().backward()
    assert torch.equal(leaf.grad, 2 * seen.detach())
