"""Speed against concurrency, as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from atom_vllm_bridge.measure.speed import ARMS, Point

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKS = dict(zip(ARMS, "osDX^", strict=True))


def plot_speed(points: Sequence[Point], path: Path, title: str) -> None:
    """Draw output tokens a second of all users, and of one, with a line for each arm; write a PNG.
    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure_of(points, title).savefig(path, dpi=120)


def figure_of(points: Sequence[Point], title: str) -> "Figure":
    """The figure itself: two axes, one line an arm on each."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    figure = Figure(figsize=(9, 4), layout="constrained")
    figure.suptitle(title)
    measures = {
        "output tokens/s": lambda point: point.output_tokens_per_s,
        "tokens/s a user": lambda point: point.user_tokens_per_s,
    }
    users = sorted({point.concurrency for point in points})
    for axes, (label, value) in zip(
        figure.subplots(1, 2), measures.items(), strict=True
    ):
        for arm in ARMS:
            line = sorted(
                (point.concurrency, value(point))
                for point in points
                if point.arm == arm
            )
            if line:
                axes.plot(*zip(*line, strict=True), marker=MARKS[arm], label=ARMS[arm])
        axes.set(xlabel="concurrency", ylabel=label)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(users))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    return figure
