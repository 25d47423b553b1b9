"""The MTP draft against the oracle's slow loop, float32 within 1e-5, however its rows are cut, batched and placed."""

import random
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
from harness import VOCABULARY, config_of
from hypothesis import given, settings
from hypothesis import strategies as st

from atom_vllm_bridge.models.quantization.kv_codecs import kv_codec

COUNT = 21
LENGTH = 40
SETTINGS = settings(max_examples=15, deadline=None, derandomize=True, database=None)


@pytest.fixture(scope="module")
def draft():
    return filled("mtp")


@pytest.fixture(scope="module", params=["", "torch"], ids=["default ops", "torch ops"])
def any_draft(request):
    """Providers differ in whether they touch what is hidden."""
    return filled("mtp", ops=request.param)


@cache
def inputs(count=COUNT, seed=0):
    """Streams [T, n, d] of a target, and ids [T] of the token after each."""
    _, config = plain("mtp")
    streams = noise(count, config["hc_mult"], config["hidden_size"], seed=seed)
    g = torch.Generator().manual_seed(seed)
    return streams, torch.randint(0, VOCABULARY, (count,), generator=g)


@cache
def oracle(count=COUNT, seed=0, first=0, window=WINDOW):
    """Streams out and logits of a request that begins at position `first`."""
    tensors, config = plain("mtp", window)
    streams, ids = inputs(count, seed)
    out = plain_drafts.mtp_forward(
        tensors, config, streams, ids, range(first, first + count)
    )
    return out, plain_drafts.mtp_logits(tensors, config, out)


@torch.inference_mode()
def run(draft, windows, chunks, rows, window=WINDOW, **padding):
    """Streams out [T, n, d] of a batch of chunks (request, first position, tokens).

    Args:
        rows: (streams, ids) of each chunk.
    """
    streams = torch.cat([streams for streams, _ in rows])
    ids = torch.cat([ids for _, ids in rows])
    tokens = len(ids)
    pad = padding.get("pad_tokens", 0)
    streams = torch.cat((streams, noise(pad, *streams.shape[1:])))
    ids = torch.cat((ids, ids.new_zeros(pad)))
    batch, (cache_,) = windows.step(chunks, **padding)
    return draft(embed("mtp", ids, window), streams, batch, cache_)[:tokens]


def run_cut(draft, windows, request, cuts, count=COUNT, seed=0, first=0):
    """One request, in chunks that end at `cuts` and at the end."""
    streams, ids = inputs(count, seed)
    ends = [0, *sorted(cut for cut in cuts if 0 < cut < count), count]
    outputs = []
    for start, end in pairwise(ends):
        rows = (streams[start:end], ids[start:end])
        chunk = (request, first + start, end - start)
        outputs.append(run(draft, windows, [chunk], [rows]))
    return torch.cat(outputs)


def logits_of(draft, streams, window=WINDOW):
    return unembed("mtp", draft.head_input(streams), window)


@pytest.mark.parametrize("ops", ["", "torch"], ids=["default ops", "torch ops"])
@pytest.mark.parametrize("count", [1, 2, WINDOW, COUNT])
def test_from_position_zero_it_is_the_oracle(count, ops):
    draft = filled("mtp", ops=ops)
    want, want_logits = oracle(count)
    got = run_cut(draft, Windows(draft, 1, LENGTH), 0, [], count)
    assert got.shape == want.shape
    assert got.dtype == torch.float32
    assert far(got, want) <= TOLERANCE
    assert far(logits_of(draft, got), want_logits) <= TOLERANCE
    assert want_logits.abs().max() > 1


@pytest.mark.parametrize("cuts", [(), (1, 9, 10)])
def test_from_position_300_it_is_the_oracle(draft, cuts):
    """The first rows look back on rows that nobody has written; from the first whole window on, all is there."""
    want, want_logits = oracle(first=300)
    got = run_cut(draft, Windows(draft, 1, 330), 0, cuts, first=300)
    assert got[: WINDOW - 1].isnan().any()
    got, want = got[WINDOW - 1 :], want[WINDOW - 1 :]
    assert far(got, want) <= TOLERANCE
    assert far(logits_of(draft, got), want_logits[WINDOW - 1 :]) <= TOLERANCE


@pytest.mark.parametrize("cuts", [(), (60, 61, 140)])
def test_it_is_the_oracle_with_the_published_window(cuts):
    count = 150
    draft = filled("mtp", 128)
    want, _ = oracle(count, window=128)
    windows = Windows(draft, 1, 200, block=64)
    streams, ids = inputs(count)
    outputs = [
        run(draft, windows, [(0, a, b - a)], [(streams[a:b], ids[a:b])], window=128)
        for a, b in pairwise((0, *cuts, count))
    ]
    assert far(torch.cat(outputs), want) <= TOLERANCE


@SETTINGS
@given(cuts=st.sets(st.integers(1, COUNT - 1)), order=st.integers(0, 99))
def test_any_cut_and_any_order_of_blocks_give_the_same(draft, cuts, order):
    windows = Windows(draft, 2, LENGTH, seed=order)
    assert far(run_cut(draft, windows, 1, cuts), oracle()[0]) <= TOLERANCE


@SETTINGS
@given(seed=st.integers(0, 10**6))
def test_mates_and_padding_change_nothing(draft, seed):
    """Three requests of different lengths advance in random chunks, in random order within the batch."""
    draw = random.Random(seed)
    lengths = {0: COUNT, 1: 3, 2: WINDOW + 2}
    windows = Windows(draft, 3, LENGTH, seed=seed)
    outputs: dict[int, list] = {request: [] for request in lengths}
    done = dict.fromkeys(lengths, 0)
    while any(done[r] < lengths[r] for r in lengths):
        chunks, rows = [], []
        for r in draw.sample(sorted(lengths), len(lengths)):
            count = min(lengths[r] - done[r], draw.choice([0, 1, 1, 2, 5, 9]))
            if count:
                streams, ids = (x[done[r] : done[r] + count] for x in inputs(seed=r))
                chunks.append((r, done[r], count))
                rows.append((streams, ids))
                done[r] += count
        if chunks:
            padding = {
                "pad_tokens": draw.choice([0, 0, 3]),
                "pad_requests": draw.choice([0, 0, 2]),
            }
            out = run(draft, windows, chunks, rows, **padding)
            parts = out.split([count for _, _, count in chunks])
            for (r, _, _), part in zip(chunks, parts, strict=True):
                outputs[r].append(part)
    for r, count in lengths.items():
        want = oracle(seed=r)[0][:count]
        assert far(torch.cat(outputs[r]), want) <= TOLERANCE


@pytest.mark.parametrize("rejected", [0, 2])
def test_drafting_goes_on_from_its_own_streams(draft, rejected):
    """K = 3 for two requests; the first step's batch also holds rows of tokens that were rejected."""
    tensors, config = plain("mtp")
    lengths = {0: 5, 1: 13}
    windows = Windows(draft, 2, LENGTH)
    rows = {}
    for r, count in lengths.items():
        streams, ids = inputs(seed=r)
        rows[r] = (streams[:count], ids[:count])
    wrong, wrong_ids = (x[:rejected] for x in inputs(seed=9))
    spoiled = [
        (torch.cat((streams, wrong)), torch.cat((ids, wrong_ids)))
        for streams, ids in rows.values()
    ]
    chunks = [(r, 0, count + rejected) for r, count in lengths.items()]
    out = run(draft, windows, chunks, spoiled)
    last = torch.tensor([lengths[0] - 1, lengths[0] + rejected + lengths[1] - 1])
    streams, drafted = out[last], list[torch.Tensor]()
    for step in range(3):
        if step:
            chunks = [(r, count + step - 1, 1) for r, count in lengths.items()]
            pairs = [(streams[r : r + 1], drafted[-1][r : r + 1]) for r in lengths]
            streams = run(draft, windows, chunks, pairs)
        drafted.append(logits_of(draft, streams).argmax(-1))

    for r, count in lengths.items():
        R, ids = rows[r]
        for step in range(3):
            out = plain_drafts.mtp_forward(tensors, config, R, ids, range(len(ids)))
            logits = plain_drafts.mtp_logits(tensors, config, out[-1:])[0]
            best = logits.topk(2).values
            assert best[0] - best[1] > 10 * TOLERANCE
            assert int(drafted[step][r]) == int(logits.argmax())
            R = torch.cat((R.double(), out[-1:]))
            ids = torch.cat((ids, logits.argmax().view(1)))
        assert far(streams[r], out[-1]) <= TOLERANCE
        assert len(ids) == count + 3


def test_position_zero_embeds_as_zero_and_no_other(draft):
    streams, ids = inputs(2)
    first = [
        run(draft, Windows(draft, 1, 8), [(0, 0, 1)], [(streams[:1], token.view(1))])
        for token in (ids[0], torch.tensor(11))
    ]
    assert torch.equal(*first)
    second = []
    for token in (ids[1], torch.tensor(11)):
        windows = Windows(draft, 1, 8)
        pair = (streams, torch.stack((ids[0], token)))
        second.append(run(draft, windows, [(0, 0, 2)], [pair]))
    assert torch.equal(second[0][0], second[1][0])
    assert far(second[0][1], second[1][1]) > 1e-3


def test_padding_at_any_position_is_no_token(draft):
    """Padding may hold any position; what it computes is thrown away, and nothing of it is kept."""
    windows = Windows(draft, 1, LENGTH)
    streams, ids = inputs()
    batch, (cache_,) = windows.step([(0, 0, 5)], pad_tokens=3)
    batch.positions[5:] = torch.tensor([-1, 0, 1 << 40])
    streams = torch.cat((streams[:5], torch.full_like(streams[:3], torch.nan)))
    with torch.inference_mode():
        got = draft(embed("mtp", ids[:8]), streams, batch, cache_)[:5]
    assert far(got, oracle()[0][:5]) <= TOLERANCE
    written = windows.memory.isfinite().all(-1).sum()
    assert written == 5


def test_slots_minus_one_write_nothing(draft):
    windows = Windows(draft, 1, LENGTH)
    run_cut(draft, windows, 0, [])
    before = windows.memory.clone()
    streams, ids = inputs(5)
    batch, _ = windows.step([(0, 3, 5)])
    (cache_,) = windows.caches(windows.blocks, [-1] * 5)
    with torch.inference_mode():
        draft(embed("mtp", ids), streams, batch, cache_)
    assert torch.equal(windows.memory.nan_to_num(9e9), before.nan_to_num(9e9))


@pytest.mark.parametrize("value", [torch.nan, 3e38])
@pytest.mark.parametrize("start", [1, 13])
@pytest.mark.parametrize("count", [1, 4])
def test_rows_out_of_sight_change_no_bit(any_draft, value, start, count):
    """The null block, rows beyond the window and behind the last token, and other requests' rows."""
    streams, ids = inputs()

    def outcome(poison):
        windows = Windows(any_draft, 2, LENGTH)
        windows.memory.zero_()
        head = (streams[:start], ids[:start])
        run(any_draft, windows, [(0, 0, start)], [head])
        if poison:
            seen = range(max(0, start - WINDOW + 1), start)
            kept = windows.rows(0, seen)
            windows.memory.fill_(value)
            slots = torch.tensor(windows.slots(0, seen))
            windows.memory[slots // BLOCK, :, slots % BLOCK] = kept
        rows = (streams[start : start + count], ids[start : start + count])
        return run(any_draft, windows, [(0, start, count)], [rows])

    want = outcome(poison=False)
    assert far(want, oracle()[0][start : start + count]) <= TOLERANCE
    assert torch.equal(outcome(poison=True), want)


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_rejected_rows_leave_no_trace(draft, kept):
    streams, ids = inputs()
    wrong = inputs(6, seed=5)

    def outcome(rejected):
        windows = Windows(draft, 1, LENGTH)
        run(draft, windows, [(0, 0, 10)], [(streams[:10], ids[:10])])
        if rejected:
            run(draft, windows, [(0, 10 + kept, 6)], [wrong])
        return run(draft, windows, [(0, 10, 11)], [(streams[10:], ids[10:])])

    want = outcome(rejected=False)
    assert torch.equal(outcome(rejected=True), want)
    assert far(want, oracle()[0][10:]) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "bound"), [("fp8_ds_mla", 1 / 16), ("bfloat16", 1 / 256)]
)
def test_streams_are_off_by_no_more_than_a_stored_value(name, bound):
    """A value of e4m3 is off by 1/16 of itself at most, one of bf16 by 1/256; so are the streams, in norm."""
    codec = kv_codec(name, torch.float32, config_of(checkpoint("mtp")))
    draft = filled("mtp", codec=codec)
    got, want = run_cut(draft, Windows(draft, 1, LENGTH), 0, []), oracle()[0]
    assert TOLERANCE < float((got - want).norm() / want.norm()) <= bound


@pytest.mark.parametrize("start", [LENGTH - 2, LENGTH - 1, LENGTH, LENGTH + 1])
def test_drafts_at_the_end_of_the_models_length_stay_finite(draft, start):
    """Positions and lengths are clamped as vLLM clamps them; mates see nothing of it."""
    windows = Windows(draft, 2, LENGTH)
    streams, ids = inputs(LENGTH + 2, seed=3)
    run(draft, windows, [(0, 0, LENGTH)], [(streams[:LENGTH], ids[:LENGTH])])
    mate, mate_ids = inputs()
    run(draft, windows, [(1, 0, 13)], [(mate[:13], mate_ids[:13])])
    rows = [
        (streams[start : start + 1], ids[start : start + 1]),
        (mate[13:14], mate_ids[13:14]),
    ]
    got = run(draft, windows, [(0, start, 1), (1, 13, 1)], rows, max_len=LENGTH)
    assert got.isfinite().all()
    assert far(got[1], oracle()[0][13]) <= TOLERANCE
