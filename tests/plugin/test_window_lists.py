"""What a window's builder writes for kernels that read lists: the same slots as the dense form, at addresses that stay."""

from types import SimpleNamespace

import pytest
import torch

from atom_vllm_bridge import step
from atom_vllm_bridge.attention import AtomMetadata, backend
from atom_vllm_bridge.attention.window_lists import MOST_QUERIES, window_lists
from atom_vllm_bridge.kv_cache import DraftWindowSpec, HeavyCompressorSpec, WindowSpec
from atom_vllm_bridge.models.deepseek_v4.dspark import BlockPlan
from atom_vllm_bridge.models.deepseek_v4.plan import Plan
from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.ops.registry import Choice

CPU, WINDOW, BLOCK, TOKENS = torch.device("cpu"), 8, 4, 40


def spec(kind):
    return kind(
        block_size=BLOCK,
        num_kv_heads=1,
        head_size=16,
        dtype=torch.bfloat16,
        sliding_window=WINDOW,
    )


CONFIG = SimpleNamespace(
    scheduler_config=SimpleNamespace(max_num_batched_tokens=TOKENS),
    speculative_config=None,
)


@pytest.fixture
def read(monkeypatch):
    """Attention is aiter's."""
    chosen = [Choice("sparse_attention", "cpu", "aiter", "first in the list")]
    monkeypatch.setattr(registry, "table", lambda: chosen)


def builder(kind=WindowSpec, name="model.layers.0.attn.window"):
    return backend.AtomMetadataBuilder(spec(kind), [name], CONFIG, CPU)


def common(first, lengths, ends, padded=0, causal=True):
    """Requests whose queries begin at `first`, `lengths` of them, in sequences of `ends` tokens."""
    positions = [
        p for f, n in zip(first, lengths, strict=True) for p in range(f, f + n)
    ]
    start = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    blocks = [[1 + 16 * r + b for b in range(12)] for r in range(len(first))]
    tokens = len(positions) + padded
    return SimpleNamespace(
        query_start_loc=torch.tensor(start, dtype=torch.int32),
        seq_lens=torch.tensor(ends, dtype=torch.int32),
        block_table_tensor=torch.tensor(blocks, dtype=torch.int32),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        max_query_len=max(lengths),
        max_seq_len=max(ends),
        positions=torch.tensor(positions + [0] * padded),
        causal=causal,
    )


def slots(given, request, positions):
    blocks = given.block_table_tensor[request].tolist()
    return [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in positions]


def causal_lists(given):
    """A slow loop: each token's last WINDOW positions."""
    starts = given.query_start_loc.tolist()
    return [
        slots(given, r, range(max(0, p - WINDOW + 1), p + 1))
        for r in range(len(starts) - 1)
        for p in given.positions[starts[r] : starts[r + 1]].tolist()
    ]


def block_lists(given):
    """A slow loop: WINDOW positions before the block and the block, as far as the sequence goes."""
    starts, found = given.query_start_loc.tolist(), []
    for r, end in enumerate(given.seq_lens.tolist()):
        first = int(given.positions[starts[r]])
        seen = range(max(0, first - WINDOW), min(end, first + given.max_query_len))
        found += [slots(given, r, seen)] * (starts[r + 1] - starts[r])
    return found


def written(lists, count):
    ends = lists.indptr.tolist()
    return [lists.indices[ends[i] : ends[i + 1]].tolist() for i in range(count)]


def addresses(lists):
    return lists.indices.data_ptr(), lists.indptr.data_ptr()


STEPS = [
    common([20, 0, 7], [1, 1, 1], [21, 1, 8]),
    common([3, 30], [4, 2], [7, 32]),
    common([9], [5], [14], padded=3),
    common([0, 0], [3, 1], [3, 1]),
]


@pytest.mark.usefixtures("read")
def test_every_step_lists_what_its_queries_see_at_the_same_addresses():
    built = builder()
    where = addresses(built.lists.buffers)
    for given in STEPS:
        metadata = built.build(0, given)
        assert addresses(metadata.window_lists) == where
        want = causal_lists(given)
        assert written(metadata.window_lists, len(want)) == want
        # Whoever pads a step sees nothing.
        padded = metadata.window_lists.indptr[len(given.positions) :]
        assert (padded == padded[0]).all()


@pytest.mark.usefixtures("read")
def test_a_draft_sees_its_whole_block():
    built = builder(DraftWindowSpec)
    for given in (
        common([20, 0, 7], [3, 3, 3], [23, 3, 10], causal=False),
        common([20, 5], [5, 5], [22, 10], causal=False),
    ):
        metadata = built.build(0, given)
        want = block_lists(given)
        assert written(metadata.window_lists, len(want)) == want


@pytest.mark.usefixtures("read")
@pytest.mark.parametrize("causal", [True, False])
def test_an_update_in_place_is_a_step_built_anew(causal):
    """Both forms: the lists, and the dense keys that a forward derives from the same metadata."""
    built = builder(DraftWindowSpec)
    assert built.supports_draft_decode_metadata_update
    given = common([20, 0, 7], [3, 3, 3], [23, 3, 10], causal=causal)
    metadata = built.build(0, given)
    where, before = addresses(metadata.window_lists), written(metadata.window_lists, 9)
    # As vLLM's speculator moves requests on, in its own tensors.
    given.positions += 2
    given.seq_lens += 2
    given.block_table_tensor += 3
    built.update_draft_decode_metadata(metadata)
    want = (causal_lists if causal else block_lists)(given)
    assert addresses(metadata.window_lists) == where
    assert written(metadata.window_lists, 9) == want != before
    assert dense(metadata, given, causal) == want
    assert written(builder(DraftWindowSpec).build(0, given).window_lists, 9) == want


def dense(metadata, given, causal):
    """What the forward's keys show each query."""
    layer = SimpleNamespace(
        name="window",
        tokens_per_row=1,
        spec=None,
        kv_cache=torch.zeros(200, BLOCK, 16),
    )
    batch, cache = step.with_caches(given.positions, {"window": metadata})
    theta = torch.zeros(1)
    plan = (Plan if causal else BlockPlan)(batch, theta, theta)
    keys = plan.window_keys(cache(layer), plan._list_tiles(), WINDOW)
    return [
        ids[~hidden].tolist()
        for ids, each in zip(keys.ids, keys.hidden, strict=True)
        for hidden in each
    ]


@pytest.mark.usefixtures("read")
@pytest.mark.parametrize("rows_between", [0, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_a_layer_reads_the_lists_as_ids_of_its_own_rows(rows_between, causal):
    given = common([20, 0], [3, 3], [23, 3], causal=causal)
    metadata = builder().build(0, given)
    memory = torch.zeros(200, BLOCK + rows_between, 16)
    layer = SimpleNamespace(
        name="window", tokens_per_row=1, spec=None, kv_cache=memory[:, :BLOCK]
    )
    batch, cache = step.with_caches(given.positions, {"window": metadata})
    theta = torch.zeros(1)
    plan = (Plan if causal else BlockPlan)(batch, theta, theta)
    keys = plan.window_keys(cache(layer), plan._list_tiles(), WINDOW)
    want = [
        ids[~hidden].tolist()
        for ids, each in zip(keys.ids, keys.hidden, strict=True)
        for hidden in each
    ]
    assert written(keys.ragged, 6) == want
    same = keys.ragged.indices.data_ptr() == metadata.window_lists.indices.data_ptr()
    assert same == (rows_between == 0)
    assert keys.ragged.indptr.data_ptr() == metadata.window_lists.indptr.data_ptr()


def test_nothing_is_listed_where_nobody_reads_it():
    metadata = builder().build(0, STEPS[0])
    assert metadata.window_lists is None


@pytest.mark.usefixtures("read")
def test_only_windows_in_blocks_have_lists_and_only_where_tokens_are_few():
    assert builder(name="model.layers.0.attn.compressor").lists is None
    heavy = spec(HeavyCompressorSpec)
    assert window_lists(heavy, ["model.layers.0.attn.compressor"], CONFIG, CPU) is None
    long = common([0], [MOST_QUERIES + 1], [MOST_QUERIES + 1])
    assert builder().build(0, long).window_lists is None
    many = common([0] * (TOKENS + 1), [1] * (TOKENS + 1), [1] * (TOKENS + 1))
    assert builder().build(0, many).window_lists is None
    without = common([3], [1], [4])
    without.positions = None
    assert builder().build(0, without).window_lists is None


def test_metadata_without_lists_needs_no_update():
    built = builder()
    metadata = built.build(0, STEPS[0])
    assert isinstance(metadata, AtomMetadata)
    built.update_draft_decode_metadata(metadata)
    assert metadata.window_lists is None
