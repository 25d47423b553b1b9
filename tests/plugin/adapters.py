"""The model classes that vLLM is given, built from a configuration and driven step by step without an engine."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import override_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from atom_vllm_bridge.attention import AtomBackend, AtomMetadata
from atom_vllm_bridge.kv_cache import WINDOW_BLOCK, CacheLayer
from atom_vllm_bridge.models.deepseek_v4.loading import iterate
from atom_vllm_bridge.models.deepseek_v4.local_state import LocalState
from atom_vllm_bridge.models.deepseek_v4.state import Batch, BlockTable

LENGTH = 512
DSPARK = {"method": "dspark", "num_speculative_tokens": 5}
MTP = {"method": "mtp", "num_speculative_tokens": 3}
Chunks = Sequence[tuple[int, int, int]]


def configuration(checkpoint, speculative=None, dtype="float32") -> VllmConfig:
    """Of an engine whose ops are those that any device has."""
    return EngineArgs(
        model=str(checkpoint),
        dtype=dtype,
        max_model_len=LENGTH,
        max_num_batched_tokens=LENGTH,
        enforce_eager=True,
        speculative_config=speculative,
        additional_config={"atom": {"ops": "torch"}},
    ).create_engine_config()


def build(cls, config: VllmConfig, checkpoint=None, device: str = "cpu"):
    """An adapter, with the checkpoint's weights if one is given."""
    config.device_config.device = torch.device(device)
    with set_current_vllm_config(config):
        adapter = cls(vllm_config=config)
    if checkpoint is not None:
        adapter.load_weights(iterate(checkpoint, progress=False))
    return adapter


def share(draft: nn.Module, target: nn.Module) -> None:
    """What vLLM does when it has loaded a draft that has neither embedding nor head."""
    draft.model.embed_tokens = target.model.embed_tokens
    draft.lm_head = target.lm_head


def during(metadata) -> AbstractContextManager:
    """vLLM's forward context; no metadata: the runner profiles."""
    return override_forward_context(SimpleNamespace(attn_metadata=metadata))


def metadata_of(layer: CacheLayer, batch: Batch, table: BlockTable) -> AtomMetadata:
    """What the builder makes of a batch for the group of `layer`."""
    builder = AtomBackend.get_builder_cls()(
        layer.spec, [layer.name], None, torch.device("cpu")
    )
    host = torch.zeros(batch.query_start_loc.shape, dtype=torch.int32, device="cpu")
    return builder.build(
        0,
        CommonAttentionMetadata(
            query_start_loc=batch.query_start_loc,
            query_start_loc_cpu=host,
            seq_lens=batch.seq_lens,
            num_reqs=batch.seq_lens.numel(),
            num_actual_tokens=batch.positions.numel(),
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            block_table_tensor=table.blocks,
            slot_mapping=table.slots,
        ),
    )


class TargetRun:
    """A target with caches for a few requests.

    Args:
        adapter: the target.
        requests: how many.
    """

    def __init__(self, adapter, requests: int = 2) -> None:
        self.adapter = adapter
        device = adapter.vllm_config.device_config.device
        self.state = LocalState(
            adapter.config, requests, LENGTH, adapter.model.codec, device
        )

    def prepare(self, chunks: Chunks, **padding):
        """(positions, metadata by layer name) of a step."""
        batch, states = self.state.step(chunks, **padding)
        metadata: dict[str, AtomMetadata] = {}
        made: dict[int, AtomMetadata] = {}
        for layers, state in zip(self.adapter.caches, states, strict=True):
            for role, layer in layers.items():
                cache = getattr(state, role)
                layer.bind_kv_cache(cache.rows.unsqueeze(1))
                if id(cache.table) not in made:
                    made[id(cache.table)] = metadata_of(layer, batch, cache.table)
                metadata[layer.name] = made[id(cache.table)]
        return batch.positions, metadata

    def step(self, ids: torch.Tensor, chunks: Chunks, **padding):
        positions, metadata = self.prepare(chunks, **padding)
        with during(metadata), torch.inference_mode():
            return self.adapter(input_ids=ids, positions=positions)


class DraftRun:
    """A draft with windows for a few requests; memory is zero, block 0 is nobody's.

    Args:
        adapter: the draft.
        layers: its cache layers.
        requests: how many.
    """

    def __init__(self, adapter, layers: Sequence[CacheLayer], requests: int = 2):
        self.adapter, self.layers = adapter, list(layers)
        self.device = adapter.vllm_config.device_config.device
        columns = LENGTH // WINDOW_BLOCK
        count = 1 + requests * columns
        self.table = 1 + torch.arange(requests * columns).flip(0).view(requests, -1)
        for layer in self.layers:
            width, dtype = layer.spec.head_size, layer.spec.dtype
            layer.bind_kv_cache(
                torch.zeros(
                    count, 1, WINDOW_BLOCK, width, dtype=dtype, device=self.device
                )
            )

    def slots(self, chunks: Chunks) -> torch.Tensor:
        blocks = self.table.tolist()
        found = [
            blocks[r][p // WINDOW_BLOCK] * WINDOW_BLOCK + p % WINDOW_BLOCK
            for r, start, count in chunks
            for p in range(start, start + count)
        ]
        return torch.tensor(found, dtype=torch.int64, device=self.device)

    def prepare(self, chunks: Chunks):
        """(positions, metadata by layer name) of a step."""
        kind = {"device": self.device, "dtype": torch.int32}
        ends = [0]
        for _, _, count in chunks:
            ends.append(ends[-1] + count)
        batch = Batch(
            positions=torch.tensor(
                [p for _, start, n in chunks for p in range(start, start + n)],
                device=self.device,
            ),
            query_start_loc=torch.tensor(ends, **kind),
            seq_lens=torch.tensor([start + n for _, start, n in chunks], **kind),
            max_query_len=max(n for _, _, n in chunks),
            max_seq_len=LENGTH,
        )
        rows = [self.table[r].tolist() for r, _, _ in chunks]
        table = BlockTable(torch.tensor(rows, **kind), self.slots(chunks), WINDOW_BLOCK)
        shared = metadata_of(self.layers[0], batch, table)
        return batch.positions, {layer.name: shared for layer in self.layers}

    def memory(self) -> torch.Tensor:
        """All rows of all layers, a copy."""
        return torch.stack([layer.kv_cache for layer in self.layers])
