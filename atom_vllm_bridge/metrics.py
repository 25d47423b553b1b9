"""Prometheus series of the bridge, on /metrics beside vLLM's.

Workers know what there is to count, the API server is asked for it, and no hook of vLLM's carries a plugin's numbers from
one to the other. So each process keeps its own values in a file, in the format of prometheus_client's multiprocess mode,
and whoever answers /metrics adds up the files of one folder. With several API servers that is the folder of vLLM's own
multiprocess mode; otherwise `offer` makes one when the configuration is made, and processes started from there find it in
their environment.

What nobody can feed has no series: each appears once its first value is written. `python -m atom_vllm_bridge.metrics`
prints the page `docs/metrics.md`.
"""

import logging
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector

from atom_vllm_bridge.patches.registry import DECLARED, load

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch

logger = logging.getLogger("vllm.atom_vllm_bridge")

# Not a setting: how the processes of one server find each other.
FOLDER = "_ATOM_BRIDGE_METRICS"
VLLMS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"


@dataclass(frozen=True)
class Series:
    """One series.

    Attributes:
        name: without the `_total` that a counter's sample carries.
        kind: "counter" or "gauge".
        labels: their names.
        about: what it counts.
        present: when there is one.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    about: str
    present: str

    @property
    def sample(self) -> str:
        return f"{self.name}_total" if self.kind == "counter" else self.name


OF_ENGINE = ("model_name", "engine")

PREFIX_HITS = Series(
    "atom_bridge:prefix_hit_tokens",
    "counter",
    OF_ENGINE,
    "Tokens that requests found in the prefix cache when they were admitted, or admitted again after a preemption.",
    "with prefix caching",
)
ROLLED_BACK = Series(
    "atom_bridge:rolled_back_tokens",
    "counter",
    OF_ENGINE,
    "Tokens of these by which requests were set back, since part of their state is not in the prefix cache.",
    "with `state_layout` `ring`",
)
REPLAYED = Series(
    "atom_bridge:replayed_tokens",
    "counter",
    OF_ENGINE,
    "Tokens of these that have been computed again; fewer than were rolled back where a request ended before.",
    "with `state_layout` `ring`",
)
RING_SLOTS = Series(
    "atom_bridge:ring_slots_in_use",
    "gauge",
    OF_ENGINE,
    "Requests that hold a slot in the ring of state.",
    "with `state_layout` `ring`",
)
BY_POSITION = (*OF_ENGINE, "position")
ADAPTIVE = "with `enable_adaptive_verification`"
DRAFT_BUDGET = Series(
    "atom_bridge:draft_budget_tokens",
    "gauge",
    OF_ENGINE,
    "Draft tokens that the last step verified, of all requests together.",
    ADAPTIVE,
)
OFFERED = Series(
    "atom_bridge:offered_draft_tokens",
    "counter",
    BY_POSITION,
    "Draft tokens that could have been verified.",
    ADAPTIVE,
)
ADMITTED = Series(
    "atom_bridge:admitted_draft_tokens",
    "counter",
    BY_POSITION,
    "Draft tokens of these that the budget let through.",
    ADAPTIVE,
)
EXPECTED = Series(
    "atom_bridge:expected_draft_tokens",
    "counter",
    BY_POSITION,
    "Draft tokens of these that the confidence head (or the online estimate) expected to be kept: a sum of probabilities.",
    ADAPTIVE,
)
KEPT = Series(
    "atom_bridge:kept_draft_tokens",
    "counter",
    BY_POSITION,
    "Draft tokens of these that the target kept; the calibration error is |expected − kept| ÷ admitted.",
    ADAPTIVE,
)
PATCH_STATE = Series(
    "atom_bridge:patch_state",
    "gauge",
    ("patch", "state"),
    "1 for the state of each patch in the processes that asked for it.",
    "always",
)
SERIES = (
    *(PREFIX_HITS, ROLLED_BACK, REPLAYED, RING_SLOTS),
    *(DRAFT_BUDGET, OFFERED, ADMITTED, EXPECTED, KEPT),
    PATCH_STATE,
)


class Values:
    """This process's values, in a folder that another process reads."""

    def __init__(self, folder: str) -> None:
        """Raises OSError if `folder` is not there."""
        # prometheus_client reads kind, way of merging and process off a file's name. Where it keeps files of its own in the
        # folder, theirs have a bare number.
        process = f"atom{os.getpid()}.db"
        self._files = {
            "counter": MmapedDict(f"{folder}/counter_{process}"),
            "gauge": MmapedDict(f"{folder}/gauge_max_{process}"),
        }

    def add(self, series: Series, amount: float, labels: tuple[str, ...]) -> None:
        """Add to a counter; 0 makes it appear."""
        file, key = self._files[series.kind], self._key(series, labels)
        file.write_value(key, file.read_value(key)[0] + amount, time.time())

    def set(self, series: Series, value: float, labels: tuple[str, ...]) -> None:
        """Set a gauge."""
        self._files[series.kind].write_value(
            self._key(series, labels), value, time.time()
        )

    @staticmethod
    @cache
    def _key(series: Series, labels: tuple[str, ...]) -> str:
        return mmap_key(
            series.name,
            series.sample,
            list(series.labels),
            list(labels),
            series.about,
        )


# Of this process. A process that was forked has its own number, and so its own files.
_values: dict[tuple[int, str], Values] = {}
_folders: list[tempfile.TemporaryDirectory] = []
_answered: set[str] = set()


def values() -> Values | None:
    """This process's values; None where no folder is shared with whoever answers /metrics, as on another host."""
    folder = os.environ.get(VLLMS_FOLDER) or os.environ.get(FOLDER, "")
    if not os.path.isdir(folder):
        return None
    key = (os.getpid(), folder)
    if key not in _values:
        _values[key] = Values(folder)
    return _values[key]


def offer() -> None:
    """Have this process's /metrics, if it is asked for them, answer with the values of every process started from it.

    Called where a configuration is made, which is in an API server, or in the process that starts several of them.
    """
    if not os.environ.get(VLLMS_FOLDER):
        folder = os.environ.get(FOLDER)
        # What another program left in the environment is no concern of this server's.
        inherited = multiprocessing.parent_process() is not None or _folders
        if not folder or not inherited or not os.path.isdir(folder):
            _folders.append(tempfile.TemporaryDirectory(prefix="atom-bridge-metrics-"))
            folder = os.environ[FOLDER] = _folders[-1].name
        if folder not in _answered:
            MultiProcessCollector(REGISTRY, folder)
            _answered.add(folder)
    show_patches()


def show_patches() -> None:
    """Write the states of the patches that this process has asked for."""
    shown = values()
    patches = load()
    states = {patch.id: patches.state(patch.id).name for patch in patches}
    for id, state in states.items():
        if shown is not None and state != DECLARED:
            shown.set(PATCH_STATE, 1, (id, state))


class Requests:
    """Counts, on the worker of an engine, how its requests begin and how much of them is computed again."""

    def __init__(self, vllm_config: "VllmConfig", cache: "KVCacheConfig") -> None:
        """Show the series that this engine can feed, at 0."""
        from vllm.v1.kv_cache_interface import CircularBufferSpec

        from atom_vllm_bridge.kv_cache import replayed_tokens, spec_of_group

        parallel = vllm_config.parallel_config
        # Every rank of an engine sees the same requests.
        first = parallel.rank % parallel.world_size == 0
        self._values = values() if first else None
        self._labels = (
            vllm_config.model_config.served_model_name,
            str(parallel.data_parallel_index),
        )
        specs = [spec_of_group(group) for group in cache.kv_cache_groups]
        self._window = replayed_tokens(cache)
        self._has_ring = any(isinstance(spec, CircularBufferSpec) for spec in specs)
        self._held: set[str] = set()
        self._to_replay: dict[str, int] = {}
        if vllm_config.cache_config.enable_prefix_caching:
            self._add(PREFIX_HITS, 0)
        if self._window:
            self._add(ROLLED_BACK, 0)
            self._add(REPLAYED, 0)
        self._show_ring()

    def added(self, request: "NewRequestData") -> None:
        """A request is admitted, or admitted again."""
        start = request.num_computed_tokens
        # vLLM drops a hit that is not longer than the window, and sets any other back by all of it.
        rolled_back = self._window if request.replay_start else 0
        if start:
            self._add(PREFIX_HITS, start + rolled_back)
        if rolled_back:
            self._add(ROLLED_BACK, rolled_back)
            self._to_replay[request.req_id] = rolled_back
        self._held.add(request.req_id)
        self._show_ring()

    def removed(self, id: str) -> None:
        """A request has ended, or was preempted."""
        self._to_replay.pop(id, None)
        self._held.discard(id)
        self._show_ring()

    def stepped(self, batch: "InputBatch") -> None:
        """A batch is about to be computed."""
        if not self._to_replay:
            return
        for id, tokens in zip(batch.req_ids, batch.num_scheduled_tokens, strict=True):
            left = self._to_replay.get(id, 0)
            done = min(left, int(tokens))
            if done:
                self._add(REPLAYED, done)
                self._to_replay[id] = left - done
            if left == done:
                self._to_replay.pop(id, None)

    def verified(
        self, sums: Sequence[Sequence[float]], budget: int | None = None
    ) -> None:
        """Drafts were verified.

        Args:
            sums: by position: offered, admitted, expected to be kept, kept.
            budget: draft tokens of the last step.
        """
        if self._values is None:
            return
        for series, amounts in zip(
            (OFFERED, ADMITTED, EXPECTED, KEPT), sums, strict=True
        ):
            for position, amount in enumerate(amounts):
                self._values.add(series, amount, (*self._labels, str(position)))
        if budget is not None:
            self._values.set(DRAFT_BUDGET, budget, self._labels)

    def _add(self, series: Series, amount: int) -> None:
        if self._values is not None:
            self._values.add(series, amount, self._labels)

    def _show_ring(self) -> None:
        if self._has_ring and self._values is not None:
            self._values.set(RING_SLOTS, len(self._held), self._labels)


def metrics_page() -> str:
    """The text of `docs/metrics.md`: one row a series."""
    rows = "\n".join(
        f"| `{series.sample}` | {series.kind} | {', '.join(map(_code, series.labels))} | {series.present} "
        f"| {_cell(series.about)} |"
        for series in SERIES
    )
    return _PAGE.format(rows=rows)


def _cell(text: str) -> str:
    """A bar would end the cell."""
    return text.replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{text}`"


_PAGE = """\
# Metrics

A server of DeepSeek-V4 answers `/metrics` with these series beside vLLM's. Other models have none of them.

| series | kind | labels | present | meaning |
|---|---|---|---|---|
{rows}

- `model_name` and `engine` are those of vLLM's series. Values count from the start of the server.
- vLLM's `vllm:prefix_cache_hits_total` leaves out requests that resume after a preemption; here they count. Both count a
  hit when the request is admitted, and as long as it was found: what is rolled back is part of it.
- Workers write what they count into a folder on their host, which the API server reads. Engines on another host than the
  API server are not counted; `--disable-log-stats` changes nothing here.
- The states are those of [patches](patches.md).

This page is made from the code: `make docs` writes it.
"""


if __name__ == "__main__":
    print(metrics_page(), end="")
