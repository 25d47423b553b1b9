"""The page `docs/ops.md`, from the registry of ops: `python -m atom_vllm_bridge.ops_page` prints it."""

import importlib
import inspect

from atom_vllm_bridge import engine_ops
from atom_vllm_bridge.models.ops import registry

# torch's names of devices → in the page.
DEVICES = {"cpu": "on a CPU", "cuda": "on an NVIDIA GPU"}


def ops_page() -> str:
    """The text of `docs/ops.md`: each op, what it computes, and who can."""
    engine_ops.configure("")
    providers = registry.providers()
    head = ["op", *providers, *DEVICES.values(), "what it computes"]
    rows = [_row(op, providers) for op in registry.names()]
    return _PAGE.format(
        head=" | ".join(head), line="|---" * len(head) + "|", rows="\n".join(rows)
    )


def _row(op: str, providers: tuple[str, ...]) -> str:
    having = ["yes" if registry.has(provider, op) else "" for provider in providers]
    first = [registry.first(op, device) for device in DEVICES]
    return f"| {' | '.join([f'`{op}`', *having, *first, _about(op)])} |"


def _about(op: str) -> str:
    module = importlib.import_module(f"{registry.torch_ops.__name__}.{op}")
    text = inspect.getdoc(module)
    assert text, f"{module.__name__} does not say what it computes"
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")


_PAGE = """\
# Ops

An op is one formula of the model; `torch` is the reference, and every other provider is tested against it in float32. The columns
“on …” say who runs it there by default; the setting `ops` ([settings](settings.md)) prefers another. `atom-vllm-bridge doctor` and
the table at the start show what was chosen.

| {head} |
{line}
{rows}

- `numba` is for CPUs: a decode step runs a layer in one compiled call.
- `triton` is for GPUs, of either vendor; it has run on an H200 alone.
- `vllm` are kernels of the engine, taken only where the setting names them.

This page is made from the code: `make docs` writes it.
"""


if __name__ == "__main__":
    print(ops_page(), end="")
