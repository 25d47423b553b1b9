"""The budget of reasoning tokens against the interpreted kernels."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.worker.gpu.sample import thinking_budget as upstream

from .harness import check
from .recording import record

MODULE = "vllm.v1.worker.gpu.sample.thinking_budget"
KERNELS = [
    f"{MODULE}._update_committed_marker_cache_kernel",
    f"{MODULE}._thinking_budget_kernel",
]
LENGTH, VOCAB = 3000, 6


def launches_of(histories, drafts, budgets, markers, caches=None):
    """Both launches; markers are (start, natural end, forced end)."""
    slots = len(histories)
    tokens = torch.full((slots, LENGTH), 9).int()
    for slot, history in enumerate(histories):
        tokens[slot, : len(history)] = torch.tensor(history).int()
    rows = torch.tensor([1 + len(draft) for draft in drafts])
    if caches is None:
        caches = [[-1] * slots, [-1] * slots, [0] * slots]
    logits = torch.zeros(int(rows.sum()), VOCAB + 2)
    call = (
        logits[:, :VOCAB],
        torch.arange(slots).int(),
        torch.arange(slots).repeat_interleave(rows).int(),
        torch.tensor(budgets).int(),
        tokens,
        torch.tensor([len(history) for history in histories]).int(),
        torch.tensor([t for draft in drafts for t in (0, *draft)]).int(),
        torch.cat([torch.arange(n) for n in rows.tolist()]).int(),
        *(torch.tensor(cache).int() for cache in caches),
        *(torch.tensor(marker).int() for marker in markers),
    )
    return record(lambda: upstream.apply_thinking_budget(*call), *KERNELS)


token = st.integers(0, 2)
marker = st.lists(token, min_size=1, max_size=3)
request = st.tuples(
    st.lists(token, max_size=12),
    st.lists(st.integers(-1, 2), max_size=4),
    st.integers(-1, 6),
)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(request, min_size=1, max_size=3),
    st.tuples(marker, marker, marker),
    st.lists(st.integers(-1, 14), min_size=9, max_size=9),
    st.booleans(),
)
def test_both_kernels_leave_the_same_bits(batch, markers, cached, resumed):
    histories, drafts, budgets = map(list, zip(*batch, strict=True))
    caches = None
    if resumed:
        slots = len(batch)
        caches = [cached[i * 3 : i * 3 + slots] for i in range(3)]
        caches[2] = [max(0, position) for position in caches[2]]
    for launch in launches_of(histories, drafts, budgets, markers, caches):
        check(launch)


def test_a_long_history_is_scanned_back_to_the_block_of_its_last_marker():
    history = [5] * 2500
    history[40] = 1
    history[1023] = 1
    history[1475:1477] = [2, 3]
    history[1477] = 1
    launches = launches_of([history], [[]], [3], ([1], [2, 3], [2, 3]))
    after = check(launches[0])
    assert after["cached_last_start_ptr"].tolist() == [1477]
    assert after["cached_scan_pos_ptr"].tolist() == [2499]
    assert check(launches[1])["logits_ptr"][0].argmax() == 2


def forced(history, drafts, budget):
    """Token forced in each row, None where there is none; markers 1, 2, and 2 3."""
    launches = launches_of([history], [drafts], [budget], ([1], [2], [2, 3]))
    logits = check(launches[1])["logits_ptr"]
    return [int(row.argmax()) if row.any() else None for row in logits]


def test_the_end_is_forced_once_the_budget_is_used_up():
    assert forced([0, 1, 4, 4], [], 3) == [None]
    assert forced([0, 1, 4, 4], [], 2) == [2]
    assert forced([0, 4, 4, 4], [], 2) == [None]
    assert forced([0, 1, 4, 2], [], 2) == [None]
    assert forced([0, 1, 4, 4], [], -1) == [None]


def test_drafts_count_and_may_end_the_reasoning():
    assert forced([0, 1, 4], [4, 2, 5], 2) == [None, 2, None, None]


def test_a_marker_begun_is_continued():
    launches = launches_of([[1, 4, 2]], [[]], [1], ([1], [2, 3], [2, 3]))
    assert check(launches[1])["logits_ptr"][0].argmax() == 3
