"""Loss curves as pictures."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt


def draw(log: Path) -> Path:
    """One panel a figure of a phase's log; returns the PNG beside it."""
    with log.open() as lines:
        points = [json.loads(line) for line in lines]
    names = [name for name in points[0] if name != "step"]
    figure, panels = plt.subplots(
        1, len(names), figsize=(3.2 * len(names), 2.6), layout="constrained"
    )
    steps = [point["step"] for point in points]
    for panel, name in zip(panels, names, strict=True):
        panel.plot(steps, [point[name] for point in points], linewidth=1)
        panel.set_title(name)
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
    figure.suptitle(log.stem)
    picture = log.with_suffix(".png")
    figure.savefig(picture, dpi=80)
    plt.close(figure)
    return picture
