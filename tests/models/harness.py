"""A small checkpoint with every kind of layer, the model that it fills, and how sequences are run through it."""

import itertools
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch

from atom_vllm_bridge.checkpoint.make import make
from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
from atom_vllm_bridge.models.deepseek_v4.loading import iterate, load
from atom_vllm_bridge.models.deepseek_v4.local_state import LocalState
from atom_vllm_bridge.models.deepseek_v4.model import DeepseekV4Model
from atom_vllm_bridge.models.quantization.kv_codecs import kv_codec

# Sliding, CSA, HCA, CSA, HCA; two hash layers; the indexer selects 16 entries, which is reached at 68 tokens.
SMALL = {
    "num_hidden_layers": 5,
    "hidden_size": 64,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "o_lora_rank": 16,
    "o_groups": 2,
    "num_attention_heads": 4,
    # Enough of them that no score is exactly 0, at which entries would tie.
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 16,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "vocab_size": 160,
}
VOCABULARY = SMALL["vocab_size"]
# float32 products of few and of many rows round differently; a selection may then turn at equal scores.
TOLERANCE = 1e-3


@cache
def checkpoint(**overrides) -> Path:
    """A directory with a checkpoint of SMALL, bf16 unless a `layout` is given, drawn once a run."""
    layout = overrides.pop("layout", "bf16")
    gains = overrides.pop("gains", None)
    return make(
        Path(mkdtemp(prefix="deepseek-v4-")) / "checkpoint",
        layout=layout,
        draft="none",
        overrides=SMALL
        | {k: list(v) if isinstance(v, tuple) else v for k, v in overrides.items()},
        gains=dict(gains) if gains else None,
        tokenizer=False,
    )


def config_of(directory: Path) -> DeepseekV4Config:
    return DeepseekV4Config.from_hf(json.loads((directory / "config.json").read_text()))


@cache
def model(directory: Path, dtype=torch.float32, codec="auto") -> DeepseekV4Model:
    config = config_of(directory)
    filled = DeepseekV4Model(
        config, dtype=dtype, kv_codec=kv_codec(codec, dtype, config)
    )
    load(filled.weight_slots(), iterate(directory, progress=False))
    return filled


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (count,), generator=g)


def poison(state: LocalState) -> None:
    """Fill memory that nobody wrote with what hurts most."""
    for rows in state.rows.values():
        rows.fill_(torch.nan if rows.dtype.is_floating_point else 0x7F)


def checksum(state: LocalState) -> dict:
    """All bytes of all caches."""
    return {
        key: rows.contiguous().view(torch.uint8).clone()
        for key, rows in state.rows.items()
    }


@dataclass
class Runner:
    """Runs chunks of named sequences; memory starts as NaN."""

    model: DeepseekV4Model
    sequences: dict[int, torch.Tensor]
    max_len: int
    seed: int = 0
    ring: int | None = None

    def __post_init__(self):
        self.state = LocalState(
            self.model.config,
            len(self.sequences),
            self.max_len,
            self.model.codec,
            seed=self.seed,
            ring=self.ring,
        )
        poison(self.state)
        self.logits = {
            name: torch.full((len(ids), self.model.config.vocab_size), torch.nan)
            for name, ids in self.sequences.items()
        }

    @torch.inference_mode()
    def step(self, chunks, ids=None, **padding):
        """Run `chunks` of (name, start, count); returns the logits of all tokens, and keeps them by position."""
        batch, state = self.state.step(chunks, **padding)
        if ids is None:
            ids = torch.cat([self.sequences[n][s : s + c] for n, s, c in chunks])
        ids = torch.cat((ids, torch.full((padding.get("pad_tokens", 0),), -1)))
        streams, _ = self.model(ids, batch, state)
        logits = self.model.logits(self.model.reduce(streams))
        first = 0
        for name, start, count in chunks:
            stop = min(start + count, len(self.logits[name]))
            self.logits[name][start:stop] = logits[first : first + stop - start]
            first += count
        return logits[:first]


def one_shot(model: DeepseekV4Model, ids: torch.Tensor, **kwargs) -> torch.Tensor:
    """Log-probabilities [T, V] of a sequence run alone, in one chunk."""
    runner = Runner(model, {0: ids}, len(ids), **kwargs)
    return runner.step([(0, 0, len(ids))]).log_softmax(-1)


def chunked(model: DeepseekV4Model, ids: torch.Tensor, cuts, **kwargs) -> torch.Tensor:
    """The same, in chunks that end at `cuts` and at the end."""
    runner = Runner(model, {0: ids}, len(ids), **kwargs)
    ends = [0, *sorted(set(cuts) - {0, len(ids)}), len(ids)]
    for start, end in itertools.pairwise(ends):
        runner.step([(0, start, end - start)])
    return runner.logits[0].log_softmax(-1)
