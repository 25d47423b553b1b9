"""Attention of the three kinds: a sliding window of raw keys, and beside it compressed entries, all (HCA) or selected (CSA).

q_low | kv | … = x · W_inᵀ;   q = rms(rms(q_low; q_norm) · wq_bᵀ) for each head;   kv = rms(kv; kv_norm), one head, key and value
q and kv are rotated on their tail at their position; o = softmax(scores, sink) · kv is rotated back; then the grouped
output projection. Everything that reads x is one matrix: queries, kv, and what compressor and indexer take.
"""

import torch
from torch import nn

from atom_vllm_bridge.models.deepseek_v4.compressor import Compressor
from atom_vllm_bridge.models.deepseek_v4.config import CSA, SLIDING, DeepseekV4Config
from atom_vllm_bridge.models.deepseek_v4.indexer import Indexer
from atom_vllm_bridge.models.deepseek_v4.packing import Packable, Slot, rows
from atom_vllm_bridge.models.deepseek_v4.parallel import ALONE, Parallel
from atom_vllm_bridge.models.deepseek_v4.plan import Plan
from atom_vllm_bridge.models.deepseek_v4.ring import roll_up, unrolled
from atom_vllm_bridge.models.deepseek_v4.sharding import cut, share
from atom_vllm_bridge.models.deepseek_v4.state import Cache, LayerState
from atom_vllm_bridge.models.ops import panels
from atom_vllm_bridge.models.ops.registry import resolve
from atom_vllm_bridge.models.quantization.kept import Kept
from atom_vllm_bridge.models.quantization.kv_codecs import KVCodec

# Up to so many entries for one selected, reading all and hiding some beats fetching the selected ones for every query: on a CPU,
# which gathers them into a matrix first. A GPU reads rows where they lie.
DENSE_ENTRIES = {"cpu": 6}


class Attention(Packable):
    """One layer's attention.

    Args:
        config: the model's.
        layer_type: one of config.py's three.
        codec: storage of cache rows.
        dtype: of weights and activations.
        parallel: its rank has an equal part of the heads, in whole groups.
    """

    by_input = ("w_in", "wq_b", "wo_b")
    by_output = ("wo_a",)

    def __init__(
        self,
        config: DeepseekV4Config,
        layer_type: str,
        ratio: int,
        codec: KVCodec,
        dtype: torch.dtype,
        device: torch.device,
        parallel: Parallel = ALONE,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.layer_type, self.codec = layer_type, codec
        self.window = config.sliding_window
        self.norm_eps = config.rms_norm_eps
        self.num_heads = config.num_attention_heads // parallel.size
        self.dim, self.q_rank = config.head_dim, config.q_lora_rank
        self.groups = config.o_groups // parallel.size
        self.scale, self.hidden = self.dim**-0.5, config.hidden_size
        self.compressor: Compressor | None = None
        self.indexer: Indexer | None = None
        self.columns = {"q_low": self.q_rank, "kv": self.dim}
        self.query_rows = query_rows = self.num_heads * self.dim
        if layer_type != SLIDING:
            self.compressor = Compressor(
                self.dim,
                ratio,
                layer_type == CSA,
                config.rms_norm_eps,
                codec.kv,
                device,
            )
            self.columns["compressor"] = self.compressor.projected
        if layer_type == CSA:
            self.indexer = Indexer(config, ratio, codec.index, device)
            self.columns["index_compressor"] = self.indexer.compressor.projected
            self.columns["index_weight"] = self.indexer.num_heads
            query_rows += self.indexer.num_heads * self.indexer.dim

        kind = {"dtype": dtype, "device": device}
        fp32 = {"dtype": torch.float32, "device": device}
        # Matrices are stored input by input, transposed against the checkpoint: with few tokens a CPU reads them 2.5 times
        # as fast so. Only wo_a, multiplied in groups, is faster as it comes.
        hold = resolve("hold", device)
        # Checkpoints quantise what comes first; compressors and the indexer's weights stay as they are.
        first = self.q_rank + self.dim
        bands = [first, sum(self.columns.values()) - first]
        self.w_in = hold([b for b in bands if b], config.hidden_size, **kind)
        self.q_norm = nn.Parameter(torch.empty(self.q_rank, **fp32))
        self.kv_norm = nn.Parameter(torch.empty(self.dim, **fp32))
        self.wq_b = hold([query_rows], self.q_rank, **kind)
        self.sink = nn.Parameter(torch.empty(self.num_heads, **fp32))
        width = self.num_heads * self.dim // self.groups
        self.wo_a = hold(
            [config.o_lora_rank], width, count=self.groups, by_output=True, **kind
        )
        low = self.groups * config.o_lora_rank
        self.wo_b = hold([config.hidden_size], low, **kind)
        self.dense_entries = DENSE_ENTRIES.get(device.type, 0)
        self.linear = resolve("linear", device)
        self.rms_norm = resolve("rms_norm", device)
        self.query_heads = resolve("query_heads", device)
        self.inverse_rope = resolve("inverse_rope", device)
        self.write_keys = resolve("write_keys", device)
        self.sparse_attention = resolve("sparse_attention", device)
        self.gather_rows = resolve("gather_rows", device)
        self.write_rows = resolve("write_rows", device)
        self.grouped_output_projection = resolve("grouped_output_projection", device)
        self.attention_output = resolve("attention_output", device)

    def forward(self, x: torch.Tensor, plan: Plan, state: LayerState) -> torch.Tensor:
        """[T, d] → [T, d], on every rank; writes this step's rows, then attends to the caches."""
        inputs = self.project(x)
        rotation = plan.rotation(self.layer_type)
        window = unrolled(state.window, plan.batch, self.gather_rows)
        self.write_kv(inputs["kv"], rotation, window)
        roll_up(state.window, window, self.write_rows)
        low = self.rms_norm(inputs["q_low"], self.q_norm, self.norm_eps)
        compressed = None
        if self.compressor is not None:
            state_, entries = _need(state.compressor), _need(state.compressed)
            self.compressor(inputs["compressor"], plan, state_, entries)
            compressed = entries
        selected = None
        if self.indexer is not None:
            state_, index = _need(state.index_compressor), _need(state.index)
            self.indexer.compressor(inputs["index_compressor"], plan, state_, index)
            # With no more entries than it would select, it has nothing to choose.
            if plan.entries(self.indexer.ratio) > self.indexer.topk:
                width = self.indexer.num_heads * self.indexer.dim
                w = panels.columns(self.wq_b, self.query_rows, self.query_rows + width)
                index_query = self.linear(low, w)[:, :width]
                selected = self.indexer(
                    index_query, inputs["index_weight"], plan, index
                )
        # Queries are what a prefill needs most memory for: they come last, and nothing here holds them or their inputs on.
        del inputs
        o = self.attend(self.query(low, rotation), plan, window, compressed, selected)
        y = self.output(o, rotation, x.dtype)
        return y if self.parallel.size == 1 else self.parallel.all_reduce(y)

    def project(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """[T, d] → everything that reads x, by the names of `columns`."""
        projected = self.linear(x, self.w_in)
        parts, first = {}, 0
        for name, width in self.columns.items():
            parts[name] = projected[:, first : first + width]
            first += width
        return parts

    def query(
        self, low: torch.Tensor, rotation: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, rank] normed → [T, H, D] float32, each head normed, and rotated if a rotation is given."""
        w = panels.columns(self.wq_b, 0, self.query_rows)
        query = self.linear(low, w)[:, : self.query_rows]
        return self.query_heads(query, self.num_heads, self.norm_eps, rotation)

    def project_kv(self, x: torch.Tensor) -> torch.Tensor:
        """[T, d] → the raw keys [T, D] alone, before their norm; what a draft stores of its context."""
        w = panels.columns(self.w_in, self.q_rank, self.q_rank + self.dim)
        return self.linear(x, w)[:, : self.dim]

    def write_kv(self, kv: torch.Tensor, rotation: torch.Tensor, window: Cache) -> None:
        """Norm, rotate and store the raw keys [T, D] of tokens."""
        self.write_keys(
            kv,
            self.kv_norm,
            self.norm_eps,
            rotation,
            window.rows,
            window.slot_ids(),
            self.codec.kv,
        )

    def attend(
        self,
        query: torch.Tensor,
        plan: Plan,
        window: Cache,
        compressed: Cache | None,
        selected: torch.Tensor | None,
    ) -> torch.Tensor:
        """Rotated queries [T, H, D] float32 → [T, H, D] float32."""
        entries = 0
        if compressed is not None:
            entries = plan.entries(compressed.table.tokens_per_row)
        query_bytes = 8 * self.num_heads * (self.window + entries)
        # Who reads lists has no use for larger tiles; a draft's are for its own.
        listed = window.table.lists is not None and plan.causal
        tiles = plan.tiles(1 if listed else plan.tile_size(query_bytes))
        if selected is not None and entries > self.dense_entries * selected.shape[1]:
            tiles = plan.tiles(1)
        keys = None
        if compressed is not None and entries > 0:
            keys = (
                plan.entry_keys(compressed, tiles)
                if selected is None
                else plan.selected_keys(compressed, tiles, selected)
            )
        o = self.sparse_attention(
            tiles.split(query),
            self.sink,
            self.scale,
            plan.window_keys(window, tiles, self.window),
            keys,
            self.codec.kv,
        )
        return tiles.join(o)

    def output(
        self, o: torch.Tensor, rotation: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Rotate back and project: [T, H, D] float32 → [T, d] in `dtype`, of the rank's heads."""
        y = self.attention_output(self, o, rotation, dtype)
        return y[:, : self.hidden]

    def weight_slots(self) -> dict[str, Slot]:
        """Where each published tensor of the layer goes: views into the fused matrices."""
        self.unpack()
        at, first = {}, 0
        for name, width in self.columns.items():
            at[name], first = first, first + width
        kv_end = at["kv"] + self.dim
        rank, size = self.parallel.rank, self.parallel.size
        wo_a, low = self.wo_a, self.wo_b.shape[-2]
        grouped, width = low // self.groups, self.query_rows // self.groups

        def mine(count: int) -> tuple[int, range]:
            """What all ranks have, for one that has `count`; and its part."""
            return size * count, share(size * count, rank, size)

        query_rows, my_rows = mine(self.query_rows)
        heads, my_heads = mine(self.num_heads)
        lows, my_lows = mine(low)
        slots: dict[str, Slot] = {
            "wq_a.weight": rows(self.w_in, 0, self.q_rank),
            "q_norm.weight": self.q_norm.data,
            "wq_b.weight": cut(
                rows(self.wq_b, 0, self.query_rows), (query_rows, self.q_rank), my_rows
            ),
            "wkv.weight": rows(self.w_in, at["kv"], kv_end),
            "kv_norm.weight": self.kv_norm.data,
            "attn_sink": cut(self.sink.data, (heads,), my_heads),
            "wo_a.weight": cut(
                (
                    wo_a.rows(0, self.groups * grouped)
                    if isinstance(wo_a, Kept)
                    else wo_a.data.flatten(0, 1)
                ),
                (lows, width),
                my_lows,
            ),
            "wo_b.weight": cut(
                rows(self.wo_b),
                (self.hidden, lows),
                range(self.hidden),
                my_lows,
            ),
        }
        if self.compressor is not None:
            slots |= self._compressor_slots(
                "compressor.", self.compressor, at["compressor"]
            )
        if self.indexer is not None:
            compressor, first = self.indexer.compressor, at["index_weight"]
            slots |= self._compressor_slots(
                "indexer.compressor.", compressor, at["index_compressor"]
            )
            end = first + self.indexer.num_heads
            slots["indexer.weights_proj.weight"] = rows(self.w_in, first, end)
            slots["indexer.wq_b.weight"] = rows(self.wq_b, self.query_rows)
        return slots

    def _compressor_slots(
        self, prefix: str, compressor: Compressor, first: int
    ) -> dict[str, Slot]:
        half = compressor.projected // 2
        slots = {
            "wkv.weight": rows(self.w_in, first, first + half),
            "wgate.weight": rows(self.w_in, first + half, first + 2 * half),
            **compressor.weight_slots(),
        }
        return {prefix + name: slot for name, slot in slots.items()}


def _need(cache: Cache | None) -> Cache:
    if cache is None:
        raise ValueError(
            "attention: a compressed layer was given no compressed, compressor or index cache; allocate what layer_caches names."
        )
    return cache
