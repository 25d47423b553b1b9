"""Drafts filled from small checkpoints, the same checkpoints for the oracle, and windows whose blocks lie in any order."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
import torch.nn.functional as F
from harness import SMALL, config_of
from plain_drafts import count_stages, read_checkpoint

from atom_vllm_bridge.checkpoint.make import make
from atom_vllm_bridge.models.deepseek_v4.dspark import DSparkConfig, DSparkDraft
from atom_vllm_bridge.models.deepseek_v4.loading import load
from atom_vllm_bridge.models.deepseek_v4.mtp import MTPDraft
from atom_vllm_bridge.models.deepseek_v4.parallel import ALONE, Parallel
from atom_vllm_bridge.models.deepseek_v4.state import Batch, BlockTable, Cache
from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.quantization.kv_codecs import KVCodec, kv_codec

WINDOW, BLOCK = 8, 4
# float32 against float64.
TOLERANCE = 1e-5
# Block outputs as large as the streams, and gates beyond the clamp: nothing may hide behind the residual.
GAINS = {"wo_b": 1.0, "w2": 0.3, "w1": 12.0, "w3": 12.0}


@cache
def checkpoint(draft: str, window: int = WINDOW) -> Path:
    """A directory with a bf16 checkpoint, drawn once a run."""
    return make(
        Path(mkdtemp(prefix="drafts-")) / "checkpoint",
        layout="bf16",
        draft=draft,
        # So few iterations of Sinkhorn that their order still shows in the result.
        overrides=SMALL
        | {"num_hidden_layers": 2, "sliding_window": window, "hc_sinkhorn_iters": 2}
        | ({"dspark_markov_rank": 8} if draft == "dspark" else {}),
        gains=GAINS,
        tokenizer=False,
    )


@cache
def plain(draft: str, window: int = WINDOW):
    """Tensors and config, as the oracle takes them."""
    return read_checkpoint(checkpoint(draft, window))


def filled(
    draft: str,
    window: int = WINDOW,
    *,
    codec: KVCodec | None = None,
    ops: str = "",
    dtype: torch.dtype = torch.float32,
    parallel: Parallel = ALONE,
) -> DSparkDraft | MTPDraft:
    """The draft with its weights.

    Args:
        codec: storage of rows; by default the values.
        ops: providers to prefer.
        parallel: which part of it.
    """
    tensors, hf = plain(draft, window)
    config = config_of(checkpoint(draft, window))
    common = {
        "dtype": dtype,
        "device": "cpu",
        "kv_codec": codec or kv_codec("auto", dtype, config),
        "parallel": parallel,
    }
    registry.configure(ops)
    try:
        if draft == "mtp":
            model = MTPDraft(config, **common)
        else:
            model = DSparkDraft(
                config,
                DSparkConfig.from_hf(hf),
                count_stages(tensors),
                confidence=True,
                **common,
            )
    finally:
        registry.configure("")
    load(
        model.weight_slots(),
        ((n, t) for n, t in tensors.items() if n.startswith("mtp.")),
    )
    return model


def embed(draft: str, ids: torch.Tensor, window: int = WINDOW) -> torch.Tensor:
    """The target's embedding, in float32."""
    return F.embedding(ids, plain(draft, window)[0]["embed.weight"].float())


def unembed(draft: str, x: torch.Tensor, window: int = WINDOW) -> torch.Tensor:
    """The target's head, in float32."""
    return x @ plain(draft, window)[0]["head.weight"].float().mT


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal float32 values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def far(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, of values above 1 in units of the largest (a draft's streams reach 80); NaN is far from all."""
    difference = (got.double() - want.double()).abs().nan_to_num(torch.inf)
    return float(difference.max() / want.abs().max().clamp(min=1))


class Windows:
    """The windows of all layers of a draft for some requests.

    Block 0 is nobody's, the others are handed out in random order. A block holds its rows of one layer after another, as
    it does in an engine. What nobody has written is NaN.

    Args:
        draft: whose codec stores the rows.
        requests, length: what there are blocks for.
        seed: of the order of blocks.
    """

    def __init__(
        self,
        draft: DSparkDraft | MTPDraft,
        requests: int,
        length: int,
        *,
        seed: int = 0,
        block: int = BLOCK,
    ) -> None:
        stages = draft.stages if isinstance(draft, DSparkDraft) else [draft.block]
        codec = stages[0].attn.codec.kv
        self.block, columns = block, -(-length // block)
        order = torch.randperm(
            requests * columns, generator=torch.Generator().manual_seed(seed)
        )
        self.blocks = (order + 1).int().view(requests, columns)
        self.memory = torch.empty(
            1 + requests * columns, len(stages), block, codec.width, dtype=codec.dtype
        )
        self.memory.fill_(torch.nan if codec.dtype.is_floating_point else 0x7F)

    def slots(self, request: int, positions: Sequence[int]) -> list[int]:
        """Where rows go; beyond the table, as vLLM has it: into the last block."""
        row = self.blocks[request].tolist()
        return [
            row[min(p // self.block, len(row) - 1)] * self.block + p % self.block
            for p in positions
        ]

    def rows(self, request: int, positions: Sequence[int]) -> torch.Tensor:
        """[P, layers, width], a copy."""
        slots = torch.tensor(self.slots(request, positions), dtype=torch.int64)
        return self.memory[slots // self.block, :, slots % self.block]

    def caches(self, blocks: torch.Tensor, slots: Sequence[int]) -> list[Cache]:
        """A cache a layer."""
        table = BlockTable(blocks, torch.tensor(slots, dtype=torch.int64), self.block)
        return [
            Cache(self.memory[:, layer], table) for layer in range(self.memory.shape[1])
        ]

    def step(
        self,
        chunks: Sequence[tuple[int, int, int]],
        *,
        pad_requests: int = 0,
        pad_tokens: int = 0,
        max_len: int = 1 << 20,
    ) -> tuple[Batch, list[Cache]]:
        """A batch of chunks (request, first position, tokens).

        Args:
            pad_requests: requests without tokens at the end, as a captured graph has them.
            pad_tokens: tokens at the end that belong to nobody, at whatever position.
            max_len: at which positions and lengths end, as vLLM clamps them.
        """
        positions, slots, ends, lens = [], [], [0], []
        for request, start, count in chunks:
            here = range(start, start + count)
            positions += [min(p, max_len - 1) for p in here]
            slots += self.slots(request, here)
            ends.append(ends[-1] + count)
            lens.append(min(start + count, max_len))
        blocks = self.blocks[[request for request, _, _ in chunks]]
        batch = Batch(
            positions=torch.tensor(positions + [3] * pad_tokens, dtype=torch.int64),
            query_start_loc=torch.tensor(
                ends + ends[-1:] * pad_requests, dtype=torch.int32
            ),
            seq_lens=torch.tensor(lens + [0] * pad_requests, dtype=torch.int32),
            max_query_len=max(count for _, _, count in chunks),
            max_seq_len=max(lens),
        )
        blocks = torch.cat((blocks, blocks.new_zeros(pad_requests, blocks.shape[1])))
        return batch, self.caches(blocks, slots + [-1] * pad_tokens)
