"""What a checkpoint holds, and what its config.json alone says of a server that serves it. Needs neither torch nor vLLM."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atom_vllm_bridge import plugin, rollback, snapshots
from atom_vllm_bridge.models.deepseek_v4 import checkpoint, shards
from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
from atom_vllm_bridge.patches.draft_length import TRAINED_LENGTH
from atom_vllm_bridge.settings import ROLLBACKS

DRAFT_ARCHITECTURES = {"dspark": "DSparkDraftModel", "mtp": "DeepSeekV4MTPModel"}

# What is reported of a checkpoint; null where a fault hides it.
FACTS = (
    "directory",
    "architecture",
    "layers",
    "feed_forward",
    "experts",
    "index_topk",
    "sliding_window",
    "max_position_embeddings",
    "layout",
    "dtypes",
    "tensors",
    "draft",
    "draft_stages",
)


def read(model: str, speculative: str = "{}") -> dict[str, Any]:
    """What a checkpoint holds, from config.json and the shards' headers; `problems` has one line a fault.

    Args:
        model: a directory, or a name in the hub's cache.
        speculative: a JSON object as in vLLM's --speculative-config; "{}": no draft.

    Returns:
        FACTS; "problems"; "outlook", what the config alone says of a server, None where it cannot be used.
    """
    problems: list[str] = []
    facts: dict[str, Any] = dict.fromkeys(FACTS)
    directory = model
    if snapshots.is_name(model):
        found = snapshots.directory_of(model)
        if found is None:
            line = (
                f"{model} is not a directory, and not whole in the hub's cache, so that nothing of it can be checked. "
                f"Download it: hf download {model}"
            )
            return facts | {"directory": model, "problems": [line], "outlook": None}
        directory = str(found)
    facts |= {"directory": directory, "problems": problems, "outlook": None}
    config: dict[str, Any] = {}
    headers: dict[str, checkpoint.TensorHeader] = {}
    try:
        config = json.loads((Path(directory) / "config.json").read_bytes())
        facts |= _dimensions(config)
        facts["outlook"] = outlook(config, json.loads(speculative))
    except OSError as error:
        problems.append(f"{directory}/config.json cannot be read: {error.strerror}.")
    except (ValueError, RecursionError) as error:
        problems.append(f"{directory}/config.json cannot be used: {error}")
    try:
        headers = shards.check_shards(directory)
        facts |= {
            "tensors": len(headers),
            "draft_stages": checkpoint.count_stages(headers),
            **_layout(checkpoint.detect_layout(headers)),
        }
    except checkpoint.CheckpointError as error:
        problems += error.problems
    if not problems:
        problems += _mismatches(config, headers, facts["draft_stages"])
    return facts


def _dimensions(config: dict[str, Any]) -> dict[str, Any]:
    """The part of the report that config.json tells.

    Raises:
        ValueError: not a DeepSeek-V4 config, or one with something that the model does not do.
    """
    read = DeepseekV4Config.from_hf(config)
    return {
        "architecture": ", ".join(_architectures(config)),
        "layers": dict(Counter(read.layer_types)),
        "feed_forward": dict(Counter(read.mlp_layer_types)),
        "experts": {
            "routed": read.n_routed_experts,
            "per_token": read.num_experts_per_tok,
            "shared": read.n_shared_experts,
        },
        "index_topk": read.index_topk,
        "sliding_window": read.sliding_window,
        "max_position_embeddings": read.max_position_embeddings,
        "draft": checkpoint.draft_kind(config),
    }


def _architectures(config: dict[str, Any]) -> list[str]:
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"architectures is {names!a:.100}, which is no list of names. Write "
            '["DeepseekV4ForCausalLM"].'
        )
    return names


def _layout(found: checkpoint.Layout) -> dict[str, Any]:
    # Some published checkpoints keep wo_a in bf16: a variation of a layout, not another one.
    same = [
        name
        for name, layout in checkpoint.LAYOUTS.items()
        if (layout.projections, layout.experts) == (found.projections, found.experts)
    ]
    return {"layout": same[0] if same else "unknown", "dtypes": asdict(found)}


def _mismatches(
    config: dict[str, Any], headers: dict[str, checkpoint.TensorHeader], stages: int
) -> list[str]:
    """Tensors that are missing, left over, or not what config.json makes them."""
    try:
        promised = checkpoint.draft_stages(config)
        if stages not in (0, promised):
            return [
                f"config.json speaks of {promised} draft stages, but the shards hold {stages} (mtp.0 to mtp.{stages - 1}). "
                "Download the checkpoint again, or correct config.json."
            ]
        table = checkpoint.tensor_table(
            config, checkpoint.detect_layout(headers), stages=stages
        )
        checkpoint.check_headers(table, headers)
    except checkpoint.CheckpointError as error:
        return error.problems
    except ValueError as error:
        return [str(error)]
    return []


def outlook(config: dict[str, Any], speculative: Mapping[str, Any]) -> dict[str, Any]:
    """What follows from the config alone.

    Args:
        config: of the checkpoint.
        speculative: vLLM's --speculative-config; empty: no draft.

    Returns:
        classes: architecture → the class that serves it, None: not one of ours.
        draft: which there is, how many tokens it was trained to draft, and what is asked for.
        rollback_tokens: with rings, tokens of a prefix hit that each policy computes again.

    Raises:
        ValueError: as `DeepseekV4Config.from_hf`.
    """
    kind = checkpoint.draft_kind(config)
    method = speculative.get("method")
    trained = config.get(TRAINED_LENGTH[kind]) if kind else None
    length = speculative.get("num_speculative_tokens") or (trained if method else None)
    architectures = _architectures(config)
    if kind:
        architectures = [*architectures, DRAFT_ARCHITECTURES[kind]]
    read = DeepseekV4Config.from_hf(config)
    return {
        "classes": {name: plugin.MODELS.get(name) for name in architectures},
        "draft": {"kind": kind, "trained": trained, "asked": method, "k": length},
        "rollback_tokens": {
            policy: rollback.rollback_tokens(policy, read, length or 0)
            for policy in ROLLBACKS
        },
    }
