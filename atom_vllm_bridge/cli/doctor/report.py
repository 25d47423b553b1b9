"""What doctor found, and how it is printed."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

SCHEMA = 1


@dataclass
class Report:
    """Sections in the order in which they are printed; a fault makes the exit code 1, a note does not."""

    sections: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "ok": not self.faults,
            "faults": self.faults,
            "notes": self.notes,
            **self.sections,
        }


def text(report: Report) -> str:
    """The report for a person."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    s = report.sections
    yield "versions"
    for name, version in s["versions"].items():
        known = f"   (supported: {s['supported_vllm']})" if name == "vllm" else ""
        yield f"  {name:<18}{version or 'not installed'}{known}"
    yield "platform"
    yield f"  {s['platform']['chosen'] or 'unknown'}"
    yield f"  because {s['platform']['why']}"
    yield from _device_lines(s["devices"])
    yield "entry points"
    for group, points in s["entry_points"].items():
        for point in points:
            yield f"  {group}: {point['name']} = {point['value']} ({point['package']})"
    yield "model runner"
    value = s["model_runner"]["VLLM_USE_V2_MODEL_RUNNER"]
    setting = "is not set" if value is None else f"is {value}"
    yield (
        f"  DeepSeek-V4: {s['model_runner']['deepseek_v4']} (VLLM_USE_V2_MODEL_RUNNER {setting})"
    )
    yield "ops"
    yield from _table(s["ops"], "op", "provider", "reason")
    if s["selftest"] is not None:
        yield "self-test of the ops"
        yield from _table(s["selftest"], "op", "provider", "state", "reason")
    yield "patches"
    yield from _table(s["patches"], "id", "state", "target")
    yield "done by vLLM's hooks"
    yield from _table(s["duties"], "id", "state", "hook")
    yield "environment"
    for name, value in s["environment"].items():
        yield f"  {name}={value}"
    if not s["environment"]:
        yield "  nothing set"
    yield "other variables, and what DeepSeek-V4 needs of them"
    yield from _table(s["variables"], "name", "value", "needs")
    if s["checkpoint"]:
        yield "checkpoint"
        for name, value in s["checkpoint"].items():
            yield f"  {name:<25}{_plain(value)}"
    if s["plan"]:
        yield "plan"
        yield from _plan_lines(s["plan"])
    for note in report.notes:
        yield f"note: {note}"
    for fault in report.faults:
        yield f"fault: {fault}"
    if not report.faults:
        yield "No fault found."


def _device_lines(found: Mapping[str, Any] | None) -> Iterator[str]:
    yield "devices"
    if found is None:
        yield "  unknown"
        return
    yield f"  torch {found['torch']}, built for {found['built_for']}"
    yield from _table(found["devices"], "name", "architecture", "memory_gib")


def _plan_lines(plan: Mapping[str, Any]) -> Iterator[str]:
    for name in ("classes", "draft", "rollback_tokens"):
        yield f"  {name:<25}{_plain(plan[name])}"
    for layout, found in (plan["layouts"] or {}).items():
        groups = Counter(
            f"{group['role']} of {group['tokens']} tokens, {group['layers']} layers"
            for group in found["groups"]
        )
        yield f"  {layout:<25}{found['block_bytes']:,} bytes a block"
        for group, count in groups.items():
            yield f"  {'':<25}{count} × {group}"
        if found["capacity"]:
            yield f"  {'':<25}{found['blocks']:,} blocks; requests at once, by tokens: {_plain(found['capacity'])}"
    if plan["layouts"] is None:
        yield f"  {'layouts':<25}unknown"


def _table(rows: list[dict[str, Any]] | None, *columns: str) -> Iterator[str]:
    if rows is None:
        yield "  unknown"
        return
    if not rows:
        yield "  none"
        return
    cells = [[_plain(row[column]) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(padded)}".rstrip()


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_plain(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    return "–" if value is None else str(value)
