"""Drafts that are cut among ranks draft as the whole one, and trust their drafts equally."""

import pytest
import test_dspark_draft as dspark
import test_mtp_draft as mtp
import torch
from draft_harness import TOLERANCE, Windows, far, filled
from ranks import at_once, ranks

ROWS, K = 13, 5
WAYS = pytest.mark.parametrize(("size", "replicas"), [(2, 1), (1, 2), (2, 3)])


@WAYS
def test_dspark_ranks_give_the_hidden_states_of_the_oracle(size, replicas):
    _, want, _ = dspark.oracle(ROWS, K)
    parts = [
        (filled("dspark", parallel=place), place) for place in ranks(size, replicas)
    ]

    def run(part):
        draft, place = part
        windows = dspark.with_context(draft, ROWS)
        # Each replica has a block of its own, or two of them.
        blocks = [(0, ROWS, dspark.ANCHOR)] * (1 + place.replica % 2)
        return dspark.run(draft, windows, blocks, K)[0]

    for hidden in at_once(run, parts):
        assert far(hidden, want) <= TOLERANCE


def test_confidences_are_the_same_on_every_rank_to_the_bit():
    parts = [filled("dspark", parallel=place) for place in ranks(2)]

    @torch.inference_mode()
    def run(draft):
        windows = dspark.with_context(draft, ROWS)
        hidden = dspark.run(draft, windows, [(0, ROWS, dspark.ANCHOR)], K)[0]
        return draft.confidence(hidden, draft.markov_embed(torch.arange(K)))

    one, other = at_once(run, parts)
    assert torch.equal(one, other)
    assert one.std() > 0


@WAYS
def test_mtp_ranks_give_the_streams_of_the_oracle(size, replicas):
    want, _ = mtp.oracle()
    parts = [filled("mtp", parallel=place) for place in ranks(size, replicas)]

    def run(draft):
        windows = Windows(draft, 1, mtp.LENGTH)
        return mtp.run(draft, windows, [(0, 0, mtp.COUNT)], [mtp.inputs()])

    for streams in at_once(run, parts):
        assert far(streams, want) <= TOLERANCE
