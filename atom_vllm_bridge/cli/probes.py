"""What `doctor` can learn only by importing torch or vLLM.

Each function is one probe and runs in a process of its own (`python -m atom_vllm_bridge.cli.probes NAME [DIR]`), so that
a broken library, a crash or a hang costs one section of the report. A probe raises what it meets: the last line of the
traceback is what the report shows. Its answer is the last line of standard output.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atom_vllm_bridge.models.deepseek_v4.checkpoint import Layout, TensorHeader

MARK = "atom-vllm-bridge-probe "

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


def platform() -> dict[str, Any]:
    """The platform that vLLM uses, the one it would use without plugins, and what ours said."""
    from atom_vllm_bridge import plugin, rocm_atom

    try:
        ours, refusal = plugin.register_platform(), None
    except (RuntimeError, ValueError) as error:
        ours, refusal = None, str(error)
    from vllm.platforms import current_platform

    kind = type(current_platform)
    return {
        "chosen": f"{kind.__module__}.{kind.__qualname__}",
        "enum": current_platform._enum.name,
        "stock": plugin.detected_platform(),
        "ours": ours,
        "left_to": rocm_atom.platform_plugin(os.environ),
        "refusal": refusal,
    }


def ops(preference: str) -> list[dict[str, Any]]:
    """One row an op: the provider that is chosen here and why, and which others would do."""
    import torch

    from atom_vllm_bridge import engine_ops
    from atom_vllm_bridge.models.ops import registry

    engine_ops.configure(preference)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for op in registry.names():
        registry.resolve(op, device)
    return [
        {
            "op": choice.op,
            "provider": choice.provider,
            "reason": choice.reason,
            "device": choice.device,
            "available": list(registry.providers_of(choice.op, device)),
        }
        for choice in registry.table()
    ]


def patches(turned_off: str) -> dict[str, list[dict[str, str]]]:
    """A row a patch and a duty, after a trial in this process: whether each still fits the installed vLLM."""
    from vllm.platforms import current_platform

    from atom_vllm_bridge.patches import registry

    assert current_platform is not None  # resolved first, as in every process of vLLM
    found = registry.load()
    found.turn_off(turned_off.split(","))
    found.apply_all(runner="v2")
    return {"patches": found.table(), "duties": found.duty_table()}


def checkpoint(directory: str) -> dict[str, Any]:
    """What a checkpoint holds, from config.json and the shards' headers; `problems` has one line a fault."""
    from atom_vllm_bridge.models.deepseek_v4 import checkpoint, shards

    problems: list[str] = []
    facts: dict[str, Any] = dict.fromkeys(FACTS)
    facts |= {"directory": directory, "problems": problems}
    config: dict[str, Any] = {}
    headers: dict[str, checkpoint.TensorHeader] = {}
    try:
        config = json.loads((Path(directory) / "config.json").read_bytes())
        facts |= _dimensions(config)
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
    from atom_vllm_bridge.models.deepseek_v4.checkpoint import draft_kind
    from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config

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
        "draft": draft_kind(config),
    }


def _architectures(config: dict[str, Any]) -> list[str]:
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"architectures is {names!a:.100}, which is no list of names. Write "
            '["DeepseekV4ForCausalLM"].'
        )
    return names


def _layout(found: "Layout") -> dict[str, Any]:
    from atom_vllm_bridge.models.deepseek_v4.checkpoint import LAYOUTS

    # Some published checkpoints keep wo_a in bf16: a variation of a layout, not another one.
    same = [
        name
        for name, layout in LAYOUTS.items()
        if (layout.projections, layout.experts) == (found.projections, found.experts)
    ]
    return {"layout": same[0] if same else "unknown", "dtypes": asdict(found)}


def _mismatches(
    config: dict[str, Any], headers: "dict[str, TensorHeader]", stages: int
) -> list[str]:
    """Tensors that are missing, left over, or not what config.json makes them."""
    from atom_vllm_bridge.models.deepseek_v4 import checkpoint

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


PROBES: dict[str, Callable[..., Any]] = {
    "platform": platform,
    "ops": ops,
    "patches": patches,
    "checkpoint": checkpoint,
}


def main(name: str, *arguments: str) -> None:
    answer = PROBES[name](*arguments)
    # A library may have left half a line.
    print(f"\n{MARK}{json.dumps(answer)}", flush=True)
    # Some libraries crash at interpreter exit; the answer is complete by now.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
