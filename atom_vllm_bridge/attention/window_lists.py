"""A window's lists, for kernels that read ragged indices: made before a step, in buffers that stay where they are.

A captured graph reads the buffers' addresses, so the builder hands out the same ones for every step and fills them in place, for a
draft's further steps too. Slots are listed, since layers of a group may number their rows differently (`Cache.listed`).
"""

from typing import TYPE_CHECKING

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowMLASpec

from atom_vllm_bridge.models.deepseek_v4.dspark import BlockPlan
from atom_vllm_bridge.models.deepseek_v4.plan import Plan
from atom_vllm_bridge.models.deepseek_v4.state import Batch, BlockTable
from atom_vllm_bridge.models.ops import ragged, registry

if TYPE_CHECKING:
    from atom_vllm_bridge.attention.backend import AtomMetadata

# What reads lists; and up to so many tokens a request, as a step that decodes or verifies has. Prompts are read in tiles.
READERS = ("aiter",)
MOST_QUERIES = 16
# The last part of the names of a window's layers.
WINDOW = "window"


class WindowLists:
    """Lists of one cache group.

    Attributes:
        buffers: persistent; each call of `fill` writes them in place.
        window: tokens that a query sees at most, without those of its own block.
    """

    def __init__(self, tokens: int, window: int, device: torch.device) -> None:
        self.window = window
        self.most = window + MOST_QUERIES
        self.tokens = tokens
        self.buffers = ragged.empty(tokens, self.most, device)

    def take(self, metadata: "AtomMetadata") -> bool:
        """Whether a step's lists fit and can be made."""
        requests, queries = len(metadata.seq_lens), metadata.max_query_len
        return (
            metadata.positions is not None
            and metadata.visible_from is None
            and queries <= MOST_QUERIES
            and requests * queries <= self.tokens
            and len(metadata.positions) <= self.tokens
        )

    def fill(self, metadata: "AtomMetadata") -> None:
        """Write the lists that follow from the tensors of a step, on their device."""
        assert metadata.positions is not None
        batch = Batch(
            positions=metadata.positions,
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
        )
        none = self.buffers.indices.new_empty(0)
        plan = (Plan if metadata.causal else BlockPlan)(batch, none, none)
        table = BlockTable(
            metadata.block_table, metadata.slot_mapping, metadata.block_size
        )
        plan.window_lists(table, self.window, self.buffers)


def window_lists(
    spec: KVCacheSpec,
    layer_names: list[str],
    vllm_config: VllmConfig,
    device: torch.device,
) -> WindowLists | None:
    """The lists of a group; None where it is not a window in blocks, or no op reads lists."""
    windows = all(name.rpartition(".")[2] == WINDOW for name in layer_names)
    if not isinstance(spec, SlidingWindowMLASpec) or not windows or not _read(device):
        return None
    tokens = vllm_config.scheduler_config.max_num_batched_tokens
    return WindowLists(tokens, spec.sliding_window, device)


def _read(device: torch.device) -> bool:
    return any(
        choice.op == "sparse_attention"
        and choice.device == device.type
        and choice.provider in READERS
        for choice in registry.table()
    )
