"""Mixed traffic on a real server for as long as is asked for: no wrong answer, flat memory, nothing left behind.

    python benchmarks/soak.py --minutes 30
    python benchmarks/soak.py --minutes 3 -- --additional-config '{"atom": {"state_layout": "ring"}}'

Flags after `--` come last, and so count: rings need less room, and preempt in a smaller `--kv-cache-memory-bytes`.

The server has the checkpoint `schoolbook` with its DSpark draft, in float32, and a cache so small that requests are preempted.
Each client asks one thing after another: answers of several lengths to problems and to long prompts that share a beginning;
streams that it leaves in the middle; answers that end at a stop string; and requests that are to be refused. Every answer, a
left one as far as it came, is compared with that of the same prompt alone, before there was other traffic. A first differing
token where the two likeliest are within 1e-3 is a tie, and counted as such: sums are made in another order in company.

Ends with 1 if an answer is wrong, a request that should be refused is not (or ends otherwise), nothing was preempted, memory grew
by more than 5 % after the first sixth of the time, or the server still holds requests or blocks when all clients have gone.
"""

import http.client
import json
import random
import shlex
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import psutil
import typer
from prometheus_client.parser import text_string_to_metric_families

from atom_vllm_bridge.checkpoint.make import make
from atom_vllm_bridge.measure.server import Server

TOKENS = 96
TIE = 1e-3
GROWTH = 1.05
SECONDS_A_REQUEST = 300
FLAGS = (
    "--dtype float32 --max-model-len 2048 --max-num-seqs 16 --max-num-batched-tokens 256 --enable-prompt-tokens-details "
    """--kv-cache-memory-bytes 40M --speculative-config '{"method": "dspark"}'"""
)
REFUSED: tuple[dict[str, Any] | bytes, ...] = (
    b'{"model": ',
    {"prompt": [7] * 5000},
    {"prompt": []},
    {"prompt": "x", "max_tokens": -1},
    {"prompt": "x", "temperature": "hot"},
    {"prompt": "x", "logprobs": 10**6},
    {"prompt": "x", "model": "another"},
    {"prompt": "x", "structured_outputs": {"json": {"type": "nonsense"}}},
)


@dataclass(frozen=True)
class Known:
    """The greedy answer to a prompt, alone.

    Attributes:
        gaps: of each token, how far the second likeliest is behind, in nats.
        stop: a piece of the text, which ends it where it comes first.
    """

    prompt: str
    text: str
    tokens: list[int]
    gaps: list[float]
    stop: str


@dataclass
class Tally:
    """What all clients found."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, fault: str | None, tie: bool = False) -> None:
        with self.lock:
            self.counts[kind] += 1
            self.counts["ties"] += tie
            if fault:
                self.wrong.append(f"{kind}: {fault}")


class Client:
    """Asks one server."""

    def __init__(self, server: Server, seed: int) -> None:
        self._place, self._model = urlsplit(server.url).netloc, server.model
        self.random = random.Random(seed)

    def post(self, body: dict[str, Any] | bytes) -> http.client.HTTPResponse:
        """The answer, whose body is still to be read."""
        if isinstance(body, dict):
            body = json.dumps({"model": self._model, "temperature": 0} | body).encode()
        connection = http.client.HTTPConnection(self._place, timeout=SECONDS_A_REQUEST)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", body, headers)
        return connection.getresponse()

    def choice(self, **body: Any) -> dict[str, Any]:
        """The first choice of a completion.

        Raises:
            RuntimeError: another status than 200.
        """
        with self.post({"return_token_ids": True} | body) as answer:
            page = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {page[:300]!r}")
        return json.loads(page)["choices"][0]

    def learn(self, prompt: str) -> Known:
        """Ask it alone."""
        found = self.choice(prompt=prompt, max_tokens=TOKENS, logprobs=2)
        best = [sorted(top.values()) for top in found["logprobs"]["top_logprobs"]]
        words = [word for word in found["text"].split() if len(word) > 1]
        return Known(
            prompt=prompt,
            text=found["text"],
            tokens=found["token_ids"],
            gaps=[top[-1] - top[-2] if len(top) > 1 else 9.0 for top in best],
            stop=words[len(words) // 2] if words else "",
        )

    def answered(self, known: Known, tally: Tally) -> None:
        count = self.random.choice((3, 17, TOKENS))
        found = self.choice(prompt=known.prompt, max_tokens=count)["token_ids"]
        tally.add("answers", *compared(found, known, len(known.tokens[:count])))

    def stopped(self, known: Known, tally: Tally) -> None:
        if not known.stop:
            return
        found = self.choice(prompt=known.prompt, max_tokens=TOKENS, stop=[known.stop])
        want = known.text.partition(known.stop)[0]
        fault, tie = None, False
        if found["text"] != want:
            fault, tie = compared(found["token_ids"], known, len(found["token_ids"]))
            if not tie:
                fault = f"{known.prompt[-40:]!r} gave {found['text']!r}, not {want!r}"
        tally.add("stop strings", fault, tie)

    def left(self, known: Known, tally: Tally) -> None:
        """A stream, as far as a few tokens, and then no longer read."""
        events, tokens = self.random.randint(0, 12), list[int]()
        body = {"prompt": known.prompt, "max_tokens": TOKENS, "stream": True}
        with self.post(body | {"return_token_ids": True}) as answer:
            if answer.status != 200:
                tally.add("aborts", f"status {answer.status}")
                return
            for line in answer:
                if events <= 0 or line.strip() == b"data: [DONE]":
                    break
                if line.startswith(b"data: "):
                    choices = json.loads(line.removeprefix(b"data: "))["choices"]
                    tokens += (choices[0].get("token_ids") or []) if choices else []
                    events -= 1
        tally.add("aborts", *compared(tokens, known, len(tokens)))

    def refused(self, known: Known, tally: Tally) -> None:
        body = self.random.choice(REFUSED)
        with self.post(body) as answer:
            answer.read()
        sound = 400 <= answer.status < 500
        tally.add(
            "bad requests",
            None if sound else f"{str(body)[:80]}: status {answer.status}",
        )


def compared(found: list[int], known: Known, length: int) -> tuple[str | None, bool]:
    """What is wrong with the first `length` tokens of an answer, if anything is; and whether it is a tie."""
    want = known.tokens[:length]
    if found == want:
        return None, False
    for at, (got, expected) in enumerate(zip(found, want, strict=False)):
        if got != expected:
            if known.gaps[at] <= TIE:
                return None, True
            return f"{known.prompt[-40:]!r}: token {at} is {got}, not {expected}", False
    return f"{known.prompt[-40:]!r}: {len(found)} tokens, not {len(want)}", False


def prompts() -> list[str]:
    """Problems, and long prompts of which each four have a beginning in common."""
    folder = files("atom_vllm_bridge.measure") / "prompts"
    problems, prose = (
        [json.loads(line)["prompt"] for line in (folder / name).open(encoding="utf-8")]
        for name in ("problems.jsonl", "prose.jsonl")
    )
    shared = ["\n\n".join(prose[i : i + 30]) for i in range(0, 120, 30)]
    long = [f"{shared[i % 4]}\n\n{problems[-1 - i]}" for i in range(16)]
    return problems[:24] + long


def gauge(server: Server, name: str) -> float:
    """A series of /metrics, of all engines together."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        page = answer.read().decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name
    )


def resident(server: Server) -> float:
    """MiB of the server and its engines."""
    first = psutil.Process(server.process.pid)
    total = 0
    for process in (first, *first.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            # A helper that has ended since they were listed.
            continue
    return total / 2**20


def left_behind(server: Server) -> list[str]:
    """What the server still holds, after it had time to notice that all clients are gone."""
    names = (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
    )
    held: list[str] = []
    for _ in range(60):
        held = [f"{name} = {value}" for name in names if (value := gauge(server, name))]
        if not held:
            break
        time.sleep(0.5)
    return held


def soak(server: Server, seconds: float, clients: int, seed: int) -> bool:
    """Run it and print what was found; whether all is well."""
    first = Client(server, seed)
    known = [first.learn(prompt) for prompt in prompts()]
    print(f"{len(known)} answers are known; {clients} clients begin.", flush=True)
    tally, before, end = Tally(), server.metrics(), time.monotonic() + seconds
    kinds: tuple[tuple[str, int], ...] = (
        *(("answered", 6), ("left", 3), ("stopped", 2), ("refused", 1)),
    )
    names, weights = zip(*kinds, strict=True)

    def run(number: int) -> None:
        client = Client(server, seed + 1 + number)
        while time.monotonic() < end:
            kind = client.random.choices(names, weights)[0]
            ask: Callable[[Known, Tally], None] = getattr(client, kind)
            try:
                ask(client.random.choice(known), tally)
            except (OSError, http.client.HTTPException, RuntimeError) as error:
                # No answer is an answer that is wrong; the others go on.
                tally.add(kind, f"{type(error).__name__}: {error}")
                server.check()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    start, samples = time.monotonic(), list[tuple[float, float]]()
    while any(thread.is_alive() for thread in threads):
        samples.append((time.monotonic() - start, resident(server)))
        threads[0].join(min(5.0, seconds / 60))
    held, counted = left_behind(server), server.metrics() - before

    early = next((mib for at, mib in samples if at >= seconds / 6), samples[-1][1])
    late = samples[-1][1]
    print(f"requests          {sum(n for k, n in tally.counts.items() if k != 'ties')}")
    for kind in ("answers", "stop strings", "aborts", "bad requests"):
        print(f"  {kind:<16}{tally.counts[kind]}")
    print(f"preemptions       {counted.preemptions:.0f}")
    print(f"prefix hits       {counted.prefix_hits:.0f} tokens")
    if counted.acceptance_length is not None:
        print(f"acceptance        {counted.acceptance_length:.2f} tokens a step")
    print(f"RSS at {seconds / 360:>4.1f} min   {early:.0f} MiB")
    print(f"RSS at {seconds / 60:>4.1f} min   {late:.0f} MiB")
    print(f"ties              {tally.counts['ties']}")
    print(f"wrong answers     {len(tally.wrong)}")
    faults = tally.wrong[:20]
    if not counted.preemptions:
        faults.append("nothing was preempted: the cache is too large for this traffic.")
    if late > GROWTH * early:
        faults.append(f"memory grew from {early:.0f} to {late:.0f} MiB.")
    faults += [f"left behind: {what}" for what in held]
    for fault in faults:
        print(fault)
    return not faults


def main(
    minutes: Annotated[float, typer.Option(help="How long.")] = 30.0,
    clients: Annotated[int, typer.Option(help="Requests at a time.")] = 12,
    seed: Annotated[int, typer.Option(help="Of the traffic.")] = 0,
    flags: Annotated[
        list[str] | None, typer.Argument(help="More flags of vllm serve, after --.")
    ] = None,
) -> None:
    """Serve schoolbook and ask it for so long."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make(Path(folder) / "schoolbook", "schoolbook")
        arguments = [*shlex.split(FLAGS), *(flags or ())]
        with Server(str(checkpoint), arguments, log=Path(folder) / "log") as server:
            fine = soak(server, 60 * minutes, clients, seed)
            server.check()
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    typer.run(main)
