"""DSpark's draft against the oracle's slow loop, float32 within 1e-5, and what may and may not touch a block."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import plain_drafts
import pytest
import torch
from draft_harness import (
    BLOCK,
    TOLERANCE,
    WINDOW,
    Windows,
    checkpoint,
    embed,
    far,
    filled,
    noise,
    plain,
    unembed,
)
from harness import config_of
from hypothesis import given, settings
from hypothesis import strategies as st

from atom_vllm_bridge.models.deepseek_v4.dspark import DSparkConfig, DSparkDraft
from atom_vllm_bridge.models.quantization.kv_codecs import kv_codec

TRAINED = 5
ANCHOR = 7
LENGTH = 40
SETTINGS = settings(max_examples=15, deadline=None, derandomize=True, database=None)


@pytest.fixture(scope="module")
def draft():
    return filled("dspark")


@pytest.fixture(scope="module", params=["", "torch"], ids=["default ops", "torch ops"])
def any_draft(request):
    """Providers differ in whether they touch what is hidden."""
    return filled("dspark", ops=request.param)


@cache
def taps(rows, seed=0):
    _, config = plain("dspark")
    return noise(
        rows, len(config["dspark_target_layer_ids"]) * config["hidden_size"], seed=seed
    )


@cache
def oracle(rows, k, seed=0, anchor=ANCHOR, window=WINDOW):
    """Context of `rows` tokens from position 0 on, and the hidden rows and base logits of a block behind it."""
    tensors, config = plain("dspark", window)
    context = plain_drafts.dspark_context(tensors, config, taps(rows, seed))
    return context, *plain_drafts.dspark_block(tensors, config, context, 0, anchor, k)


@torch.inference_mode()
def write(draft, windows, request, rows, first=0):
    """Store `rows`, taps, as the context of positions `first` and on."""
    here = range(first, first + len(rows))
    caches = windows.caches(windows.blocks[:1], windows.slots(request, here))
    draft.write_context(draft.context(rows), torch.tensor(here), caches)


def block_ids(k, anchor=ANCHOR):
    return [anchor] + [plain("dspark")[1]["dspark_noise_token_id"]] * (k - 1)


@torch.inference_mode()
def run(draft, windows, blocks, k, window=WINDOW, last=None, **padding):
    """Hidden rows [R, k, d] of one block for each (request, first position, anchor).

    Args:
        last: the id in the last slot of every block, instead of noise.
    """
    ids = [token for _, _, anchor in blocks for token in block_ids(k, anchor)]
    if last is not None:
        ids[k - 1 :: k] = [last] * len(blocks)
    ids += [0] * padding.get("pad_tokens", 0)
    chunks = [(request, start, k) for request, start, _ in blocks]
    batch, caches = windows.step(chunks, **padding)
    hidden = draft(embed("dspark", torch.tensor(ids), window), batch, caches)
    return hidden[: len(blocks) * k].unflatten(0, (len(blocks), k))


def logits_of(draft, hidden, window=WINDOW):
    return unembed("dspark", draft.head_input(hidden), window)


def with_context(draft, rows, seed=0, order=0, length=LENGTH, **kwargs):
    windows = Windows(draft, 1, length, seed=order, **kwargs)
    write(draft, windows, 0, taps(rows, seed))
    return windows


# Against the oracle


def test_context_rows_are_the_oracles(draft):
    want, _, _ = oracle(13, 5)
    with torch.inference_mode():
        got = draft.context(taps(13))
    assert got.dtype == torch.float32
    assert far(got, want) <= TOLERANCE
    assert want.abs().max() > 1


def test_stored_keys_are_the_oracles(draft):
    tensors, config = plain("dspark")
    context, _, _ = oracle(13, 5)
    windows = with_context(draft, 13)
    for stage in range(len(draft.stages)):
        want = torch.stack(
            [
                plain_drafts.key_value(tensors, config, f"mtp.{stage}.attn", c, p)
                for p, c in enumerate(context)
            ]
        )
        assert far(windows.rows(0, range(13))[:, stage], want) <= TOLERANCE


@pytest.mark.parametrize("ops", ["", "torch"], ids=["default ops", "torch ops"])
@pytest.mark.parametrize("k", [1, 3, TRAINED, 8])
@pytest.mark.parametrize("rows", [1, 5, WINDOW - 1, WINDOW, WINDOW + 1, 21])
def test_block_is_the_oracles(k, rows, ops):
    """Below, at and above the trained block; context shorter and longer than the window."""
    draft = filled_once(ops)
    _, want_hidden, want_logits = oracle(rows, k)
    hidden = run(draft, with_context(draft, rows), [(0, rows, ANCHOR)], k)[0]
    assert far(hidden, want_hidden) <= TOLERANCE
    assert far(logits_of(draft, hidden), want_logits) <= TOLERANCE
    assert want_logits.abs().max() > 1


@cache
def filled_once(ops):
    return filled("dspark", ops=ops)


def test_a_block_without_context_is_the_oracles(draft):
    _, want, _ = oracle(0, 5)
    got = run(draft, Windows(draft, 1, 8), [(0, 0, ANCHOR)], 5)[0]
    assert far(got, want) <= TOLERANCE


@pytest.mark.parametrize("rows", [100, 150])
def test_block_is_the_oracles_with_the_published_window(rows):
    draft = filled("dspark", 128)
    _, want_hidden, want_logits = oracle(rows, 5, window=128)
    windows = with_context(draft, rows, length=200, block=64)
    hidden = run(draft, windows, [(0, rows, ANCHOR)], 5, window=128)[0]
    assert far(hidden, want_hidden) <= TOLERANCE
    assert far(logits_of(draft, hidden, 128), want_logits) <= TOLERANCE


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize(("pad_requests", "pad_blocks"), [(0, 0), (0, 1), (3, 3)])
def test_requests_of_one_batch_are_each_the_oracles(
    draft, k, order, pad_requests, pad_blocks
):
    """Different lengths, blocks in any order; padding at the end with requests of its own and without."""
    lengths = {0: 3, 1: 21, 2: WINDOW, 3: 1}
    windows = Windows(draft, 4, LENGTH, seed=order)
    for request, rows in lengths.items():
        write(draft, windows, request, taps(rows, request))
    blocks = [(request, lengths[request], request + 20) for request in (2, 0, 3, 1)]
    padding = {"pad_requests": pad_requests, "pad_tokens": pad_blocks * k}
    got = run(draft, windows, blocks, k, **padding)
    for hidden, (request, rows, anchor) in zip(got, blocks, strict=True):
        _, want, _ = oracle(rows, k, request, anchor)
        assert far(hidden, want) <= TOLERANCE


def test_padding_writes_nothing(draft):
    windows = with_context(draft, 13)
    before = windows.memory.clone()
    run(draft, windows, [(0, 13, ANCHOR)], 5, pad_requests=2, pad_tokens=10)
    written = windows.rows(0, range(13, 18))
    assert written.isfinite().all()
    windows.memory[windows.blocks[0, 13 // BLOCK :].long()] = torch.nan
    before[windows.blocks[0, 13 // BLOCK :].long()] = torch.nan
    assert torch.equal(windows.memory.nan_to_num(9e9), before.nan_to_num(9e9))


# The Markov head


def test_markov_embedding_and_bias_are_the_oracles(draft):
    tensors, _ = plain("dspark")
    W1, W2 = (
        tensors[f"mtp.2.markov_head.markov_{w}.weight"].double() for w in ("w1", "w2")
    )
    ids = torch.tensor([0, 7, 7, 159], dtype=torch.int32)
    embedded = draft.markov_embed(ids)
    assert torch.equal(embedded.double(), W1[ids])
    bias = draft.markov_bias(embedded)
    assert bias.dtype == torch.float32
    assert far(bias, W1[ids] @ W2.T) <= TOLERANCE


def test_a_negative_id_embeds_as_zero_in_the_markov_head(draft):
    got = draft.markov_embed(torch.tensor([-1, 3, -7]))
    assert torch.equal(got, draft.markov_embed(torch.tensor([0, 3, 0])))


def walk(draft, base, anchors):
    """Greedy ids [R, k] of base logits [R, k, V], all requests at once, as the engine samples."""
    previous, ids = anchors, []
    for step in range(base.shape[1]):
        bias = draft.markov_bias(draft.markov_embed(previous))
        previous = (base[:, step] + bias).argmax(-1)
        ids.append(previous)
    return torch.stack(ids, 1)


@pytest.mark.parametrize("k", [1, 3, TRAINED, 8])
def test_greedy_walk_is_the_oracles(draft, k):
    tensors, config = plain("dspark")
    rows, anchors = (5, 21), (ANCHOR, 90)
    windows = Windows(draft, 2, LENGTH)
    for request, count in enumerate(rows):
        write(draft, windows, request, taps(count))
    blocks = [(r, rows[r], anchors[r]) for r in range(2)]
    base = logits_of(draft, run(draft, windows, blocks, k))
    got = walk(draft, base, torch.tensor(anchors))
    for request in range(2):
        _, _, U = oracle(rows[request], k, 0, anchors[request])
        want, biased = plain_drafts.dspark_sample_greedy(
            tensors, config, U, anchors[request]
        )
        best = biased.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 10 * TOLERANCE
        assert got[request].tolist() == want


def test_the_walk_depends_on_the_token_before(draft):
    base = noise(1, 8, 160) * 0.1
    walks = {tuple(walk(draft, base, torch.tensor([a]))[0].tolist()) for a in range(6)}
    assert len(walks) > 1
    assert tuple(base.argmax(-1)[0].tolist()) not in walks


def test_lowest_id_wins_a_tie(draft):
    tensors, config = plain("dspark")
    free = filled("dspark")
    free.markov_w2.zero_()
    name = "mtp.2.markov_head.markov_w2.weight"
    unbiased = {**tensors, name: torch.zeros_like(tensors[name])}
    U = torch.zeros(1, 4, 160)
    U[0, 1, [90, 31]] = 1.0
    U[0, 2, [159, 158]] = 1.0
    U[0, 3, 64:] = 1.0
    got = walk(free, U, torch.tensor([ANCHOR]))[0].tolist()
    assert got == [0, 31, 158, 64]
    want, _ = plain_drafts.dspark_sample_greedy(unbiased, config, U[0], ANCHOR)
    assert got == want


# The confidence head


def test_confidence_is_the_oracles(draft):
    """Of hidden rows so small that neither they nor the token before saturate it."""
    tensors, config = plain("dspark")
    hidden, previous = noise(5, config["hidden_size"]) / 4, [ANCHOR, 3, 3, 9, 150]
    want = plain_drafts.dspark_confidence(tensors, config, hidden, previous)
    got = draft.confidence(hidden, draft.markov_embed(torch.tensor(previous)))
    assert got.dtype == torch.float32
    assert far(got, want) <= TOLERANCE
    other = draft.confidence(hidden, draft.markov_embed(torch.tensor([60] * 5)))
    assert ((got - other).abs() > 1e-3).all()
    assert got.std() > 0.01


def test_confidence_without_its_head_says_so(draft):
    config, dspark = draft.config, draft.dspark
    headless = DSparkDraft(
        config,
        dspark,
        3,
        confidence=False,
        dtype=torch.float32,
        device="meta",
        kv_codec=kv_codec("auto", torch.float32, config),
    )
    assert headless.confidence_head is None
    assert not any("confidence" in name for name in headless.weight_slots())
    with pytest.raises(ValueError, match="no confidence head"):
        headless.confidence(torch.zeros(1, 64), torch.zeros(1, 8))


# What reaches a block


@pytest.mark.parametrize("k", [3, TRAINED, 8])
def test_every_row_of_a_block_sees_the_last(draft, k):
    """Attention within a block is not causal."""
    before = run(draft, with_context(draft, 13), [(0, 13, ANCHOR)], k)[0]
    after = run(draft, with_context(draft, 13), [(0, 13, ANCHOR)], k, last=11)[0]
    assert ((before - after).abs().amax(-1) > 1e-3).all()


@pytest.mark.parametrize("position", [13 - WINDOW, 12])
def test_every_row_of_a_block_sees_all_of_the_window(draft, position):
    windows = with_context(draft, 13)
    before = run(draft, windows, [(0, 13, ANCHOR)], 5)[0]
    write(draft, windows, 0, taps(1, 5), position)
    after = run(draft, windows, [(0, 13, ANCHOR)], 5)[0]
    assert ((before - after).abs().amax(-1) > 1e-3).all()


def rows_of_no_concern(windows, kind, start, k):
    """(blocks, rows) of the memory that a block of request 0 at `start` must not read."""
    blocks = windows.blocks[0].tolist()

    def places(positions):
        return [(blocks[p // BLOCK], p % BLOCK) for p in positions]

    return {
        "the null block": [(0, row) for row in range(BLOCK)],
        "beyond the window": places(range(max(0, start - WINDOW))),
        "beyond the block": places(range(start + k, LENGTH)),
        "other requests": [
            (block, row)
            for block in windows.blocks[1:].flatten().tolist()
            for row in range(BLOCK)
        ],
    }[kind]


@pytest.mark.parametrize("value", [torch.nan, 3e38])
@pytest.mark.parametrize(
    "kind",
    ["the null block", "beyond the window", "beyond the block", "other requests"],
)
@pytest.mark.parametrize("start", [1, 13])
@pytest.mark.parametrize("k", [1, 5])
def test_rows_that_are_not_the_blocks_change_no_bit(any_draft, kind, value, start, k):
    """With a context of one token the rest of the window lies before the sequence."""

    def outcome(poison):
        windows = Windows(any_draft, 3, LENGTH)
        windows.memory.zero_()
        write(any_draft, windows, 0, taps(start))
        places = rows_of_no_concern(windows, kind, start, k)
        assert places or (kind, start) == ("beyond the window", 1)
        for block, row in places if poison else ():
            windows.memory[block, :, row] = value
        return run(any_draft, windows, [(0, start, ANCHOR)], k)

    want = outcome(poison=False)
    assert want.isfinite().all()
    assert torch.equal(outcome(poison=True), want)


def test_mates_with_poisoned_rows_leave_the_others_as_they_were(any_draft):
    """A mate's window of NaN makes its own rows NaN, and nobody else's."""
    windows = Windows(any_draft, 3, LENGTH)
    write(any_draft, windows, 0, taps(13))
    write(any_draft, windows, 2, taps(3, 2))
    windows.memory[windows.blocks[1].long()] = torch.nan
    blocks = [(0, 13, ANCHOR), (1, 13, ANCHOR), (2, 3, ANCHOR)]
    got = run(any_draft, windows, blocks, 5)
    assert got[1].isnan().all()
    assert far(got[0], oracle(13, 5)[1]) <= TOLERANCE
    assert far(got[2], oracle(3, 5, 2)[1]) <= TOLERANCE


# What is written


def test_context_with_slot_minus_one_is_written_nowhere(draft):
    windows = with_context(draft, 13)
    before = windows.memory.clone()
    caches = windows.caches(windows.blocks[:1], [-1] * 5)
    # Positions of rows that are not written may be anything.
    positions = torch.tensor([-1, 0, 13, 1 << 40, -(1 << 40)])
    draft.write_context(draft.context(taps(5, 1)), positions, caches)
    assert torch.equal(windows.memory.nan_to_num(9e9), before.nan_to_num(9e9))


def test_only_rows_with_a_slot_are_written(draft):
    """The accepted rows of a verification lie between rejected ones, which have no slot."""
    whole = with_context(draft, 13)
    windows = Windows(draft, 1, LENGTH)
    rows = torch.cat((taps(13)[:6], taps(3, 1), taps(13)[6:], taps(2, 1)))
    slots = windows.slots(0, range(13))
    slots = slots[:6] + [-1] * 3 + slots[6:] + [-1] * 2
    positions = torch.tensor([*range(6), 0, 0, 0, *range(6, 13), 0, 0])
    caches = windows.caches(windows.blocks[:1], slots)
    draft.write_context(draft.context(rows), positions, caches)
    assert torch.equal(windows.memory.isnan(), whole.memory.isnan())
    assert far(windows.memory.nan_to_num(), whole.memory.nan_to_num()) <= TOLERANCE


def test_a_block_with_slots_minus_one_is_written_nowhere(draft):
    """An idle rank's block: null blocks in its table, nothing to write."""
    windows = with_context(draft, 13)
    before = windows.memory.clone()
    batch, _ = windows.step([(0, 0, 5)])
    caches = windows.caches(torch.zeros_like(windows.blocks), [-1] * 5)
    with torch.inference_mode():
        draft(embed("dspark", torch.tensor(block_ids(5))), batch, caches)
    assert torch.equal(windows.memory.nan_to_num(9e9), before.nan_to_num(9e9))


@SETTINGS
@given(
    rows=st.integers(1, 21),
    cuts=st.sets(st.integers(1, 20)),
    order=st.integers(0, 99),
    k=st.sampled_from([1, 3, 5, 8]),
)
def test_context_in_any_chunks_gives_the_same_block(draft, rows, cuts, order, k):
    windows = Windows(draft, 2, LENGTH, seed=order)
    ends = [0, *sorted(cut for cut in cuts if cut < rows), rows]
    for first, end in pairwise(ends):
        write(draft, windows, 1, taps(rows)[first:end], first)
    got = run(draft, windows, [(1, rows, ANCHOR)], k)[0]
    assert far(got, oracle(rows, k)[1]) <= TOLERANCE


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_rejected_rows_leave_no_trace(draft, kept):
    """A draft's block and, behind the accepted rows, context that is rejected: overwritten, they were never there."""
    rows = taps(16)

    def outcome(rejected):
        windows = Windows(draft, 1, LENGTH)
        write(draft, windows, 0, rows[:10])
        if rejected:
            run(draft, windows, [(0, 10, 90)], 8)
            write(draft, windows, 0, taps(6, 3), 10 + kept)
        write(draft, windows, 0, rows[10 : 13 + kept], 10)
        return run(draft, windows, [(0, 13 + kept, ANCHOR)], 3)

    want = outcome(rejected=False)
    assert torch.equal(outcome(rejected=True), want)
    assert far(want[0], oracle_of(rows[: 13 + kept], 3)) <= TOLERANCE


def oracle_of(rows, k):
    tensors, config = plain("dspark")
    context = plain_drafts.dspark_context(tensors, config, rows)
    return plain_drafts.dspark_block(tensors, config, context, 0, ANCHOR, k)[0]


# Storage


def test_fp8_rows_are_stored_as_their_codec_rounds_them():
    """To the bit what float32 rows give whose values went through the codec."""
    config = config_of(checkpoint("dspark"))
    fp8 = kv_codec("fp8_ds_mla", torch.float32, config)
    whole = kv_codec("float32", torch.float32, config)
    rounding = replace(
        whole,
        kv=replace(
            whole.kv, encode=lambda values: fp8.kv.decode(fp8.kv.encode(values))
        ),
    )
    outcomes = []
    for codec in (fp8, rounding):
        draft = filled("dspark", codec=codec, ops="torch")
        outcomes.append(run(draft, with_context(draft, 21), [(0, 21, ANCHOR)], 5)[0])
    assert torch.equal(*outcomes)


@pytest.mark.parametrize(
    ("name", "bound"), [("fp8_ds_mla", 1 / 16), ("bfloat16", 1 / 256)]
)
@pytest.mark.parametrize("rows", [5, 21])
def test_block_is_off_by_no_more_than_a_stored_value(name, bound, rows):
    """A value of e4m3 is off by 1/16 of itself at most, one of bf16 by 1/256; so is the block, in norm."""
    codec = kv_codec(name, torch.float32, config_of(checkpoint("dspark")))
    draft = filled("dspark", codec=codec)
    _, want, _ = oracle(rows, 5)
    got = run(draft, with_context(draft, rows), [(0, rows, ANCHOR)], 5)[0].double()
    error = float((got - want).norm() / want.norm())
    assert TOLERANCE < error <= bound


# The end of the model's length


@pytest.mark.parametrize("start", [LENGTH - 5, LENGTH - 3, LENGTH - 1, LENGTH])
@pytest.mark.parametrize("k", [1, 3, TRAINED, 8])
def test_blocks_at_the_end_of_the_models_length_stay_finite(draft, start, k):
    """Positions and lengths are clamped as vLLM clamps them; mates see nothing of it."""
    windows = Windows(draft, 2, LENGTH)
    write(draft, windows, 0, taps(start))
    write(draft, windows, 1, taps(13))
    blocks = [(0, start, ANCHOR), (1, 13, ANCHOR)]
    got = run(draft, windows, blocks, k, max_len=LENGTH)
    assert got.isfinite().all()
    assert far(got[1], oracle(13, k)[1]) <= TOLERANCE
    if start + k <= LENGTH:
        assert far(got[0], oracle(start, k)[1]) <= TOLERANCE


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("left", [1, 2, 3])
def test_slots_of_a_block_beyond_the_models_length_are_seen_by_none(
    any_draft, left, written
):
    """The others are what a block of `left` slots gives, whether the rows beyond the end are written or were never."""
    start, k = 36, 4
    windows = Windows(any_draft, 1, LENGTH)
    write(any_draft, windows, 0, taps(start))
    batch, caches = windows.step([(0, start, k)], max_len=start + left)
    if not written:
        caches[0].table.slots[left:] = -1
    with torch.inference_mode():
        got = any_draft(embed("dspark", torch.tensor(block_ids(k))), batch, caches)
    assert got.isfinite().all()
    assert far(got[:left], oracle(start, left)[1]) <= TOLERANCE


# Its config


def test_config_is_read_from_the_checkpoints():
    _, hf = plain("dspark")
    assert DSparkConfig.from_hf(hf) == DSparkConfig((0, 1), TRAINED, 159, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dspark_block_size": None}, "dspark_block_size is missing"),
        ({"dspark_target_layer_ids": None}, "dspark_target_layer_ids is missing"),
        ({"dspark_target_layer_ids": []}, "must ascend within the 2 layers"),
        ({"dspark_target_layer_ids": [1, 0]}, "must ascend within the 2 layers"),
        ({"dspark_target_layer_ids": [1, 1]}, "must ascend within the 2 layers"),
        ({"dspark_target_layer_ids": [0, 2]}, "must ascend within the 2 layers"),
        ({"dspark_target_layer_ids": [-1]}, "must ascend within the 2 layers"),
        ({"dspark_noise_token_id": 160}, "= 160 is not one of 160 tokens"),
        ({"dspark_noise_token_id": -1}, "= -1 is not one of 160 tokens"),
        ({"dspark_markov_rank": 0}, "dspark_markov_rank = 0 must be an integer"),
    ],
    ids=str,
)
def test_configs_that_name_what_is_not_there_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        DSparkConfig.from_hf(plain("dspark")[1] | change)
