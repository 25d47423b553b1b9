"""What vLLM's metadata says of a step, as the model takes it."""

from types import SimpleNamespace

import torch

from atom_vllm_bridge import step
from atom_vllm_bridge.attention import AtomMetadata


def test_tokens_that_pad_a_step_are_nobodys_and_write_nothing():
    """As where a data-parallel rank drafts one block and another three: five slots for fifteen tokens."""
    layer = SimpleNamespace(
        name="window", tokens_per_row=1, spec=None, kv_cache=torch.zeros(2, 64, 8)
    )
    metadata = AtomMetadata(
        query_start_loc=torch.tensor([0, 5], dtype=torch.int32),
        seq_lens=torch.tensor([6], dtype=torch.int32),
        block_table=torch.ones(1, 8, dtype=torch.int32),
        slot_mapping=torch.arange(65, 70),
        max_query_len=5,
        max_seq_len=6,
        block_size=64,
    )
    _, cache = step.with_caches(torch.arange(15), {"window": metadata})
    assert cache(layer).table.slots.tolist() == [65, 66, 67, 68, 69] + [-1] * 10
    assert cache(layer).slot_ids().tolist() == [65, 66, 67, 68, 69] + [-1] * 10
