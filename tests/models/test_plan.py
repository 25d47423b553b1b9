"""What layers share in a step, and what they must not."""

import torch

from atom_vllm_bridge.models.deepseek_v4.plan import Plan
from atom_vllm_bridge.models.deepseek_v4.state import Batch, BlockTable, Cache


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
