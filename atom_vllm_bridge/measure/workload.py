"""What a speed measurement asks of a server: requests, their length and sampling, how many at once.

Three presets. `frozen` asks the same prose and problems every time; `random-512-1024` and `speed` are the methods that
are published for DeepSeek-V4, so that figures can be set beside theirs.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

PROMPTS = Path(__file__).with_name("prompts")
KINDS = ("prose", "problems")
MIXED = "mixed"
WARMUP_REQUESTS = 64


class WorkloadError(ValueError):
    """A workload that cannot be asked for; one line that says what to change."""


@dataclass(frozen=True)
class Workload:
    """What is asked, and in which order.

    Attributes:
        name: of the preset.
        concurrency: requests at once, one point each, in order of measurement.
        requests: how many requests a point has, from its concurrency.
        output_len: tokens of an answer; the most, unless `ignore_eos`.
        ignore_eos: whether every answer has exactly `output_len` tokens.
        temperature: 0 is greedy.
        top_p: left to the server where None.
        random_input_len: tokens of a random prompt; None asks the frozen prompts.
        warmup_runs: runs of 64 requests before a point; with 0, the client repeats the first request once for each
            concurrent user.
        differs: what was changed from the preset, one phrase each.
    """

    name: str
    concurrency: tuple[int, ...]
    requests: Callable[[int], int]
    output_len: int
    ignore_eos: bool
    temperature: float
    top_p: float | None = None
    random_input_len: int | None = None
    warmup_runs: int = 0
    differs: tuple[str, ...] = ()

    @property
    def fit_for_acceptance(self) -> bool:
        """Random tokens are no text: how often a draft guesses what follows them says nothing."""
        return self.random_input_len is None

    @property
    def asked(self) -> str:
        """The workload in words."""
        prompts = "frozen prose and problems in turn"
        if self.random_input_len is not None:
            prompts = f"random prompts of {self.random_input_len} tokens"
        sampling = (
            "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"
        )
        if self.top_p is not None:
            sampling += f", top-p {self.top_p:g}"
        length = "exactly" if self.ignore_eos else "at most"
        warmup = "as many warm-ups as users"
        if self.warmup_runs:
            warmup = f"{self.warmup_runs} warm-ups of {WARMUP_REQUESTS} requests"
        return f"{prompts}, {sampling}, {length} {self.output_len} output tokens, a cold server and {warmup} for every point"

    def caveats(self, source: Path = PROMPTS) -> list[str]:
        """What a reader must know of this workload, a sentence each."""
        if not self.fit_for_acceptance:
            return ["Random prompts are no text: unfit for acceptance figures."]
        most = max(map(self.requests, self.concurrency))
        prompts = count_prompts(source)
        if most > prompts:
            return [
                f"{most} requests ask {prompts} prompts again and again; a repeated one may hit the prefix cache."
            ]
        return []

    def warmups(self, concurrency: int) -> int:
        """How often the client repeats the first request before it measures."""
        return 0 if self.warmup_runs else concurrency

    def client_flags(
        self, concurrency: int, requests: int, prompts: Path | None, warmups: int
    ) -> list[str]:
        """Options of `vllm bench serve`; `prompts` is a file with a line for each request, None for random ones."""
        flags = [
            *("--max-concurrency", str(concurrency)),
            *("--num-prompts", str(requests)),
            *("--num-warmups", str(warmups)),
            *("--temperature", f"{self.temperature:g}"),
        ]
        if self.top_p is not None:
            flags += ["--top-p", f"{self.top_p:g}"]
        if self.ignore_eos:
            flags += ["--ignore-eos"]
        if prompts is None:
            flags += ["--dataset-name", "random"]
            flags += ["--random-input-len", str(self.random_input_len)]
            return [*flags, "--random-output-len", str(self.output_len)]
        # The file is asked as it stands: its order, and no chat template around it.
        flags += ["--dataset-name", "custom", "--dataset-path", str(prompts)]
        flags += ["--custom-output-len", str(self.output_len)]
        return [*flags, "--disable-shuffle", "--skip-chat-template"]


PRESETS = {
    preset.name: preset
    for preset in (
        Workload(
            "frozen",
            concurrency=(1, 4, 16, 64),
            requests=lambda concurrency: max(24, 4 * concurrency),
            output_len=128,
            ignore_eos=True,
            temperature=0,
        ),
        Workload(
            "random-512-1024",
            concurrency=(16, 128),
            requests=lambda concurrency: 160 if concurrency == 16 else 8 * concurrency,
            output_len=1024,
            ignore_eos=True,
            temperature=0,
            random_input_len=512,
        ),
        Workload(
            "speed",
            concurrency=(256, 128, 64, 32, 16, 8, 4),
            requests=lambda concurrency: 880,
            output_len=2048,
            ignore_eos=False,
            temperature=1,
            top_p=1,
            warmup_runs=2,
        ),
    )
}


def workload_of(
    preset: str,
    *,
    concurrency: Sequence[int] | None = None,
    num_prompts: int | None = None,
    output_len: int | None = None,
) -> Workload:
    """A preset, with what is given instead of its own; `differs` then tells.

    Raises:
        WorkloadError: a concurrency that so few requests cannot reach.
    """
    workload = PRESETS[preset]
    differs = []
    if concurrency and tuple(concurrency) != workload.concurrency:
        differs.append(
            f"concurrency {_listed(concurrency)} instead of {_listed(workload.concurrency)}"
        )
        workload = replace(workload, concurrency=tuple(concurrency))
    own = [workload.requests(users) for users in workload.concurrency]
    if num_prompts is not None and set(own) != {num_prompts}:
        differs.append(f"{num_prompts} requests a point instead of {_listed(own)}")
        workload = replace(workload, requests=lambda _: num_prompts)
    if output_len is not None and output_len != workload.output_len:
        differs.append(f"{output_len} output tokens instead of {workload.output_len}")
        workload = replace(workload, output_len=output_len)
    for users in workload.concurrency:
        if workload.requests(users) < users:
            raise WorkloadError(
                f"{workload.requests(users)} requests never are {users} at once; raise --num-prompts to {4 * users}, or lower --concurrency"
            )
    return replace(workload, differs=tuple(differs))


def write_prompts(kind: str, requests: int, out: Path, source: Path = PROMPTS) -> Path:
    """Write a file for the client with `requests` lines, each an object with the field `prompt`.

    Args:
        kind: `prose`, `problems`, or `mixed`: both in turn.
        requests: how many; more than there are prompts begin again.
        out: folder to write into.
        source: folder of `prose.jsonl` and `problems.jsonl`.
    """
    kinds = KINDS if kind == MIXED else (kind,)
    files = [(source / f"{name}.jsonl").read_text().splitlines() for name in kinds]
    lines = itertools.cycle(
        itertools.chain.from_iterable(zip(*files, strict=True)),
    )
    path = out / f"{kind}-{requests}.jsonl"
    path.write_text(
        "".join(
            json.dumps({"prompt": json.loads(line)["prompt"]}) + "\n"
            for line in itertools.islice(lines, requests)
        )
    )
    return path


def count_prompts(source: Path = PROMPTS) -> int:
    """How many frozen prompts there are, both kinds together."""
    return sum(
        len((source / f"{kind}.jsonl").read_text().splitlines()) for kind in KINDS
    )


def _listed(numbers: Sequence[int]) -> str:
    distinct = list(dict.fromkeys(numbers))
    return ", ".join(map(str, distinct))
