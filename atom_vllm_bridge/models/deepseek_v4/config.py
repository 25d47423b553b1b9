"""The dimensions of a DeepSeek-V4 checkpoint, read from its config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
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
            ValueError: a key is missing, or asks for something that this model does not do.
        """
        layers = _need(hf, "num_hidden_layers")
        rope_main, rope_compress = _rope(hf)
        _refuse(hf)
        head_dim = _need(hf, "head_dim")
        rope_dim = hf.get("qk_rope_head_dim")
        if rope_dim is None:
            rope_dim = int(head_dim * (hf.get("partial_rotary_factor") or 0.125))
        limit = hf.get("swiglu_limit")
        config = cls(
            layer_types=_layer_types(hf, layers),
            mlp_layer_types=_mlp_layer_types(hf, layers),
            qk_rope_head_dim=rope_dim,
            swiglu_limit=float("inf") if not limit else float(limit),
            rope_theta=rope_main,
            compress_rope_theta=rope_compress["rope_theta"],
            yarn=_yarn(rope_compress),
            **{key: _need(hf, key) for key in _PLAIN},
            **{
                key: hf[key]
                for key in _PLAIN_OPTIONAL
                if key in hf and hf[key] is not None
            },
        )
        config._check()
        return config

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
        topk = self.index_topk
        if not isinstance(topk, int) or isinstance(topk, bool) or topk < 1:
            raise ValueError(
                f"config: index_topk = {topk!r} must be an integer of at least 1."
            )
        for key in ("hidden_size", "moe_intermediate_size"):
            if getattr(self, key) % 8:
                raise ValueError(
                    f"config: {key} = {getattr(self, key)} is not a multiple of 8, which grouped matrix products need."
                )
        rope = self.qk_rope_head_dim
        if rope % 2 or rope > min(self.head_dim, self.index_head_dim):
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
_PLAIN_OPTIONAL = (
    "n_shared_experts",
    "routed_scaling_factor",
    "hc_mult",
    "hc_sinkhorn_iters",
    "hc_eps",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
)


def _need(hf: Mapping[str, Any], key: str) -> Any:
    value = hf.get(key)
    if value is None:
        raise ValueError(f"config: {key} is missing; it is not a DeepSeek-V4 config.")
    return value


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
                f"config: {key} = {value!r} is not supported, only {supported!r}."
            )


def _layer_types(hf: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    ratios, kinds = hf.get("compress_ratios"), hf.get("layer_types")
    # vLLM and transformers may add layer_types of their own vocabulary; the published key is compress_ratios.
    if ratios is not None:
        for layer, ratio in enumerate(ratios):
            if ratio not in LAYER_TYPE_OF_RATIO:
                raise ValueError(
                    f"config: compress_ratios[{layer}] = {ratio} is unknown; known are 0, 4 and 128."
                )
        kinds = [LAYER_TYPE_OF_RATIO[ratio] for ratio in ratios]
    if kinds is None:
        raise ValueError(
            "config: compress_ratios is missing; it is not a DeepSeek-V4 config."
        )
    for layer, kind in enumerate(kinds):
        if kind not in RATIO_OF_LAYER_TYPE:
            raise ValueError(
                f"config: layer_types[{layer}] = {kind!r} is unknown; known are {', '.join(RATIO_OF_LAYER_TYPE)}."
            )
    rates = hf.get("compress_rates") or {}
    for kind, ratio in rates.items():
        if RATIO_OF_LAYER_TYPE.get(kind) != ratio:
            raise ValueError(
                f"config: compress_rates[{kind!r}] = {ratio} is not supported, only {RATIO_OF_LAYER_TYPE.get(kind)}."
            )
    if len(kinds) < layers:
        raise ValueError(
            f"config: compress_ratios has {len(kinds)} entries for {layers} layers; one a layer is needed."
        )
    return tuple(kinds[:layers])


def _mlp_layer_types(hf: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    hashed = hf.get("num_hash_layers")
    if hashed is not None:
        return tuple(HASH_MOE if i < hashed else MOE for i in range(layers))
    kinds = tuple(_need(hf, "mlp_layer_types"))[:layers]
    if len(kinds) < layers or any(kind not in (HASH_MOE, MOE) for kind in kinds):
        raise ValueError(
            f"config: mlp_layer_types = {list(kinds)} must name {HASH_MOE} or {MOE} for each of {layers} layers."
        )
    return kinds


def _rope(hf: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """Base of sliding layers, and all parameters of compressed layers."""
    scaling = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    if isinstance(scaling.get("compress"), Mapping):
        main = dict(scaling.get("main") or {})
        theta = main.get("rope_theta", hf.get("rope_theta") or 1e4)
        compress = dict(scaling["compress"])
        compress.setdefault("rope_theta", hf.get("compress_rope_theta") or 1.6e5)
        return float(theta), compress
    theta = hf.get("rope_theta") or scaling.get("rope_theta") or 1e4
    scaling["rope_theta"] = float(hf.get("compress_rope_theta") or 1.6e5)
    return float(theta), scaling


def _yarn(parameters: Mapping[str, Any]) -> Yarn | None:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return None
    # vLLM renames yarn for this model; the parameters are the same.
    if kind not in ("yarn", "deepseek_yarn"):
        raise ValueError(
            f"config: rope_scaling of type {kind!r} is not supported, only 'yarn'."
        )
    return Yarn(
        factor=float(parameters["factor"]),
        original_max_position_embeddings=int(
            parameters["original_max_position_embeddings"]
        ),
        beta_fast=float(parameters.get("beta_fast") or 32),
        beta_slow=float(parameters.get("beta_slow") or 1),
    )
