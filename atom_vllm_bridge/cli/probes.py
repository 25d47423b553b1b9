"""What `doctor` can learn only by importing torch or vLLM.

Each function is one probe and runs in a process of its own (`python -m atom_vllm_bridge.cli.probes NAME [DIR]`), so that
a broken library, a crash or a hang costs one section of the report. A probe raises what it meets: the last line of the
traceback is what the report shows. Its answer is the last line of standard output.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

MARK = "atom-vllm-bridge-probe "


def platform() -> dict[str, Any]:
    """The platform that vLLM uses, the one it would use without plugins, and what ours said."""
    from atom_vllm_bridge import plugin

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
        "refusal": refusal,
    }


def ops(preference: str) -> list[dict[str, Any]]:
    """One row an op: the provider that is chosen here and why, and which others would do."""
    import torch

    from atom_vllm_bridge.models.ops import registry

    registry.configure(preference)
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


def patches() -> list[dict[str, Any]]:
    """One row a patch, after a trial in this process: whether each still fits the installed vLLM."""
    from vllm.platforms import current_platform

    from atom_vllm_bridge.patches import registry

    assert current_platform is not None  # resolved first, as in every process of vLLM
    found = registry.load()
    found.apply_all(runner="v2")
    return found.table()


PROBES: dict[str, Callable[..., Any]] = {
    "platform": platform,
    "ops": ops,
    "patches": patches,
}


def main(name: str, *arguments: str) -> None:
    answer = PROBES[name](*arguments)
    # A library may have left half a line.
    print(f"\n{MARK}{json.dumps(answer)}", flush=True)
    # Some libraries crash at interpreter exit; the answer is complete by now.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
