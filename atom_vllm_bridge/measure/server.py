"""A server to measure: one that runs already, or a `vllm serve` of its own."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

LINES_OF_THE_LOG = 30
GRACE_SECONDS = 20


class ServerError(RuntimeError):
    """A server that did not start, ended, or does not answer as one of vLLM's."""


@dataclass(frozen=True)
class Counters:
    """What a server has counted since it started, or between two times (`later - earlier`).

    Attributes:
        prompt_tokens: whether computed or found in the prefix cache.
        generation_tokens: those that requests got.
        prefix_queries: prompt tokens that were looked up in the prefix cache.
        prefix_hits: those that were found.
        preemptions: requests whose blocks were taken from them.
        drafts: steps of one request with a draft.
        drafted: draft tokens, all positions.
        accepted: draft tokens that the target kept, all positions.
        accepted_by_position: the same, [K]; empty without speculation.
        verified: under adaptive verification, by "offered", "admitted", "expected" and "kept": draft tokens [K]; else empty.
    """

    prompt_tokens: float
    generation_tokens: float
    prefix_queries: float
    prefix_hits: float
    preemptions: float
    drafts: float
    drafted: float
    accepted: float
    accepted_by_position: tuple[float, ...]
    verified: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def __sub__(self, earlier: "Counters") -> "Counters":
        return Counters(
            **{
                name: getattr(self, name) - getattr(earlier, name)
                for name in NAMES.values()
            },
            accepted_by_position=_less(
                self.accepted_by_position, earlier.accepted_by_position
            ),
            verified={
                name: _less(sums, earlier.verified.get(name, ()))
                for name, sums in self.verified.items()
            },
        )

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a step, the target's own included; None where nothing was drafted."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def acceptance_rate(self) -> float | None:
        """Draft tokens that were kept, of those drafted; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """How often the draft was kept up to each position, [K]."""
        return tuple(n / self.drafts for n in self.accepted_by_position if self.drafts)

    @property
    def admitted_rate(self) -> float | None:
        """Draft tokens that a budget let through, of those offered; None without adaptive verification."""
        offered = sum(self.verified.get("offered", ()))
        return sum(self.verified["admitted"]) / offered if offered else None

    @property
    def calibration_error(self) -> tuple[float, ...]:
        """By position, how far the expected share of admitted drafts is from the share that was kept; where any was."""
        columns = (
            self.verified.get(name, ()) for name in ("admitted", "expected", "kept")
        )
        return tuple(
            abs(expected - kept) / admitted
            for admitted, expected, kept in zip(*columns, strict=True)
            if admitted
        )


# vLLM's names, and the fields that hold them.
NAMES = {
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "drafted",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
}
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
# The bridge's own, by the names of `Counters.verified`.
VERIFIED = {
    f"atom_bridge:{name}_draft_tokens_total": name
    for name in ("offered", "admitted", "expected", "kept")
}


def _less(late: Sequence[float], early: Sequence[float]) -> tuple[float, ...]:
    """Position by position; what a server has not counted is 0."""
    return tuple(a - b for a, b in zip_longest(late, early, fillvalue=0.0))


def counted(page: str) -> Counters:
    """Read the text of /metrics; the engines of a data-parallel server are added up."""
    found: defaultdict[str, float] = defaultdict(float)
    positions: defaultdict[str, defaultdict[int, float]] = defaultdict(
        lambda: defaultdict(float)
    )
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in NAMES:
                found[NAMES[sample.name]] += sample.value
            elif sample.name == BY_POSITION or sample.name in VERIFIED:
                position = int(sample.labels["position"])
                positions[sample.name][position] += sample.value
    rows = {
        name: tuple(sums[i] for i in sorted(sums)) for name, sums in positions.items()
    }
    return Counters(
        **{name: found[name] for name in NAMES.values()},
        accepted_by_position=rows.get(BY_POSITION, ()),
        verified={
            short: rows[name] for name, short in VERIFIED.items() if name in rows
        },
    )


class LiveServer:
    """A server of vLLM's that somebody else started and will stop.

    Attributes:
        url: without /v1 and without a slash at the end.
        model: the name that it serves; the first, if several.
        max_model_len: tokens, prompt and answer together.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = ""
        self.max_model_len = 0

    def __enter__(self) -> Self:
        self._ask_what_is_served()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave it running."""

    def check(self) -> None:
        """Of somebody else's server only the answers are seen."""

    def metrics(self) -> Counters:
        """What it has counted since it started.

        Raises:
            ServerError: it does not answer.
        """
        return counted(self._get("/metrics"))

    def _ask_what_is_served(self) -> None:
        try:
            served = json.loads(self._get("/v1/models"))["data"][0]
            self.model, self.max_model_len = served["id"], served["max_model_len"]
        except (ValueError, LookupError, TypeError) as error:
            raise ServerError(
                f"{self.url}/v1/models does not answer as vLLM does ({error!r}). Name the URL of a `vllm serve`."
            ) from None

    def _get(self, path: str) -> str:
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
                return answer.read().decode()
        except (OSError, ValueError) as error:
            raise ServerError(
                f"{self.url}{path} does not answer: {error}. Is the server up?"
            ) from None


class Server(LiveServer):
    """A `vllm serve` of its own: started cold, waited for, stopped.

        with Server("checkpoints/tiny", ["--dtype", "float32"], log=Path("log")) as server:
            print(server.url, server.startup_s)

    Args:
        model: directory or name of the checkpoint.
        flags: of `vllm serve`, without host and port.
        log: file for what the server says; its folder exists.
        ready_s: seconds until it must answer.
        environment: added to this process's own.

    Attributes:
        startup_s: seconds from the start of the process to the first healthy answer.
    """

    def __init__(
        self,
        model: str,
        flags: Sequence[str] = (),
        *,
        log: Path,
        ready_s: float = 600,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        super().__init__(f"http://127.0.0.1:{port}")
        self.command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
        self.command += [model, "--host", "127.0.0.1", "--port", str(port), *flags]
        self.log, self.ready_s, self.startup_s = log, ready_s, 0.0
        self.environment = (
            {"VLLM_NO_USAGE_STATS": "1"} | dict(os.environ) | dict(environment or {})
        )

    def __enter__(self) -> Self:
        """Start it and wait.

        Raises:
            ServerError: it ended or was not ready in time; holds the end of its log.
        """
        start = time.monotonic()
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # vLLM's engines are processes of their own, and end with the group.
                start_new_session=True,
            )
        try:
            while not self._healthy():
                self.check()
                if time.monotonic() - start > self.ready_s:
                    raise self._failed(f"was not ready after {self.ready_s:.0f} s")
                time.sleep(0.5)
            # Another process may have taken the port meanwhile, and answers.
            self.check()
            self.startup_s = time.monotonic() - start
            self._ask_what_is_served()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def check(self) -> None:
        """Is it still there?

        Raises:
            ServerError: it ended.
        """
        status = self.process.poll()
        if status is not None:
            raise self._failed(f"ended with status {status}")

    def _healthy(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
        except OSError:  # refused until it listens, and 503 until the engine is up
            return False
        return True

    def _stop(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_SECONDS)
        # Whoever of the group is left, as after a stop during the start.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _failed(self, what: str) -> ServerError:
        lines = self.log.read_text(errors="replace").splitlines()
        return ServerError(
            "\n".join([*lines[-LINES_OF_THE_LOG:], f"The server {what}: {self.log}"])
        )
