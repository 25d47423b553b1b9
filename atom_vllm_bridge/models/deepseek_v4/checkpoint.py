"""The published DeepSeek-V4 checkpoint as data: every tensor's name, shape and dtype.

`tensor_table` is the one description that checkpoints are generated from, loads are
checked against and tests read. Names and dtypes are those of the published safetensors
files; dtypes are spelled as safetensors spells them. Imports no torch.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from atom_vllm_bridge.models.deepseek_v4.config import (
    HASH_MOE,
    DeepseekV4Config,
    integer,
    need_integer,
)

BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
PLAIN = frozenset({"BF16", "F16", "F32"})
INTEGER = frozenset({"I32", "I64"})
SCALE = frozenset({"F8_E8M0", "F32"})
PACKED = frozenset({"I8", "U8"})

FP8_BLOCK = 128
MXFP4_GROUP = 32


class CheckpointError(ValueError):
    """Everything that is wrong with a checkpoint; the first line names the first fault.

    Attributes:
        problems: one line a fault.
    """

    SHOWN = 20

    def __init__(self, problems: list[str]):
        self.problems = list(problems)
        first, rest = self.problems[0], self.problems[1:]
        count = f" (the first of {len(self.problems)} faults)" if rest else ""
        lines = [f"checkpoint: {first}{count}", *rest[: self.SHOWN - 1]]
        if len(self.problems) > self.SHOWN:
            lines.append(f"… and {len(self.problems) - self.SHOWN} more")
        super().__init__("\n".join(lines))


class TensorSpec(NamedTuple):
    """One tensor on disk.

    Attributes:
        shape: as stored (an mxfp4 weight holds two inputs a byte).
        dtype: as safetensors spells it.
        optional: published checkpoints with and without it exist.
    """

    shape: tuple[int, ...]
    dtype: str
    optional: bool = False

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BYTES[self.dtype]


class TensorHeader(NamedTuple):
    """One tensor as a shard's header declares it; the shard is a file name."""

    shard: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How the matrices are stored: dtypes of weights and of the fp8 blocks' scales."""

    projections: str
    wo_a: str
    experts: str
    scale: str


LAYOUTS = {
    "bf16": Layout("BF16", "BF16", "BF16", "F8_E8M0"),
    "mxfp4": Layout("F8_E4M3", "F8_E4M3", "I8", "F8_E8M0"),
    "fp8": Layout("F8_E4M3", "F8_E4M3", "F8_E4M3", "F32"),
}
"""bf16; Flash and Pro (fp8 projections, mxfp4 experts); Flash-Base (all fp8)."""


def draft_kind(config: Mapping[str, Any]) -> str | None:
    """ "dspark", "mtp" or None: which draft the `mtp.*` tensors of a config form."""
    if config.get("dspark_target_layer_ids"):
        return "dspark"
    return "mtp" if config.get("num_nextn_predict_layers") else None


def draft_stages(config: Mapping[str, Any]) -> int:
    """How many `mtp.{i}` a config promises; DSpark has three where it does not say.

    Raises:
        ValueError: not a number of stages.
    """
    kind = draft_kind(config)
    if kind == "dspark":
        return integer("n_mtp_layers", config.get("n_mtp_layers") or 3)
    return need_integer(config, "num_nextn_predict_layers") if kind == "mtp" else 0


def count_stages(names: Mapping[str, Any]) -> int:
    """How many `mtp.{i}` a checkpoint really has, from its index.

    Raises:
        CheckpointError: the stages are not numbered 0, 1, 2, …
    """
    found = {_stage(name) for name in names if name.startswith("mtp.")}
    for stage in range(max(found, default=-1)):
        if stage not in found:
            raise CheckpointError(
                [f"mtp.{stage} is missing, though mtp.{max(found)} is there."]
            )
    return len(found)


def _stage(name: str) -> int:
    """The i of `mtp.{i}.…`."""
    number = name.split(".")[1]
    # int() would also take signs, underscores, blanks, and other scripts' digits.
    if not re.fullmatch("0|[1-9][0-9]{0,3}", number):
        raise CheckpointError(
            [f"{name} is of no draft stage: expected mtp.0, mtp.1, … before its name."]
        )
    return int(number)


def tensor_table(
    config: Mapping[str, Any],
    layout: str | Layout = "mxfp4",
    *,
    stages: int | None = None,
) -> dict[str, TensorSpec]:
    """Every tensor of a checkpoint, in the order in which shards hold them.

    Args:
        config: the content of config.json (the published keys).
        layout: a name of LAYOUTS, or any Layout (see `detect_layout`).
        stages: how many `mtp.{i}`; by default what the config says.

    Returns:
        name → TensorSpec. With layout "bf16" the shapes are the logical ones.

    Raises:
        ValueError: as `DeepseekV4Config.read`, or no number of draft stages.
    """
    if isinstance(layout, str):
        layout = LAYOUTS[layout]
    if stages is None:
        stages = draft_stages(config)
    table = _Table(config, layout)
    return dict(table.tensors(stages))


def detect_layout(headers: Mapping[str, TensorHeader]) -> Layout:
    """The layout from the dtypes of layer 0, whatever the config claims.

    Raises:
        CheckpointError: layer 0 lacks one of the telling tensors.
    """
    attention, expert = "layers.0.attn", "layers.0.ffn.experts.0.w1.weight"
    telling = [f"{attention}.wq_a.weight", f"{attention}.wo_a.weight", expert]
    missing = [name for name in telling if name not in headers]
    if missing:
        raise CheckpointError(
            [
                f"{name} is missing: the layout cannot be told. Is this a DeepSeek-V4 checkpoint?"
                for name in missing
            ]
        )
    projections, wo_a, experts = (headers[name].dtype for name in telling)
    scale = headers.get(f"{attention}.wq_a.scale")
    return Layout(
        projections=projections,
        wo_a=wo_a,
        experts=experts,
        scale=scale.dtype if scale else "F8_E8M0",
    )


def check_headers(
    table: Mapping[str, TensorSpec],
    headers: Mapping[str, TensorHeader],
    ignored: tuple[str, ...] = (),
) -> None:
    """Compare what the shards declare with what the table asks for; reads no weights.

    Args:
        table: from `tensor_table`.
        headers: from `check_shards`.
        ignored: prefixes of names that need not be there and need not be in the table.

    Raises:
        CheckpointError: tensors missing, left over, of a wrong shape or of a wrong dtype.
    """
    problems = []
    for name, spec in table.items():
        if name.startswith(ignored):
            continue
        found = headers.get(name)
        if found is None:
            if not spec.optional:
                problems.append(
                    f"{name} is missing, expected {spec.dtype} {list(spec.shape)}."
                )
        elif found.shape != spec.shape:
            problems.append(
                f"{name} is {list(found.shape)}, expected {list(spec.shape)}, in {found.shard}."
            )
        elif found.dtype not in accepted_dtypes(name, spec.dtype):
            problems.append(
                f"{name} is {found.dtype}, expected {spec.dtype}, in {found.shard}."
            )
    problems += [
        f"{name} is left over: nothing in the model takes it, in {header.shard}."
        for name, header in headers.items()
        if name not in table and not name.startswith(ignored)
    ]
    if problems:
        raise CheckpointError(problems)


def accepted_dtypes(name: str, dtype: str) -> frozenset[str]:
    """Dtypes that stand for `dtype` without loss of meaning, such as I32 for I64."""
    if name.endswith(".scale"):
        return SCALE
    for family in (PLAIN, INTEGER, PACKED):
        if dtype in family:
            return family
    return frozenset({dtype})


def _or_default(config: Mapping[str, Any], key: str) -> Any:
    """What the model takes where config.json lacks an optional key, or holds null."""
    value = config.get(key)
    return getattr(DeepseekV4Config, key) if value is None else value


class _Table:
    """Names and shapes from a config; a method for each module of the model."""

    def __init__(self, config: Mapping[str, Any], layout: Layout):
        self.config = config
        self.layout = layout
        self.read = DeepseekV4Config.read(config)
        self.hidden: int = config["hidden_size"]
        self.streams: int = _or_default(config, "hc_mult")

    def tensors(self, stages: int) -> Iterator[tuple[str, TensorSpec]]:
        vocab = self.config["vocab_size"]
        layers = self.config["num_hidden_layers"]
        yield "embed.weight", TensorSpec((vocab, self.hidden), "BF16")
        for layer in range(layers):
            hashed = self.read.mlp_layer_types[layer] == HASH_MOE
            yield from self.block(f"layers.{layer}", self.ratio(layer), hashed)
        yield from self.head("")
        if not _or_default(self.config, "tie_word_embeddings"):
            yield "head.weight", TensorSpec((vocab, self.hidden), "BF16")
        for stage in range(stages):
            yield from self.block(f"mtp.{stage}", self.ratio(layers + stage), False)
            if draft_kind(self.config) == "dspark":
                yield from self.dspark(f"mtp.{stage}.", stage, stage == stages - 1)
            else:
                yield from self.mtp(f"mtp.{stage}.")

    def ratio(self, layer: int) -> int:
        if layer < self.read.num_hidden_layers:
            return self.read.ratio(layer)
        ratios = self.config.get("compress_ratios") or ()
        return ratios[layer] if layer < len(ratios) else 0

    def block(
        self, prefix: str, ratio: int, hashed: bool
    ) -> Iterator[tuple[str, TensorSpec]]:
        yield f"{prefix}.attn_norm.weight", TensorSpec((self.hidden,), "BF16")
        yield from self.attention(f"{prefix}.attn", ratio)
        yield f"{prefix}.ffn_norm.weight", TensorSpec((self.hidden,), "BF16")
        yield from self.feed_forward(f"{prefix}.ffn", hashed)
        mixes = (2 + self.streams) * self.streams
        for part in ("attn", "ffn"):
            name = f"{prefix}.hc_{part}"
            yield f"{name}_fn", TensorSpec((mixes, self.streams * self.hidden), "F32")
            yield f"{name}_base", TensorSpec((mixes,), "F32")
            yield f"{name}_scale", TensorSpec((3,), "F32")

    def attention(self, prefix: str, ratio: int) -> Iterator[tuple[str, TensorSpec]]:
        c = self.config
        heads, head_dim, rank = (
            c["num_attention_heads"],
            c["head_dim"],
            c["q_lora_rank"],
        )
        groups, group_rank = c["o_groups"], c["o_lora_rank"]
        dtype = self.layout.projections
        yield f"{prefix}.attn_sink", TensorSpec((heads,), "F32")
        yield from self.matrix(f"{prefix}.wq_a", rank, self.hidden, dtype)
        yield f"{prefix}.q_norm.weight", TensorSpec((rank,), "BF16")
        yield from self.matrix(f"{prefix}.wq_b", heads * head_dim, rank, dtype)
        yield from self.matrix(f"{prefix}.wkv", head_dim, self.hidden, dtype)
        yield f"{prefix}.kv_norm.weight", TensorSpec((head_dim,), "BF16")
        yield from self.matrix(
            f"{prefix}.wo_a",
            groups * group_rank,
            heads * head_dim // groups,
            self.layout.wo_a,
        )
        yield from self.matrix(
            f"{prefix}.wo_b", self.hidden, groups * group_rank, dtype
        )
        if ratio:
            yield from self.compressor(f"{prefix}.compressor", ratio, head_dim)
        if ratio == 4:
            heads, head_dim = c["index_n_heads"], c["index_head_dim"]
            indexer = f"{prefix}.indexer"
            yield from self.matrix(f"{indexer}.wq_b", heads * head_dim, rank, dtype)
            yield (
                f"{indexer}.weights_proj.weight",
                TensorSpec((heads, self.hidden), "BF16"),
            )
            yield from self.compressor(f"{indexer}.compressor", ratio, head_dim)

    def compressor(
        self, prefix: str, ratio: int, head_dim: int
    ) -> Iterator[tuple[str, TensorSpec]]:
        # Ratio 4 overlaps: each entry also reads the previous block, by columns of its own.
        columns = (2 if ratio == 4 else 1) * head_dim
        yield f"{prefix}.ape", TensorSpec((ratio, columns), "F32")
        yield f"{prefix}.wkv.weight", TensorSpec((columns, self.hidden), "BF16")
        yield f"{prefix}.wgate.weight", TensorSpec((columns, self.hidden), "BF16")
        yield f"{prefix}.norm.weight", TensorSpec((head_dim,), "BF16")

    def feed_forward(
        self, prefix: str, hashed: bool
    ) -> Iterator[tuple[str, TensorSpec]]:
        c = self.config
        experts, width = c["n_routed_experts"], c["moe_intermediate_size"]
        yield f"{prefix}.gate.weight", TensorSpec((experts, self.hidden), "BF16")
        if hashed:
            shape = (c["vocab_size"], c["num_experts_per_tok"])
            yield f"{prefix}.gate.tid2eid", TensorSpec(shape, "I64")
        else:
            yield f"{prefix}.gate.bias", TensorSpec((experts,), "F32")
        for expert in range(experts):
            yield from self.swiglu(
                f"{prefix}.experts.{expert}", width, self.layout.experts
            )
        shared = _or_default(c, "n_shared_experts")
        if shared:
            yield from self.swiglu(
                f"{prefix}.shared_experts",
                width * shared,
                self.layout.projections,
            )

    def swiglu(
        self, prefix: str, width: int, dtype: str
    ) -> Iterator[tuple[str, TensorSpec]]:
        yield from self.matrix(f"{prefix}.w1", width, self.hidden, dtype)
        yield from self.matrix(f"{prefix}.w2", self.hidden, width, dtype)
        yield from self.matrix(f"{prefix}.w3", width, self.hidden, dtype)

    def head(self, prefix: str) -> Iterator[tuple[str, TensorSpec]]:
        streams = self.streams
        yield f"{prefix}norm.weight", TensorSpec((self.hidden,), "BF16")
        yield (
            f"{prefix}hc_head_fn",
            TensorSpec((streams, streams * self.hidden), "F32"),
        )
        yield f"{prefix}hc_head_base", TensorSpec((streams,), "F32")
        yield f"{prefix}hc_head_scale", TensorSpec((1,), "F32")

    def mtp(self, prefix: str) -> Iterator[tuple[str, TensorSpec]]:
        dtype = self.layout.projections
        yield from self.matrix(f"{prefix}e_proj", self.hidden, self.hidden, dtype)
        yield from self.matrix(f"{prefix}h_proj", self.hidden, self.hidden, dtype)
        yield f"{prefix}enorm.weight", TensorSpec((self.hidden,), "BF16")
        yield f"{prefix}hnorm.weight", TensorSpec((self.hidden,), "BF16")
        yield from self.head(prefix)

    def dspark(
        self, prefix: str, stage: int, last: bool
    ) -> Iterator[tuple[str, TensorSpec]]:
        c = self.config
        if stage == 0:
            ids = c["dspark_target_layer_ids"]
            if not isinstance(ids, list | tuple):
                raise ValueError(
                    "config: dspark_target_layer_ids must be a list of the target's layers."
                )
            taps = len(ids) * self.hidden
            yield from self.matrix(
                f"{prefix}main_proj", self.hidden, taps, self.layout.projections
            )
            yield f"{prefix}main_norm.weight", TensorSpec((self.hidden,), "BF16")
        if last:
            yield from self.head(prefix)
            vocab, rank = c["vocab_size"], need_integer(c, "dspark_markov_rank")
            for name in ("markov_w1", "markov_w2"):
                yield (
                    f"{prefix}markov_head.{name}.weight",
                    TensorSpec((vocab, rank), "BF16"),
                )
            if c.get("enable_confidence_head", True):
                yield (
                    f"{prefix}confidence_head.proj.weight",
                    TensorSpec((1, self.hidden + rank), "BF16", optional=True),
                )

    def matrix(
        self, name: str, rows: int, columns: int, dtype: str
    ) -> Iterator[tuple[str, TensorSpec]]:
        """A linear layer's weight and, where it is quantised, its scale."""
        if dtype in PACKED:
            scale = (rows, -(-columns // MXFP4_GROUP))
            yield f"{name}.weight", TensorSpec((rows, columns // 2), dtype)
            yield f"{name}.scale", TensorSpec(scale, "F8_E8M0")
        elif dtype == "F8_E4M3":
            scale = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
            yield f"{name}.weight", TensorSpec((rows, columns), dtype)
            yield f"{name}.scale", TensorSpec(scale, self.layout.scale)
        else:
            yield f"{name}.weight", TensorSpec((rows, columns), dtype)
