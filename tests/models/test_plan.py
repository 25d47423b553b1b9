"""What layers share in a step, and what they must not."""

from collections import Counter

import pytest
import torch
from harness import Runner, checkpoint, config_of, tokens

from atom_vllm_bridge.models.deepseek_v4.loading import iterate, load
from atom_vllm_bridge.models.deepseek_v4.model import DeepseekV4Model
from atom_vllm_bridge.models.deepseek_v4.plan import Plan
from atom_vllm_bridge.models.deepseek_v4.state import Batch, BlockTable, Cache
from atom_vllm_bridge.models.ops import registry


def cache(block, tokens_per_row=1):
    table = BlockTable(
        blocks=torch.tensor([[block]], dtype=torch.int32),
        slots=torch.arange(4) + 4 * block,
        block_size=4,
        tokens_per_row=tokens_per_row,
    )
    return Cache(torch.zeros(3, 4 // tokens_per_row, 8), table)


def test_layers_share_a_pool_only_where_their_entries_share_a_table():
    theta = torch.ones(2)
    batch = Batch(
        positions=torch.arange(4),
        query_start_loc=torch.tensor([0, 4], dtype=torch.int32),
        seq_lens=torch.tensor([4], dtype=torch.int32),
        max_query_len=4,
        max_seq_len=4,
    )
    plan, parts = Plan(batch, theta, theta), cache(1)
    first, second = cache(1, 4), cache(2, 4)
    one = plan.pool(parts, first, False)
    other = plan.pool(parts, second, False)
    assert one.write[one.write >= 0].tolist() == [first.pitch]
    assert other.write[other.write >= 0].tolist() == [2 * second.pitch]
    assert plan.pool(parts, Cache(first.rows.clone(), first.table), False) is one


@pytest.fixture
def calls(monkeypatch):
    """How often each op is called; layers run op by op."""
    counted = Counter()

    def counting(op):
        function = registry.resolve_from("torch", op)

        def call(*args, **kwargs):
            counted[op] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(registry, "_providers", dict(registry._providers))
    registry.register(registry.Provider("counting", counting, lambda device: None))
    yield counted
    monkeypatch.undo()
    registry.configure("")


# Sliding, CSA, HCA, CSA, HCA; and twice as many of the latter.
@pytest.mark.parametrize("ratios", [(0, 4, 128, 4, 128), (0, *[4, 128] * 4)])
@pytest.mark.parametrize("ring", [None, 8])
def test_indices_are_derived_once_a_step_for_all_layers_of_a_kind(calls, ratios, ring):
    directory = checkpoint(num_hidden_layers=len(ratios), compress_ratios=ratios)
    model = DeepseekV4Model(config_of(directory), dtype=torch.float32)
    load(model.weight_slots(), iterate(directory, progress=False))
    for layer in model.layers:
        # As on a GPU.
        layer.attn.dense_entries = 0
    run = Runner(model, {0: tokens(200), 1: tokens(200)}, 200, ring=ring)
    run.step([(0, 0, 127), (1, 0, 150)])
    calls.clear()
    run.step([(0, 127, 1), (1, 150, 1)])
    layers = Counter(ratios)
    derived = {
        "request_of_token": 1,
        "rotations": 2,
        # Of the window and of three compressors.
        "slot_rows": 4,
        "pooled_rows": 3,
        "window_rows": 1,
        # HCA's keys, and what the indexer scores.
        "entry_rows": 2,
        # What it selects is each layer's own.
        "selected_rows": layers[4],
        "ring_slots": 0 if ring is None else 3,
    }
    assert {op: calls[op] for op in derived} == derived
    assert calls["write_keys"] > len(ratios)
