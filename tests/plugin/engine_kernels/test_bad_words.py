"""Bad words against the interpreted kernel."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.worker.gpu.sample import bad_words as upstream

from .harness import check
from .recording import record

KERNEL = "vllm.v1.worker.gpu.sample.bad_words._bad_words_kernel"
VOCAB, LENGTH, WORDS, TOKENS = 4, 12, 5, 20


def launch_of(requests, drafts, words):
    """Launch for requests given as (prompt, output), their drafts and bad words."""
    slots = len(requests)
    flat = torch.zeros(slots, TOKENS).int()
    offsets = torch.zeros(slots, WORDS + 1).int()
    tokens = torch.full((slots, LENGTH), 9).int()
    for slot, (prompt, output) in enumerate(requests):
        joined = [token for word in words[slot] for token in word]
        flat[slot, : len(joined)] = torch.tensor(joined).int()
        ends = torch.tensor([0, *map(len, words[slot])]).cumsum(0)
        offsets[slot, : len(ends)] = ends
        history = [*prompt, *output]
        tokens[slot, : len(history)] = torch.tensor(history).int()
    num_rows = torch.tensor([1 + len(draft) for draft in drafts])
    fed = [token for draft in drafts for token in (0, *draft)]
    logits = torch.zeros(len(fed), VOCAB + 1)
    num_words = torch.tensor([len(w) for w in words]).int()
    lengths = [(len(p), len(p) + len(o)) for p, o in requests]
    return record(
        lambda: upstream.apply_bad_words(
            logits[:, :VOCAB],
            torch.arange(slots).repeat_interleave(num_rows).int(),
            flat,
            offsets,
            num_words,
            tokens,
            torch.tensor([length[0] for length in lengths]).int(),
            torch.tensor([length[1] for length in lengths]).int(),
            torch.tensor(fed).int(),
            torch.cat([torch.arange(n) for n in num_rows.tolist()]).int(),
            max(1, int(num_words.max())),
        ),
        KERNEL,
    )[0]


token = st.integers(0, VOCAB - 1)
request = st.tuples(
    st.lists(token, min_size=1, max_size=4), st.lists(token, max_size=5)
)
draft = st.lists(st.integers(-1, VOCAB - 1), max_size=3)
bad_words = st.lists(st.lists(token, min_size=1, max_size=4), max_size=WORDS)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(request, draft, bad_words), min_size=1, max_size=3))
def test_masking_leaves_the_bits_of_the_kernel(batch):
    check(launch_of(*map(list, zip(*batch, strict=True))))


def masked(output, drafts, word):
    after = check(launch_of([([3, 1], output)], [drafts], [[word]]))["logits_ptr"]
    return [row.isinf().nonzero().flatten().tolist() for row in after]


def test_the_last_token_is_masked_after_the_others():
    assert masked([0, 1, 2], [], [1, 2, 0]) == [[0]]
    assert masked([0, 2, 1], [], [1, 2, 0]) == [[]]


def test_a_word_of_one_token_is_always_masked():
    assert masked([], [1], [2]) == [[2], [2]]


def test_a_word_does_not_begin_in_the_prompt():
    assert masked([2], [], [1, 2, 0]) == [[]]


def test_a_word_may_run_on_into_the_drafts():
    assert masked([0, 1], [2, 0], [1, 2, 0]) == [[], [0], []]
