"""A report of speed: tables in Markdown, the same in JSON, a plot, and a sentence a draft on where it stops paying."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

from atom_vllm_bridge.measure.plot import plot_speed
from atom_vllm_bridge.measure.speed import ARMS, Acceptance, Point

# A point is one run; a difference below this is not told from noise.
NOISE = 0.05


@dataclass
class Report:
    """Points and what was asked.

    Attributes:
        model: as it was named.
        preset: the workload's name.
        asked: the workload in words.
        serve_flags: of every server.
        fit_for_acceptance: whether the prompts are text.
        differs: what was changed from the preset.
        notes: what else a reader must know.
        points: in order of measurement.
    """

    model: str
    preset: str
    asked: str
    serve_flags: Sequence[str] = ()
    fit_for_acceptance: bool = True
    differs: Sequence[str] = ()
    notes: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)

    def sentences(self) -> list[str]:
        """Where each draft stops paying; empty without points to compare."""
        return [
            verdict(ARMS[arm], ratios)
            for arm in ARMS
            if arm != "off" and (ratios := ratios_of(self.points, arm))
        ]

    def json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return asdict(self) | {
            "verdicts": self.sentences(),
            "times_off": {
                arm: {str(users): ratio for users, ratio in ratios.items()}
                for arm in ARMS
                if arm != "off" and (ratios := ratios_of(self.points, arm))
            },
        }

    def markdown(self) -> str:
        """A page: what was asked, the verdicts, and tables of speed, latency and acceptance."""
        points = sorted(
            self.points, key=lambda p: (list(ARMS).index(p.arm), p.concurrency)
        )
        intro = [f"`{self.model}`, preset `{self.preset}`: {self.asked}."]
        if self.serve_flags:
            intro[0] += f" Servers with `{' '.join(self.serve_flags)}`."
        if self.differs:
            intro.append(f"Differs from the preset: {'; '.join(self.differs)}.")
        blocks = [
            "# Speed",
            *intro,
            *self.notes,
            *(f"**{sentence}**" for sentence in self.sentences()),
            self._speed(points),
            "## Latency\n\nMilliseconds, p50 / p90 / p99. Between messages: a message of a stream holds all tokens of a step.",
            _latency(points),
        ]
        if any(point.acceptance for point in points):
            blocks += ["## Acceptance", *self._acceptance(points)]
        if any(point.verification for point in points):
            blocks += ["## Adaptive verification", *_verification(points)]
        return "\n\n".join(blocks) + "\n"

    def _speed(self, points: Sequence[Point]) -> str:
        rows = []
        for point in points:
            ratio = ratios_of(self.points, point.arm).get(point.concurrency)
            rows.append(
                [
                    ARMS[point.arm],
                    point.concurrency,
                    point.requests,
                    f"{point.output_tokens_per_s:.1f}",
                    "" if ratio is None else f"{ratio:.2f} ×",
                    f"{point.user_tokens_per_s:.1f}",
                    f"{point.startup_s:.1f}",
                ]
            )
        return tabulate(
            rows,
            [
                *("arm", "concurrency", "requests", "output tokens/s", "against off"),
                *("tokens/s a user", "start-up s"),
            ],
            tablefmt="github",
            disable_numparse=True,
        )

    def _acceptance(self, points: Sequence[Point]) -> list[str]:
        rows = []
        for point in points:
            if point.acceptance is None:
                continue
            rows.append(_row(point, "all", point.acceptance))
            for kind, acceptance in point.acceptance_by_kind.items():
                rows.append(_row(point, f"{kind} alone", acceptance))
        width = max(map(len, rows))
        titles = ["arm", "concurrency", "prompts", "tokens a step"]
        positions = [f"{i}" for i in range(1, width - len(titles) + 1)]
        text = "Tokens a step, the target's own included, and how often the draft is kept up to each position."
        if not self.fit_for_acceptance:
            text = f"Unfit for acceptance figures: the prompts are random.\n\n{text}"
        table = tabulate(
            [[*row, *[""] * (width - len(row))] for row in rows],
            [*titles, *positions],
            tablefmt="github",
            disable_numparse=True,
        )
        return [text, table]


def _verification(points: Sequence[Point]) -> list[str]:
    rows = [
        [
            ARMS[point.arm],
            point.concurrency,
            f"{point.verification.admitted:.2f}",
            *(
                f"{expected:.2f} / {kept:.2f}"
                for expected, kept in zip(
                    point.verification.expected, point.verification.kept, strict=True
                )
            ),
        ]
        for point in points
        if point.verification is not None
    ]
    positions = range(1, max(map(len, rows)) - 2)
    text = "Drafts verified, as a share of those drafted; of these by position, the share expected to be kept / kept."
    titles = ["arm", "concurrency", "verified", *map(str, positions)]
    table = tabulate(rows, titles, tablefmt="github", disable_numparse=True)
    return [text, table]


def _row(point: Point, prompts: str, acceptance: Acceptance) -> list[str]:
    return [
        ARMS[point.arm],
        str(point.concurrency),
        prompts,
        f"{acceptance.length:.2f}",
        *(f"{rate:.2f}" for rate in acceptance.by_position),
    ]


def _latency(points: Sequence[Point]) -> str:
    rows = [
        [
            ARMS[point.arm],
            point.concurrency,
            *(
                " / ".join(f"{value:.1f}" for value in times.values())
                for times in (
                    point.ttft_ms,
                    point.inter_token_ms,
                    point.time_per_token_ms,
                )
            ),
        ]
        for point in points
    ]
    return tabulate(
        rows,
        ["arm", "concurrency", "first token", "between messages", "a token"],
        tablefmt="github",
        disable_numparse=True,
    )


def ratios_of(points: Sequence[Point], arm: str) -> dict[int, float]:
    """Output tokens a second of a draft, as a multiple of those without, by concurrency in rising order."""
    speed = {(p.arm, p.concurrency): p.output_tokens_per_s for p in points}
    return {
        users: speed[arm, users] / speed["off", users]
        for users in sorted({p.concurrency for p in points})
        if arm != "off" and (arm, users) in speed and ("off", users) in speed
    }


def verdict(draft: str, ratios: Mapping[int, float]) -> str:
    """One sentence on where a draft pays.

    Args:
        draft: its name.
        ratios: speed as a multiple of that without a draft, by concurrency in rising order; not empty.
    """
    figures = ", ".join(f"{ratio:.2f} × at {users}" for users, ratio in ratios.items())
    pays = [users for users, ratio in ratios.items() if ratio >= 1]
    costs = [users for users, ratio in ratios.items() if ratio < 1]
    if not costs:
        said = f"{draft} pays at every measured concurrency"
    elif not pays:
        said = f"{draft} pays at no measured concurrency"
    elif max(pays) < min(costs):
        said = f"{draft} stops paying at concurrency {min(costs)}"
    else:
        said = f"{draft} pays at concurrency {_listed(pays)} and not at {_listed(costs)}, so no one concurrency divides them"
    near = [users for users, ratio in ratios.items() if abs(ratio - 1) < NOISE]
    doubt = f"; at {_listed(near)} the difference may be noise" if near else ""
    return f"{said}: {figures}{doubt}."


def write_report(report: Report, out: Path) -> None:
    """Write `bench.md`, `bench.json` and `bench.png` into `out`, which exists."""
    (out / "bench.md").write_text(report.markdown())
    (out / "bench.json").write_text(json.dumps(report.json(), indent=1) + "\n")
    plot_speed(
        report.points, out / "bench.png", title=f"{report.model}, {report.preset}"
    )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
