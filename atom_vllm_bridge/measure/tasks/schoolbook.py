"""The problems of the schoolbook tasks, as lm-eval takes them."""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset

from atom_vllm_bridge.measure.tasks import FOLDER, QUESTIONS


def load(shots: str, folder: str | None = None, **_: Any) -> dict[str, Dataset]:
    """The questions and the worked examples.

    Args:
        shots: file of the worked examples.
        folder: where both files lie; beside this one unless given.

    Raises:
        OSError: a file cannot be read.
        ValueError: it is not JSON lines.
    """
    place = Path(folder) if folder else FOLDER
    return {"test": _read(place / QUESTIONS), "shots": _read(place / shots)}


def _read(path: Path) -> Dataset:
    with path.open(encoding="utf-8") as lines:
        return Dataset.from_list([json.loads(line) for line in lines])
