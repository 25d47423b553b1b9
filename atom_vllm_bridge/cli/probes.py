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


def devices() -> dict[str, Any]:
    """What torch was built for, and the GPUs that it sees."""
    import torch

    gpu = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        generation = f"sm_{about.major}{about.minor}"
        found.append(
            {
                "name": about.name,
                # AMD's carry features behind a colon, as gfx942:sramecc+.
                "architecture": (
                    about.gcnArchName.partition(":")[0] if gpu == "rocm" else generation
                ),
                "memory_gib": round(about.total_memory / 2**30, 1),
            }
        )
    architectures = torch.cuda.get_arch_list() if found else []
    return {
        "torch": torch.__version__,
        "built_for": gpu,
        "architectures": architectures,
        "devices": found,
    }


def selftest() -> list[dict[str, Any]]:
    """One row an op and provider."""
    from atom_vllm_bridge.cli import selftest

    return selftest.selftest()


def checkpoint(model: str, speculative: str) -> dict[str, Any]:
    """What a checkpoint holds."""
    from atom_vllm_bridge.cli import reading

    return reading.read(model, speculative)


def plan(model: str, speculative: str, memory: str) -> dict[str, Any]:
    """How vLLM would lay out its caches."""
    from atom_vllm_bridge.cli import planning

    return planning.plan(model, speculative, int(memory))


PROBES: dict[str, Callable[..., Any]] = {
    "platform": platform,
    "devices": devices,
    "selftest": selftest,
    "plan": plan,
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
