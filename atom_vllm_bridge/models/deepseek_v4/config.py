"""The dimensions of a DeepSeek-V4 checkpoint, read from its config.json."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

SLIDING = "sliding_attention"
CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"
HASH_MOE = "hash_moe"
MOE = "moe"

LAYER_TYPE_OF_RATIO = {0: SLIDING, 4: CSA, 128: HCA}
RATIO_OF_LAYER_TYPE = {kind: ratio for ratio, kind in LAYER_TYPE_OF_RATIO.items()}


@dataclass(frozen=True)
class Yarn:
    """Stretching of the rotary frequencies of compressed layers beyond the trained length; cos and sin are not scaled.

    Attributes:
        factor: how far positions are stretched.
        original_max_position_embeddings: the trained length.
        beta_fast, beta_slow: turns over the trained length above which a frequency is kept, below which it is divided.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class DeepseekV4Config:
    """Names as in the published config.json; transformers' spellings are read too.

    Attributes:
        layer_types: for each layer of the target, `sliding_attention`, `compressed_sparse_attention` (CSA, one entry for 4
            tokens, chosen by an indexer) or `heavily_compressed_attention` (HCA, one for 128 tokens).
        mlp_layer_types: `hash_moe` (experts by a table of token ids) or `moe`.
        head_dim: of a query head and of the one key-value head; its last `qk_rope_head_dim` values are rotated.
        o_groups, o_lora_rank: groups of heads in the output projection, and the width to which each is projected first.
        index_topk: entries that the indexer of a CSA layer selects for a query.
        sliding_window: raw tokens that a query sees, itself included.
        hc_mult: residual streams of the hyper-connections.
        rope_theta: base of sliding layers; `compress_rope_theta` and `yarn` are for the compressed ones.
        swiglu_limit: clamp of the gated activation, in routed and shared experts.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    layer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    n_shared_experts: int = 1
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e4
    compress_rope_theta: float = 1.6e5
    yarn: Yarn | None = None
    max_position_embeddings: int = 1048576
    tie_word_embeddings: bool = False

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "DeepseekV4Config":
        """Read the content of config.json.

        Raises:
            ValueError: as `read`, or dimensions that do not go together.
        """
        config = cls.read(hf)
        config._check()
        return config

    @classmethod
    def read(cls, hf: Mapping[str, Any]) -> "DeepseekV4Config":
        """Like `from_hf`, of dimensions that a checkpoint may have and this model may not.

        Raises:
            ValueError: a key is missing, holds what it cannot hold, or asks for something that this model does not do.
        """
        layers = need_integer(hf, "num_hidden_layers")
        rope_main, rope_compress = _rope(hf)
        _refuse(hf)
        if hf.get("qk_rope_head_dim") is not None:
            rope_dim = need_integer(hf, "qk_rope_head_dim")
        else:
            part = _number("partial_rotary_factor", hf.get("partial_rotary_factor"))
            rope_dim = int(need_integer(hf, "head_dim") * min(part or 0.125, 1.0))
        limit = _number("swiglu_limit", hf.get("swiglu_limit"))
        tied = hf.get("tie_word_embeddings")
        if tied is not None and not isinstance(tied, bool):
            raise ValueError(
                f"config: tie_word_embeddings = {short(tied)} must be true or false."
            )
        experts = need_integer(hf, "n_routed_experts")
        if experts > MOST_EXPERTS:
            raise ValueError(
                f"config: n_routed_experts = {experts} exceeds {MOST_EXPERTS}, the most that are listed here."
            )
        numbers: dict[str, Any] = {
            key: _number(key, hf.get(key)) for key in _OPTIONAL_NUMBERS
        }
        return cls(
            layer_types=_layer_types(hf, layers),
            mlp_layer_types=_mlp_layer_types(hf, layers),
            qk_rope_head_dim=rope_dim,
            swiglu_limit=limit or float("inf"),
            rope_theta=rope_main,
            compress_rope_theta=rope_compress["rope_theta"],
            yarn=_yarn(rope_compress),
            tie_word_embeddings=bool(tied),
            **{key: need_integer(hf, key) for key in _PLAIN},
            **{
                key: integer(key, hf[key], lowest)
                for key, lowest in _OPTIONAL_INTEGERS.items()
                if hf.get(key) is not None
            },
            **{key: value for key, value in numbers.items() if value is not None},
        )

    @property
    def shared_intermediate_size(self) -> int:
        return self.n_shared_experts * self.moe_intermediate_size

    def ratio(self, layer: int) -> int:
        """Tokens of a compressed entry of a layer; 0: the layer has none."""
        return RATIO_OF_LAYER_TYPE[self.layer_types[layer]]

    def _check(self) -> None:
        width = self.num_attention_heads * self.head_dim
        if width % self.o_groups or self.num_attention_heads % self.o_groups:
            raise ValueError(
                f"config: num_attention_heads = {self.num_attention_heads} does not divide into o_groups = {self.o_groups}."
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"config: num_experts_per_tok = {self.num_experts_per_tok} exceeds n_routed_experts = {self.n_routed_experts}."
            )
        for key in ("hidden_size", "moe_intermediate_size"):
            if getattr(self, key) % 8:
                raise ValueError(
                    f"config: {key} = {getattr(self, key)} is not a multiple of 8, which grouped matrix products need."
                )
        rope = self.qk_rope_head_dim
        if rope < 2 or rope % 2 or rope > min(self.head_dim, self.index_head_dim):
            raise ValueError(
                f"config: qk_rope_head_dim = {rope} must be even and at most head_dim = {self.head_dim} "
                f"and index_head_dim = {self.index_head_dim}."
            )


_PLAIN = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
# The least that each may be.
_OPTIONAL_INTEGERS = {
    "n_shared_experts": 0,
    "hc_mult": 1,
    "hc_sinkhorn_iters": 1,
    "max_position_embeddings": 1,
}
_OPTIONAL_NUMBERS = ("routed_scaling_factor", "hc_eps", "rms_norm_eps")

# What an int32 counts: kernels take sizes as such.
LARGEST = 2**31 - 1
# Every expert's tensors are listed before any is read; the published models have up to 384.
MOST_EXPERTS = 4096


def _need(hf: Mapping[str, Any], key: str) -> Any:
    if not isinstance(hf, Mapping):
        raise ValueError(f"config: {short(hf)} is not an object of keys.")
    value = hf.get(key)
    if value is None:
        raise ValueError(f"config: {key} is missing; it is not a DeepSeek-V4 config.")
    return value


def need_integer(hf: Mapping[str, Any], key: str) -> int:
    """A size that config.json must give, from 1 to 2³¹ − 1, else ValueError."""
    return integer(key, _need(hf, key))


def integer(key: str, value: Any, lowest: int = 1) -> int:
    """`value`, if it is an integer (no bool, no 4.0) from `lowest` to 2³¹ − 1, else ValueError."""
    if type(value) is not int or not lowest <= value <= LARGEST:
        raise ValueError(
            f"config: {key} = {short(value)} must be an integer of at least {lowest} and at most {LARGEST}."
        )
    return value


def _number(key: str, value: Any) -> float | None:
    """A finite number of at least 0, or None for null."""
    if value is None:
        return None
    given = isinstance(value, int | float) and not isinstance(value, bool)
    # Not NaN, and no integer that float() cannot take.
    if not given or not 0 <= value <= sys.float_info.max:
        raise ValueError(
            f"config: {key} = {short(value)} must be a finite number of at least 0."
        )
    return float(value)


def _list(key: str, value: Any, kind: type) -> list[Any]:
    """A list whose entries are all of one type."""
    if not isinstance(value, list | tuple) or any(type(v) is not kind for v in value):
        raise ValueError(
            f"config: {key} = {short(value)} must be a list, each entry of type {kind.__name__}."
        )
    return list(value)


def _mapping(key: str, value: Any) -> dict[str, Any]:
    """An object of keys; an absent one is empty."""
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"config: {key} = {short(value)} must be an object of keys.")
    return dict(value or {})


def _refuse(hf: Mapping[str, Any]) -> None:
    """What would change the mathematics and is not done here."""
    for key, supported in (
        ("scoring_func", "sqrtsoftplus"),
        ("hidden_act", "silu"),
        ("norm_topk_prob", True),
        ("num_key_value_heads", 1),
        ("attention_bias", False),
        ("use_index_cache", False),
        ("vision_n_layers", 0),
    ):
        value = hf.get(key)
        if value is not None and value != supported:
            raise ValueError(
                f"config: {key} = {short(value)} is not supported, only {supported!r}."
            )


def _layer_types(hf: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    ratios, kinds = hf.get("compress_ratios"), hf.get("layer_types")
    # vLLM and transformers may add layer_types of their own vocabulary; the published key is compress_ratios.
    if ratios is not None:
        ratios = _list("compress_ratios", ratios, int)
        for layer, ratio in enumerate(ratios):
            if ratio not in LAYER_TYPE_OF_RATIO:
                raise ValueError(
                    f"config: compress_ratios[{layer}] = {short(ratio)} is unknown; known are 0, 4 and 128."
                )
        kinds = [LAYER_TYPE_OF_RATIO[ratio] for ratio in ratios]
    if kinds is None:
        raise ValueError(
            "config: compress_ratios is missing; it is not a DeepSeek-V4 config."
        )
    kinds = _list("layer_types", kinds, str)
    for layer, kind in enumerate(kinds):
        if kind not in RATIO_OF_LAYER_TYPE:
            raise ValueError(
                f"config: layer_types[{layer}] = {short(kind)} is unknown; known are {', '.join(RATIO_OF_LAYER_TYPE)}."
            )
    rates = _mapping("compress_rates", hf.get("compress_rates"))
    for kind, ratio in rates.items():
        if RATIO_OF_LAYER_TYPE.get(kind) != ratio:
            raise ValueError(
                f"config: compress_rates[{short(kind)}] = {short(ratio)} is not supported, only {RATIO_OF_LAYER_TYPE.get(kind)}."
            )
    if len(kinds) < layers:
        raise ValueError(
            f"config: compress_ratios has {len(kinds)} entries for {layers} layers; one a layer is needed."
        )
    return tuple(kinds[:layers])


def _mlp_layer_types(hf: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    hashed = hf.get("num_hash_layers")
    if hashed is not None:
        hashed = integer("num_hash_layers", hashed, lowest=0)
        return tuple(HASH_MOE if i < hashed else MOE for i in range(layers))
    named = _list("mlp_layer_types", _need(hf, "mlp_layer_types"), str)
    kinds = tuple(named[:layers])
    if len(kinds) < layers or any(kind not in (HASH_MOE, MOE) for kind in kinds):
        raise ValueError(
            f"config: mlp_layer_types = {short(named)} must name {HASH_MOE} or {MOE} for each of {layers} layers."
        )
    return kinds


def _rope(hf: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """Base of sliding layers, and all parameters of compressed layers."""
    name = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    scaling = _mapping(name, hf.get(name))
    base = _base("rope_theta", hf.get("rope_theta"))
    compress_base = _base("compress_rope_theta", hf.get("compress_rope_theta"))
    if isinstance(scaling.get("compress"), Mapping):
        main = _mapping(f"{name}.main", scaling.get("main"))
        compress = dict(scaling["compress"])
        theta = _base("rope_theta", main.get("rope_theta")) or base
        compress["rope_theta"] = (
            _base("rope_theta", compress.get("rope_theta")) or compress_base or 1.6e5
        )
        return theta or 1e4, compress
    theta = base or _base("rope_theta", scaling.get("rope_theta"))
    scaling["rope_theta"] = compress_base or 1.6e5
    return theta or 1e4, scaling


def _base(key: str, value: Any) -> float | None:
    """What rotary frequencies are powers of, or None where it is not given."""
    base = _number(key, value)
    if base is not None and 0 < base < 1:
        raise ValueError(f"config: {key} = {base} must be at least 1.")
    return base


def _yarn(parameters: Mapping[str, Any]) -> Yarn | None:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return None
    # vLLM renames yarn for this model; the parameters are the same.
    if kind not in ("yarn", "deepseek_yarn"):
        raise ValueError(
            f"config: rope_scaling of type {short(kind)} is not supported, only 'yarn'."
        )
    factor = _number("rope_scaling.factor", _need(parameters, "factor"))
    if not factor:
        raise ValueError("config: rope_scaling.factor = 0 stretches nothing.")
    return Yarn(
        factor=factor,
        original_max_position_embeddings=need_integer(
            parameters, "original_max_position_embeddings"
        ),
        beta_fast=_number("rope_scaling.beta_fast", parameters.get("beta_fast")) or 32,
        beta_slow=_number("rope_scaling.beta_slow", parameters.get("beta_slow")) or 1,
    )
