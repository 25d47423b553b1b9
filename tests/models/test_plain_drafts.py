"""The oracle of the drafts, kept honest without the implementation: by transformers' layers and by its properties."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import plain_block
import plain_drafts
import pytest
import torch
import torch.nn.functional as F
from harness import SMALL, VOCABULARY
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from atom_vllm_bridge.checkpoint.make import make

WINDOW = 8
# Block outputs as large as the streams, and gates beyond the clamp: nothing may hide behind the residual.
GAINS = {"wo_b": 1.0, "w2": 0.3, "w1": 12.0, "w3": 12.0}
# float32 in transformers' layers leaves 3e-6 of logits of up to 4.
TOLERANCE = 2e-5


# The parts of a stage that a target layer has too, and those that an MTP layer has before them.
BLOCK = {
    "attn",
    "attn_norm",
    "ffn",
    "ffn_norm",
    *(
        f"hc_{part}_{kind}"
        for part in ("attn", "ffn")
        for kind in ("fn", "base", "scale")
    ),
}
MTP = ("enorm", "e_proj", "hnorm", "h_proj")


@cache
def checkpoint(draft):
    """Tensors and config; changes are made to copies."""
    directory = make(
        Path(mkdtemp(prefix="plain-drafts-")) / "checkpoint",
        layout="bf16",
        draft=draft,
        overrides=SMALL
        # So few iterations that their order still shows in the result.
        | {"num_hidden_layers": 2, "sliding_window": WINDOW, "hc_sinkhorn_iters": 2}
        | ({"dspark_markov_rank": 8} if draft == "dspark" else {}),
        gains=GAINS,
        tokenizer=False,
    )
    return plain_drafts.read_checkpoint(directory)


@cache
def transformers_of(draft):
    """transformers' model in float32 whose layers are the draft's stages, and whose head is the draft's."""
    tensors, config = checkpoint(draft)
    stages = plain_drafts.count_stages(tensors)
    last = f"mtp.{stages - 1}."
    renamed = {name: tensors[name] for name in ("embed.weight", "head.weight")}
    for name, tensor in tensors.items():
        if name.startswith("mtp.") and name.split(".")[2] in BLOCK:
            renamed["layers." + name.removeprefix("mtp.")] = tensor
        if name.startswith((f"{last}norm.", f"{last}hc_head_")):
            renamed[name.removeprefix(last)] = tensor
    directory = Path(mkdtemp(prefix="draft-as-target-"))
    save_file(renamed, directory / "model.safetensors", metadata={"format": "pt"})
    settings = {k: v for k, v in config.items() if not k.startswith("dspark_")} | {
        "num_hidden_layers": stages,
        "compress_ratios": [0] * stages,
        "num_hash_layers": 0,
        "num_nextn_predict_layers": 0,
    }
    (directory / "config.json").write_text(json.dumps(settings))
    model, report = DeepseekV4ForCausalLM.from_pretrained(
        directory,
        config=DeepseekV4Config.from_pretrained(directory),
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not any(report.values()), report
    return model.eval()


def noise(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def context_of(rows, seed=0):
    tensors, config = checkpoint("dspark")
    taps = len(config["dspark_target_layer_ids"]) * config["hidden_size"]
    return plain_drafts.dspark_context(tensors, config, noise(rows, taps, seed=seed))


def dspark(context, first, anchor=7, k=5):
    return plain_drafts.dspark_block(*checkpoint("dspark"), context, first, anchor, k)


def mtp(streams, ids, positions, **overrides):
    tensors, config = checkpoint("mtp")
    return plain_drafts.mtp_forward(
        tensors, config | overrides, streams, ids, positions
    )


def mtp_inputs(count, seed=0):
    _, config = checkpoint("mtp")
    streams = noise(count, config["hc_mult"], config["hidden_size"], seed=seed)
    g = torch.Generator().manual_seed(seed)
    return streams, torch.randint(0, VOCABULARY, (count,), generator=g)


def changed(before, after):
    """Per row, whether it changed by more than rounding."""
    return ((before - after).flatten(1).abs().amax(1) > 1e-6).tolist()


# Without context; with less than a window of it; with more, so that some of its rows are out of sight.
@pytest.mark.parametrize(
    ("rows", "first", "k"), [(0, 0, 1), (3, 0, 5), (WINDOW + 5, 300, 5)]
)
@torch.inference_mode()
def test_dspark_stages_compute_what_transformers_layers_do(rows, first, k):
    context, model = context_of(rows), transformers_of("dspark")
    noise_token = checkpoint("dspark")[1]["dspark_noise_token_id"]
    ids = torch.tensor([0] * rows + [7] + [noise_token] * (k - 1))

    # Context and slots form one sequence; each layer's attention is handed the context in place of those rows.
    def enter_context(_, inputs, keywords):
        (x,) = inputs
        return (torch.cat((context.float()[None], x[:, rows:]), 1),), keywords

    seen = torch.eye(rows + k, dtype=torch.bool)
    seen[rows:, max(0, rows - WINDOW) :] = True
    mask = torch.zeros(1, 1, rows + k, rows + k).masked_fill(~seen, -torch.inf)
    hooks = [
        layer.self_attn.register_forward_pre_hook(enter_context, with_kwargs=True)
        for layer in model.model.layers
    ]
    try:
        want = model(
            input_ids=ids[None],
            position_ids=torch.arange(first, first + rows + k)[None],
            attention_mask={"sliding_attention": mask},
            use_cache=False,
        ).logits[0, rows:]
    finally:
        for hook in hooks:
            hook.remove()

    _, got = dspark(context, first, k=k)
    assert got.shape == (k, VOCABULARY)
    assert want.abs().max() > 1
    assert (got - want).abs().max() <= TOLERANCE


@pytest.mark.parametrize("first", [0, 300])
@torch.inference_mode()
def test_mtp_layer_computes_what_a_transformers_layer_does(first):
    count = 2 * WINDOW + 3
    tensors, config = checkpoint("mtp")
    model, (streams, ids) = transformers_of("mtp"), mtp_inputs(count)
    positions = torch.arange(first, first + count)

    W = {name: tensors[f"mtp.0.{name}.weight"].double() for name in MTP}
    embedded = tensors["embed.weight"].double()[ids] * (positions > 0)[:, None]
    width, eps = (config["hidden_size"],), config["rms_norm_eps"]
    e = F.rms_norm(embedded, width, W["enorm"], eps) @ W["e_proj"].T
    h = F.rms_norm(streams, width, W["hnorm"], eps) @ W["h_proj"].T
    enter = (e[:, None] + h).float()[None]

    hook = model.model.layers[0].register_forward_pre_hook(lambda *_: (enter,))
    try:
        want = model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False
        ).logits[0]
    finally:
        hook.remove()

    out = mtp(streams, ids, positions)
    assert out.shape == streams.shape
    got = plain_drafts.mtp_logits(tensors, config, out)
    assert want.abs().max() > 1
    assert (got - want).abs().max() <= TOLERANCE


def test_every_slot_sees_the_last_one():
    context = context_of(3)
    shorter, longer = (dspark(context, 10, k=k)[0] for k in (4, 5))
    assert changed(shorter, longer[:4]) == [True] * 4


def test_every_slot_sees_the_anchor():
    context = context_of(3)
    assert changed(*(dspark(context, 10, anchor)[0] for anchor in (7, 8))) == [True] * 5


@pytest.mark.parametrize("age", [1, WINDOW, WINDOW + 1, WINDOW + 4])
def test_window_ends_at_the_row_before_the_anchor_for_every_slot(age):
    context = context_of(WINDOW + 4)
    other = context.clone()
    other[-age] = context_of(1, seed=1)[0]
    before, after = dspark(context, 40)[0], dspark(other, 40)[0]
    if age > WINDOW:
        assert torch.equal(before, after)
    else:
        assert changed(before, after) == [True] * 5


def test_rows_that_are_out_of_sight_need_not_exist():
    context = context_of(WINDOW + 4)
    whole = dspark(context, 40)
    for got, want in zip(dspark(context[4:], 44), whole, strict=True):
        assert torch.equal(got, want)


def test_only_distances_count():
    """Rotation of queries and keys, and its undoing, leave nothing that knows where the sequence begins."""
    context = context_of(5)
    near, far = dspark(context, 0)[0], dspark(context, 5000)[0]
    assert (near - far).abs().max() <= 1e-9


def test_context_is_a_normed_projection_of_the_taps():
    tensors, config = checkpoint("dspark")
    W = tensors["mtp.0.main_proj.weight"].double()
    taps = noise(4, W.shape[1])
    gain = tensors["mtp.0.main_norm.weight"].double()
    want = F.rms_norm(taps @ W.T, gain.shape, gain, config["rms_norm_eps"])
    got = plain_drafts.dspark_context(tensors, config, taps)
    assert (got - want).abs().max() <= 1e-12


def test_base_logits_are_the_targets_head_on_the_normed_hidden():
    tensors, config = checkpoint("dspark")
    hidden, U = dspark(context_of(3), 10)
    gain = tensors["mtp.2.norm.weight"].double()
    normed = F.rms_norm(hidden, gain.shape, gain, config["rms_norm_eps"])
    assert (U - normed @ tensors["head.weight"].double().T).abs().max() <= 1e-12


def test_greedy_walk_is_biased_by_the_token_before():
    tensors, config = checkpoint("dspark")
    U = noise(5, VOCABULARY) * 0.1
    ids, logits = plain_drafts.dspark_sample_greedy(tensors, config, U, 7)
    W1, W2 = (
        tensors[f"mtp.2.markov_head.markov_{w}.weight"].double() for w in ("w1", "w2")
    )
    want = U + W1[[7, *ids[:-1]]] @ W2.T
    assert (logits - want).abs().max() <= 1e-12
    assert ids == want.argmax(-1).tolist()
    assert ids != U.argmax(-1).tolist()


def test_lowest_id_wins_a_tie():
    tensors, config = checkpoint("dspark")
    free = dict(tensors)
    name = "mtp.2.markov_head.markov_w2.weight"
    free[name] = torch.zeros_like(tensors[name])
    U = torch.zeros(3, VOCABULARY)
    U[1, [90, 31]] = 1.0
    U[2, [VOCABULARY - 1, VOCABULARY - 2]] = 1.0
    ids, _ = plain_drafts.dspark_sample_greedy(free, config, U, 7)
    assert ids == [0, 31, VOCABULARY - 2]


def test_confidence_reads_the_hidden_and_the_token_before():
    tensors, config = checkpoint("dspark")
    hidden, previous = noise(5, config["hidden_size"]), [7, 3, 3, 9, 150]
    W1 = tensors["mtp.2.markov_head.markov_w1.weight"].double()
    w = tensors["mtp.2.confidence_head.proj.weight"].double()
    want = torch.sigmoid(torch.cat((hidden, W1[previous]), 1) @ w.T)[:, 0]
    got = plain_drafts.dspark_confidence(tensors, config, hidden, previous)
    assert (got - want).abs().max() <= 1e-12
    assert got.std() > 0.01


def test_checkpoint_may_have_no_confidence_head():
    tensors, config = checkpoint("dspark")
    headless = {k: v for k, v in tensors.items() if "confidence_head" not in k}
    hidden = noise(1, config["hidden_size"])
    with pytest.raises(KeyError, match="confidence_head"):
        plain_drafts.dspark_confidence(headless, config, hidden, [7])


@given(st.integers(1, 6), st.integers(0, 1 << 30), st.floats(0, 3))
@settings(max_examples=50, deadline=None)
def test_sinkhorn_makes_rows_and_columns_sum_to_one(n, seed, spread):
    config = {"hc_sinkhorn_iters": 200, "hc_eps": 1e-9}
    C = plain_block.sinkhorn(config, noise(n, n, seed=seed) * spread)
    assert (C > 0).all()
    assert (C.sum(0) - 1).abs().max() <= 1e-6
    assert (C.sum(1) - 1).abs().max() <= 1e-3


def test_comb_is_summed_over_its_first_index():
    R, y = noise(3, 5), noise(5, seed=1)
    C = torch.zeros(3, 3, dtype=torch.float64)
    C[0, 1] = C[1, 2] = C[2, 0] = 1.0
    post = torch.tensor([0.0, 0.0, 2.0], dtype=torch.float64)
    got = plain_block.hyper_write(y, R, post, C)
    want = torch.stack((R[2], R[0], R[1] + 2 * y))
    assert torch.equal(got, want)


def test_mtp_row_sees_no_later_row_and_none_beyond_the_window():
    count = 2 * WINDOW + 2
    streams, ids = mtp_inputs(count)
    other = streams.clone()
    other[3] = mtp_inputs(1, seed=1)[0][0]
    before, after = (mtp(s, ids, range(count)) for s in (streams, other))
    assert changed(before, after) == [3 <= t < 3 + WINDOW for t in range(count)]


def test_mtp_draft_appended_as_a_row_leaves_the_others_as_they_were():
    streams, ids = mtp_inputs(6)
    out = mtp(streams, ids, range(6))
    longer = torch.cat((streams, out[-1:]))
    more = mtp(longer, [*ids.tolist(), 11], range(7))
    assert torch.equal(more[:6], out)


def test_mtp_norms_every_stream_on_its_own():
    streams, ids = mtp_inputs(3)
    louder = streams.clone()
    louder[:, 1] *= 50
    # With nothing under the root but the mean, a norm forgets the scale altogether.
    outs = (mtp(s, ids, range(1, 4), rms_norm_eps=0.0) for s in (streams, louder))
    assert changed(*outs) == [False] * 3


def test_mtp_ignores_the_embedding_at_position_zero_only():
    streams, ids = mtp_inputs(1)
    for position, matters in ((0, False), (1, True)):
        outs = (mtp(streams, [token], [position]) for token in (int(ids), 11))
        assert changed(*outs) == [matters]
