"""How fast a server is, without a draft and with one: `vllm bench serve` against a cold server for every point.

A point is an arm (off, DSpark or MTP) at a concurrency. It counts only if client and server agree about every token, and
no request lost its blocks on the way.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atom_vllm_bridge.measure.accuracy import ARMS as DRAFTS
from atom_vllm_bridge.measure.accuracy import Arm as Draft
from atom_vllm_bridge.measure.server import Counters, LiveServer, Server
from atom_vllm_bridge.measure.workload import (
    KINDS,
    MIXED,
    PROMPTS,
    WARMUP_REQUESTS,
    Workload,
    write_prompts,
)

# The arms, and how a reader knows them.
ARMS = {
    "off": "off",
    "dspark": "DSpark",
    "dspark-7": "DSpark K = 7",
    "adaptive-7": "adaptive K ≤ 7",
    "mtp": "MTP",
}
PERCENTILES = (50, 90, 99)
# The server counts a step after it has answered.
SETTLE_SECONDS = 5


class BenchError(RuntimeError):
    """A point that does not count; one line that says what to do."""


@dataclass(frozen=True)
class Arm:
    """A server to compare: its checkpoint, and the options that choose its draft.

    Attributes:
        name: one of ARMS.
        model: directory or name of the checkpoint.
        flags: of `vllm serve`.
    """

    name: str
    model: str
    flags: tuple[str, ...] = ()


def arms_of(
    names: Sequence[str], model: str, mtp_model: str | None, draft_tokens: int | None
) -> tuple[list[Arm], list[str]]:
    """The arms, and a sentence for each that is left out or is not what its name alone says.

    Args:
        names: of ARMS.
        model: the checkpoint without a draft and with DSpark.
        mtp_model: the same target with an MTP stage: both drafts are called mtp.*, so they cannot share a checkpoint.
        draft_tokens: K of the arm dspark; None leaves it as the draft was trained.
    """
    notes = []
    if draft_tokens is not None:
        notes.append(f"DSpark drafts {draft_tokens} tokens a step.")
    drafts = DRAFTS | {"dspark": Draft("dspark", draft_tokens)}
    every = {
        name: Arm(name, model, tuple(drafts[name].flags))
        for name in ("off", "dspark", "dspark-7", "adaptive-7")
    }
    if mtp_model is not None:
        every["mtp"] = Arm("mtp", mtp_model, tuple(drafts["mtp"].flags))
        notes.append(f"MTP drafts 1 token a step, from `{mtp_model}`.")
    elif "mtp" in names:
        notes.append(
            "MTP is left out: --mtp-model names no checkpoint with an MTP stage."
        )
    return [every[name] for name in names if name in every], notes


@dataclass(frozen=True)
class Acceptance:
    """How much of a draft the target kept.

    Attributes:
        length: tokens a step, the target's own included.
        by_position: how often the draft was kept up to each position, [K].
    """

    length: float
    by_position: tuple[float, ...]


@dataclass(frozen=True)
class Verification:
    """What an adaptive budget did.

    Attributes:
        admitted: draft tokens that it let through, as a share of those drafted.
        kept: of these, by position, the share that the target kept, [K]; and so for `expected`, what confidence said.
    """

    admitted: float
    expected: tuple[float, ...]
    kept: tuple[float, ...]


@dataclass(frozen=True)
class Point:
    """One arm at one concurrency. Percentiles by name (`p50`), in milliseconds.

    Attributes:
        arm: one of ARMS.
        concurrency: requests at once.
        requests: those measured, warm-ups not counted.
        startup_s: seconds from the start of the server to its first healthy answer.
        duration_s: seconds of the measured part.
        prompt_tokens: of the measured requests.
        output_tokens: of the measured requests.
        output_tokens_per_s: all users together.
        user_tokens_per_s: what the median request gets after its first token.
        ttft_ms: time to the first token.
        inter_token_ms: between two messages of a stream; with a draft, a message holds all tokens of a step.
        time_per_token_ms: of a request, its first token not counted.
        prefix_hits: prompt tokens, warm-ups included, that the prefix cache held, as a share.
        acceptance: None without a draft.
        acceptance_by_kind: prose and problems, each asked alone; empty where it was not measured.
        verification: None where every draft is verified.
    """

    arm: str
    concurrency: int
    requests: int
    startup_s: float
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    user_tokens_per_s: float
    ttft_ms: dict[str, float]
    inter_token_ms: dict[str, float]
    time_per_token_ms: dict[str, float]
    prefix_hits: float
    acceptance: Acceptance | None
    acceptance_by_kind: dict[str, Acceptance] = field(default_factory=dict)
    verification: Verification | None = None


def measure(
    arms: Sequence[Arm],
    workload: Workload,
    out: Path,
    *,
    serve_flags: Sequence[str] = (),
    prompts: Path = PROMPTS,
) -> Iterator[Point]:
    """Measure every arm at every concurrency, and yield each point when it is there.

    The arms of a concurrency follow one another, so that a machine that slows down in time slows all of them.

    Args:
        arms: to compare.
        workload: what to ask.
        out: folder for logs of the servers and the client's own results; made if need be.
        serve_flags: options of `vllm serve`, for every arm.
        prompts: folder of `prose.jsonl` and `problems.jsonl`.

    Raises:
        BenchError: a point that does not count.
        ServerError: a server that does not start.
    """
    out.mkdir(parents=True, exist_ok=True)
    for concurrency in workload.concurrency:
        for arm in arms:
            log = out / f"{arm.name}-{concurrency}.server.log"
            with Server(arm.model, [*serve_flags, *arm.flags], log=log) as server:
                client = Client(server, arm, concurrency, workload, out, prompts)
                for _ in range(workload.warmup_runs):
                    client.run("warmup", MIXED, WARMUP_REQUESTS)
                point = client.point(
                    server.startup_s,
                    by_kind=concurrency == max(workload.concurrency),
                )
            yield point


@dataclass(frozen=True)
class Client:
    """`vllm bench serve` against one server, for one point.

    Attributes:
        server: ready, and asked by nobody else.
        arm: what it serves.
        concurrency: requests at once.
        workload: what to ask.
        out: folder for results and logs; exists.
        prompts: folder of `prose.jsonl` and `problems.jsonl`.
    """

    server: LiveServer
    arm: Arm
    concurrency: int
    workload: Workload
    out: Path
    prompts: Path

    @property
    def where(self) -> str:
        return f"{self.arm.name} at concurrency {self.concurrency}"

    def point(self, startup_s: float, *, by_kind: bool) -> Point:
        """Measure; `by_kind` then asks prose and problems alone, if there is an acceptance to tell apart.

        Raises:
            BenchError: client and server disagree, a request failed or was preempted, or a draft arm drafted nothing.
        """
        requests = self.workload.requests(self.concurrency)
        warmups = self.workload.warmups(self.concurrency)
        before = self.server.metrics()
        result = self.run("measured", MIXED, requests, warmups)
        counted = self._checked(result, before, warmups)
        kinds: dict[str, Acceptance] = {}
        acceptance = acceptance_of(result)
        if acceptance is None and self.arm.flags:
            raise BenchError(
                f"{self.where}: nothing was drafted; look for `speculation` in the server's log in {self.out}"
            )
        if by_kind and acceptance is not None and self.workload.fit_for_acceptance:
            for kind in KINDS:
                alone = acceptance_of(self.run(kind, kind, max(1, requests // 2)))
                if alone is not None:
                    kinds[kind] = alone
        return point_of(
            self.arm.name, self.concurrency, startup_s, result, counted, kinds
        )

    def run(
        self, name: str, kind: str, requests: int, warmups: int = 0
    ) -> dict[str, Any]:
        """One run of the client; its own result, with an entry for each request.

        Raises:
            BenchError: the client ended, or a request failed.
        """
        prompts = None
        if self.workload.random_input_len is None:
            prompts = write_prompts(kind, requests, self.out, self.prompts)
        result = self.out / f"{self.arm.name}-{self.concurrency}.{name}.json"
        flags = self.workload.client_flags(self.concurrency, requests, prompts, warmups)
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
            *("--base-url", self.server.url, "--model", self.server.model),
            *("--tokenizer", self.arm.model, *flags, "--disable-tqdm"),
            *("--percentile-metrics", "ttft,tpot,itl"),
            *("--metric-percentiles", ",".join(map(str, PERCENTILES))),
            *("--save-result", "--save-detailed"),
            *("--result-dir", str(result.parent), "--result-filename", result.name),
        ]
        log = result.with_suffix(".log")
        environment = {"VLLM_NO_USAGE_STATS": "1"} | dict(os.environ)
        if Path(self.arm.model).is_dir():
            # The tokenizer lies beside the weights; no hub is asked for it.
            environment["HF_HUB_OFFLINE"] = "1"
        with log.open("wb") as output:
            done = subprocess.run(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        if done.returncode:
            said = log.read_text(errors="replace")
            errors = re.findall(r"^[\w.]*(?:Error|error|Exception)\b.*", said, re.M)
            why = errors[-1] if errors else _last_line(said)
            raise BenchError(
                f"{self.where}: `vllm bench serve` ended with {done.returncode} ({why}); {log} has the whole"
            )
        answered = json.loads(result.read_text())
        if answered["failed"]:
            reason = next(error for error in answered["errors"] if error)
            raise BenchError(
                f"{self.where}: {answered['failed']} of {requests} requests failed ({_last_line(reason)}); look into the server's log in {self.out}"
            )
        return answered

    def _checked(
        self, result: Mapping[str, Any], before: Counters, warmups: int
    ) -> Counters:
        """What the server counted meanwhile, once it agrees with the client."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            counted = self.server.metrics() - before
            fault = fault_of(result, counted, warmups)
            if fault is None:
                return counted
            if time.monotonic() > deadline:
                raise BenchError(f"{self.where}: {fault}")
            time.sleep(0.5)


def fault_of(result: Mapping[str, Any], counted: Counters, warmups: int) -> str | None:
    """Why a point does not count, and what to do; None if it counts.

    Args:
        result: the client's, with an entry for each request.
        counted: by the server, from before the warm-ups.
        warmups: repetitions of the first request before the others. They end as it does, because only answers of a fixed
            length are warmed up like this.
    """
    if counted.preemptions:
        return f"{counted.preemptions:.0f} preemptions: the KV cache is too small for so many requests; raise --kv-cache-memory-bytes after `--`, or lower --concurrency"
    tokens = {
        "output": (result["output_lens"], counted.generation_tokens),
        "prompt": (result["input_lens"], counted.prompt_tokens),
    }
    for kind, (lengths, on_the_server) in tokens.items():
        on_the_client = sum(lengths) + warmups * lengths[0]
        if on_the_client != on_the_server:
            return f"the client counts {on_the_client} {kind} tokens and the server {on_the_server:.0f}: somebody else asks this server, or an answer was cut; run it again with nothing beside it"
    return None


def acceptance_of(result: Mapping[str, Any]) -> Acceptance | None:
    """From the server's counters, which the client reads after the warm-ups and at its end; None if nothing was drafted."""
    if "spec_decode_acceptance_length" not in result:
        return None
    return Acceptance(
        result["spec_decode_acceptance_length"],
        tuple(result["spec_decode_per_position_acceptance_rates"]),
    )


def verification_of(counted: Counters) -> Verification | None:
    """From the bridge's counters, warm-ups included; None without them."""
    rate = counted.admitted_rate
    if rate is None:
        return None
    admitted = counted.verified["admitted"]
    expected, kept = (
        tuple(
            part / of if of else 0.0
            for part, of in zip(counted.verified[name], admitted, strict=True)
        )
        for name in ("expected", "kept")
    )
    return Verification(rate, expected, kept)


def point_of(
    arm: str,
    concurrency: int,
    startup_s: float,
    result: Mapping[str, Any],
    counted: Counters,
    by_kind: Mapping[str, Acceptance],
) -> Point:
    """A point from the client's result and the server's counters."""

    def percentiles(name: str) -> dict[str, float]:
        return {f"p{p}": result[f"p{p}_{name}_ms"] for p in PERCENTILES}

    queries = counted.prefix_queries
    return Point(
        arm=arm,
        concurrency=concurrency,
        requests=result["completed"],
        startup_s=startup_s,
        duration_s=result["duration"],
        prompt_tokens=result["total_input_tokens"],
        output_tokens=result["total_output_tokens"],
        output_tokens_per_s=result["output_throughput"],
        user_tokens_per_s=1000 / result["p50_tpot_ms"],
        ttft_ms=percentiles("ttft"),
        inter_token_ms=percentiles("itl"),
        time_per_token_ms=percentiles("tpot"),
        prefix_hits=counted.prefix_hits / queries if queries else 0.0,
        acceptance=acceptance_of(result),
        acceptance_by_kind=dict(by_kind),
        verification=verification_of(counted),
    )


def _last_line(text: str) -> str:
    return text.strip().rsplit("\n", 1)[-1]
