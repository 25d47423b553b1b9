"""However a sequence is cut, batched and placed in memory, its log-probabilities are those of the sequence alone.

float32, within 1e-3: products of fewer than eight rows round differently. Caches start as NaN, block 0 included.
"""

import itertools
import random

import pytest
import torch
from harness import (
    TOLERANCE,
    Runner,
    checkpoint,
    checksum,
    chunked,
    model,
    one_shot,
    tokens,
)
from hypothesis import given, settings
from hypothesis import strategies as st

LENGTH = 300
IDS = tokens(LENGTH, seed=11)
SETTINGS = settings(max_examples=12, deadline=None, derandomize=True, database=None)


@pytest.fixture(scope="module")
def small():
    return model(checkpoint())


@pytest.fixture(scope="module")
def alone(small):
    return one_shot(small, IDS)


@pytest.fixture(scope="module", params=[None, 5], ids=["paged", "ring"])
def ring(request):
    """None: state in blocks. A number: in rings that spare so many tokens for drafts."""
    return request.param


def far(got, want):
    """[n] largest difference at each position; a selection that turned at equal scores shows at its own position alone."""
    return (got - want).abs().amax(-1)


@SETTINGS
@given(cuts=st.lists(st.integers(1, LENGTH - 1), max_size=8), seed=st.integers(0, 99))
def test_any_cut_and_any_order_of_blocks(small, alone, ring, cuts, seed):
    got = chunked(small, IDS, cuts, seed=seed, ring=ring)
    assert far(got, alone).max() <= TOLERANCE


@pytest.mark.parametrize("ratio", [4, 128])
def test_cuts_at_every_residue_leave_the_same_entries(small, ring, ratio):
    """The compressed rows themselves, not only what attention makes of them."""
    length = 2 * ratio + 3

    def entries(cuts):
        runner = Runner(small, {0: IDS[:length]}, length, ring=ring)
        ends = [0, *cuts, length]
        for start, end in itertools.pairwise(ends):
            runner.step([(0, start, end - start)])
        return {
            key: rows[rows.isfinite().all(-1)]
            for key, rows in runner.state.rows.items()
            if "compressor" not in key[1] and key[1] != "window"
        }

    whole = entries([])
    assert sum(rows.shape[0] for rows in whole.values()) >= 2
    for cut in range(1, length, 1 if ratio == 4 else 13):
        for key, rows in entries([cut]).items():
            torch.testing.assert_close(rows, whole[key], rtol=1e-4, atol=1e-4)


@SETTINGS
@given(seed=st.integers(0, 10**6))
def test_mates_never_change_a_sequence(small, alone, ring, seed):
    """Four sequences of different lengths advance in random chunks, in random order within the batch, some steps padded."""
    draw = random.Random(seed)
    lengths = {0: LENGTH, 1: 5, 2: 140, 3: 70}
    sequences = {0: IDS} | {n: tokens(c, seed=n) for n, c in lengths.items() if n}
    runner = Runner(small, sequences, LENGTH, seed=seed, ring=ring)
    done = dict.fromkeys(lengths, 0)
    while any(done[n] < lengths[n] for n in lengths):
        chunks = []
        for n in draw.sample(sorted(lengths), len(lengths)):
            count = min(lengths[n] - done[n], draw.choice([0, 1, 1, 2, 5, 17, 64, 130]))
            if count:
                chunks.append((n, done[n], count))
                done[n] += count
        if chunks:
            runner.step(
                chunks, pad_tokens=draw.choice([0, 0, 3]), slack=draw.choice([0, 9])
            )
    assert far(runner.logits[0].log_softmax(-1), alone).max() <= TOLERANCE
    for n in (1, 2, 3):
        want = one_shot(small, sequences[n])
        assert far(runner.logits[n].log_softmax(-1), want).max() <= TOLERANCE


@pytest.mark.parametrize("last", [1, 127, 128, 129, 255, 256, 257])
def test_a_short_last_chunk_ends_as_one_shot(small, ring, last):
    ids = tokens(700, seed=2)
    want = one_shot(small, ids)
    got = chunked(small, ids, [128, 350, 700 - last], ring=ring)
    assert far(got[-1:], want[-1:]).max() <= TOLERANCE


@pytest.mark.parametrize("start", [126, 127, 128, 251, 254, 255])
def test_rows_of_one_chunk_that_straddle_a_boundary_are_causal_one_by_one(
    small, alone, ring, start
):
    """Verification of drafts: rows of one step see entries by their own position (groups of 4 and of 128)."""
    runner = Runner(small, {0: IDS, 1: tokens(90, seed=1)}, LENGTH, ring=ring)
    runner.step([(0, 0, start)])
    runner.step([(1, 0, 80)])
    got = runner.step([(1, 80, 1), (0, start, 6), (1, 81, 1)][:2])
    assert far(got[1:].log_softmax(-1), alone[start : start + 6]).max() <= TOLERANCE


@pytest.mark.parametrize("kept", [0, 1, 2, 5])
@pytest.mark.parametrize("start", [121, 124, 126, 127, 203])
def test_rejected_drafts_leave_no_trace(small, alone, ring, start, kept):
    """Six draft rows are written, `kept` of them right; then the sequence goes on from the first wrong one."""
    runner = Runner(small, {0: IDS}, LENGTH, ring=ring)
    runner.step([(0, 0, start)])
    draft = IDS[start : start + 6].clone()
    draft[kept:] = (draft[kept:] + 7) % 160
    runner.step([(0, start, 6)], ids=draft)
    for p in range(start + kept, start + kept + 9):
        runner.step([(0, p, 1)])
    end = start + kept + 9
    runner.step([(0, end, LENGTH - end)])
    got = runner.logits[0].log_softmax(-1)
    assert far(got[start + kept :], alone[start + kept :]).max() <= TOLERANCE


def test_padding_and_skipped_rows_write_nothing(small, ring):
    runner = Runner(small, {0: IDS}, LENGTH, ring=ring)
    runner.step([(0, 0, 127)])
    before = checksum(runner.state)
    batch, state = runner.state.step([(0, 127, 5)], pad_tokens=4)
    for layer in state:
        for cache in vars(layer).values():
            if cache is not None:
                cache.table.slots.fill_(-1)
    with torch.inference_mode():
        small(torch.full((9,), -1), batch, state)
    after = checksum(runner.state)
    assert all(torch.equal(after[key], rows) for key, rows in before.items())


def test_padding_tokens_change_no_byte_of_what_is_written(small, ring):
    states = []
    for padding in (0, 5):
        runner = Runner(small, {0: IDS}, LENGTH, ring=ring)
        runner.step([(0, 0, 130)], pad_tokens=padding)
        states.append(runner.state.rows)
    for key, rows in states[0].items():
        written = rows.isfinite()
        assert torch.equal(written, states[1][key].isfinite())
        torch.testing.assert_close(rows[written], states[1][key][written])


def test_a_request_without_tokens_in_the_batch_changes_nothing(small, alone, ring):
    """Graph replay pads requests: query_start_loc repeats its end, lengths and block ids are whatever was there."""
    runner = Runner(small, {0: IDS}, LENGTH, ring=ring)
    runner.step([(0, 0, 200)])
    batch, state = runner.state.step([(0, 200, 3)])
    batch.query_start_loc = torch.tensor([0, 3, 3, 3], dtype=torch.int32)
    batch.seq_lens = torch.tensor([203, 0, 77], dtype=torch.int32)
    for table in {
        id(c.table): c.table for s in state for c in vars(s).values() if c
    }.values():
        table.blocks = torch.cat(
            (table.blocks, torch.zeros_like(table.blocks).repeat(2, 1))
        )
    with torch.inference_mode():
        streams, _ = small(IDS[200:203], batch, state)
        got = small.logits(small.reduce(streams)).log_softmax(-1)
    assert far(got, alone[200:203]).max() <= TOLERANCE


def test_a_freed_block_is_reused_at_once(small, alone, ring):
    """Many requests, one after the other, through memory for one."""
    runner = Runner(small, {0: IDS}, LENGTH, ring=ring)
    for _ in range(4):
        runner.step([(0, 0, 170)])
        runner.step([(0, 170, LENGTH - 170)])
        assert far(runner.logits[0].log_softmax(-1), alone).max() <= TOLERANCE
        runner.state.release(0)
