"""The table in the log of a start, read back."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

LOGGER = logging.getLogger("vllm.atom_vllm_bridge")


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += record.getMessage().splitlines()


@contextmanager
def startup_table() -> Iterator[dict[str, str]]:
    """What the engines started within say of themselves: filled on exit, {what: value}."""
    kept, level = _Kept(), LOGGER.level
    table: dict[str, str] = {}
    LOGGER.addHandler(kept)
    LOGGER.setLevel(logging.INFO)
    try:
        yield table
    finally:
        LOGGER.setLevel(level)
        LOGGER.removeHandler(kept)
    first = kept.lines.index("DeepSeek-V4:") + 1
    for line in kept.lines[first:]:
        what, *value = re.split(r"\s{2,}", line, maxsplit=1)
        if value:
            table[what] = value[0]
