"""The configs that checkpoints are generated from: a preset, its depth, its draft."""

from typing import Any

DRAFTS = ("dspark", "mtp", "none")
DSPARK_STAGES = 3

_COMMON: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "compress_rope_theta": 160000,
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "index_head_dim": 128,
    "index_topk": 512,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 6,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "5.19.0",
    "use_cache": True,
}

PRESETS: dict[str, dict[str, Any]] = {
    # Small, with every kind of layer, and within what vLLM's own CPU kernels accept:
    # 64 experts of which 6, head 512 with 64 rotary, matrix sides that are multiples of 128.
    "tiny": {
        "hidden_size": 256,
        "index_n_heads": 8,
        "moe_intermediate_size": 128,
        "n_routed_experts": 64,
        "num_attention_heads": 4,
        "num_hash_layers": 2,
        "num_hidden_layers": 6,
        "o_groups": 2,
        "o_lora_rank": 128,
        "q_lora_rank": 128,
        "vocab_size": 1024,
        "dspark_markov_rank": 64,
    },
    # What training/ trains: as many parameters as 16 MiB of fp8 and mxfp4 hold, few enough for minutes on one GPU.
    "schoolbook": {
        "head_dim": 256,
        "hidden_size": 256,
        "index_n_heads": 4,
        "index_topk": 64,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 96,
        "n_routed_experts": 16,
        "num_attention_heads": 4,
        "num_hash_layers": 2,
        "num_hidden_layers": 6,
        "o_groups": 2,
        "o_lora_rank": 128,
        "q_lora_rank": 128,
        "vocab_size": 1024,
        "dspark_markov_rank": 64,
        # The tokenizer's padding, which no text holds.
        "dspark_noise_token_id": 2,
    },
    # DeepSeek-V4-Flash's own dimensions; only the depth is less.
    "flash-shaped": {
        "hidden_size": 4096,
        "index_n_heads": 64,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_attention_heads": 64,
        "num_hash_layers": 3,
        "num_hidden_layers": 6,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "q_lora_rank": 1024,
        "vocab_size": 129280,
        "dspark_markov_rank": 256,
        "dspark_noise_token_id": 128799,
    },
}

# The same dimensions; agreeing.py gives the weights another shape.
PRESETS["agreeing"] = PRESETS["tiny"]

_UNCOMPRESSED = {"tiny": 1, "agreeing": 1, "schoolbook": 2, "flash-shaped": 2}
_DSPARK_KEYS = {
    "dspark_block_size",
    "dspark_markov_rank",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
}
_OPTIONAL_KEYS = {"compress_ratios", "enable_confidence_head", "n_mtp_layers"}


def build_config(
    preset: str = "tiny",
    *,
    layout: str = "mxfp4",
    layers: int | None = None,
    draft: str | None = "dspark",
    overrides: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of config.json.

    Args:
        preset: a key of PRESETS.
        layout: "bf16", "mxfp4" or "fp8"; decides the quantisation keys.
        layers: depth of the target; the compress ratios follow the preset's pattern.
        draft: "dspark", "mtp", or "none" (also None).
        overrides: config keys that win over everything else.

    Raises:
        ValueError: an unknown preset, draft or key, or dimensions that do not divide.
    """
    if preset not in PRESETS:
        raise ValueError(f"no preset {preset!r}: choose one of {', '.join(PRESETS)}")
    draft = draft or "none"
    if draft not in DRAFTS:
        raise ValueError(f"no draft {draft!r}: choose one of {', '.join(DRAFTS)}")
    overrides = dict(overrides or {})
    config = {**_COMMON, **PRESETS[preset]}
    _refuse_unknown(overrides, {*config, *_DSPARK_KEYS, *_OPTIONAL_KEYS})
    if layers is not None:
        config["num_hidden_layers"] = layers
    config.update(overrides)

    depth = config["num_hidden_layers"]
    if depth < 1:
        raise ValueError(f"{depth} layers: a checkpoint needs at least one")
    stages = {
        "dspark": config.get("n_mtp_layers") or DSPARK_STAGES,
        "mtp": config["num_nextn_predict_layers"] or 1,
        "none": 0,
    }[draft]
    if draft == "dspark":
        config.setdefault("dspark_block_size", 5)
        config.setdefault("dspark_noise_token_id", config["vocab_size"] - 1)
        config.setdefault(
            "dspark_target_layer_ids", list(range(max(0, depth - 3), depth))
        )
    else:
        config = {k: v for k, v in config.items() if k not in _DSPARK_KEYS}
        config["num_nextn_predict_layers"] = stages
    config["num_hash_layers"] = min(config["num_hash_layers"], depth)
    config["compress_ratios"] = _compress_ratios(
        overrides.get("compress_ratios"), _UNCOMPRESSED[preset], depth, stages
    )
    if layout != "bf16":
        config["expert_dtype"] = {"mxfp4": "fp4", "fp8": "fp8"}[layout]
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        }
    _refuse_misfits(config)
    return config


def _compress_ratios(
    given: list[int] | None, uncompressed: int, depth: int, stages: int
) -> list[int]:
    """One ratio a layer (0, …, then 4 and 128 in turn), then one 0 a draft stage."""
    if given is None:
        given = [
            0 if i < uncompressed else (4, 128)[(i - uncompressed) % 2]
            for i in range(depth)
        ]
    if len(given) < depth:
        raise ValueError(
            f"compress_ratios has {len(given)} entries for {depth} layers: give one a layer"
        )
    return given + [0] * (depth + stages - len(given))


def _refuse_unknown(overrides: dict[str, Any], known: set[str]) -> None:
    for key in overrides:
        if key not in known:
            raise ValueError(
                f"no config key {key!r} to override: known are {', '.join(sorted(known))}"
            )


def _refuse_misfits(config: dict[str, Any]) -> None:
    width = config["num_attention_heads"] * config["head_dim"]
    if width % config["o_groups"]:
        raise ValueError(
            f"num_attention_heads × head_dim = {width} does not divide into "
            f"o_groups = {config['o_groups']}"
        )
    if config["num_experts_per_tok"] > config["n_routed_experts"]:
        raise ValueError(
            f"num_experts_per_tok = {config['num_experts_per_tok']} exceeds "
            f"n_routed_experts = {config['n_routed_experts']}"
        )
    for key in ("hidden_size", "moe_intermediate_size", "qk_rope_head_dim"):
        if config[key] % 2:
            raise ValueError(f"{key} = {config[key]} is odd: it must be even")
    if config["qk_rope_head_dim"] > min(config["head_dim"], config["index_head_dim"]):
        raise ValueError(
            f"qk_rope_head_dim = {config['qk_rope_head_dim']} exceeds head_dim = "
            f"{config['head_dim']} or index_head_dim = {config['index_head_dim']}"
        )
    for layer in config.get("dspark_target_layer_ids", ()):
        if not 0 <= layer < config["num_hidden_layers"]:
            raise ValueError(
                f"dspark_target_layer_ids holds {layer}, but there are "
                f"{config['num_hidden_layers']} layers"
            )
