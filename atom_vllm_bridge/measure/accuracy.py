"""How many word problems a served model solves, by lm-eval, and how its draft is accepted meanwhile."""

import json
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from atom_vllm_bridge.measure.server import Counters, LiveServer, ServerError
from atom_vllm_bridge.measure.tasks import FOLDER

FILTERS = {"strict-match": "strict", "flexible-extract": "flexible"}
REQUEST_SECONDS = 900
# Of the choice of worked examples, and of each request's sampling.
SEED = 1234
# Of the texts at temperature 1; a draft that ignores the temperature changes none.
MOST = 0.5


@dataclass(frozen=True)
class Arm:
    """A way to serve one model, and how its tokens are chosen.

    Attributes:
        draft: "dspark", "mtp" or None.
        length: K, draft tokens a step; None: as the draft was trained.
        adaptive: whether a budget says how many of them are verified.
    """

    draft: str | None = None
    length: int | None = None
    temperature: float = 0.0
    adaptive: bool = False

    @property
    def speculative_config(self) -> dict[str, Any] | None:
        """For vLLM's engine."""
        if self.draft is None:
            return None
        config: dict[str, Any] = {"method": self.draft}
        if self.length is not None:
            config["num_speculative_tokens"] = self.length
        if self.adaptive:
            config["enable_adaptive_verification"] = True
        return config

    @property
    def flags(self) -> list[str]:
        """For `vllm serve`."""
        config = self.speculative_config
        return [] if config is None else ["--speculative-config", json.dumps(config)]


ARMS = {
    "off": Arm(),
    "dspark-5": Arm("dspark", 5),
    "dspark-7": Arm("dspark", 7),
    "adaptive-7": Arm("dspark", 7, adaptive=True),
    "dspark-t1": Arm("dspark", 5, temperature=1.0),
    "mtp": Arm("mtp", 1),
}


@dataclass(frozen=True)
class Task:
    """What is asked.

    Attributes:
        name: of the project's own tasks, or any that lm-eval knows.
        num_fewshot: worked examples before each question.
        limit: so many of the first questions; all unless given.
        folder: where the files of the project's own tasks lie; in the package unless given.
        concurrency: requests at a time.
    """

    name: str = "schoolbook"
    num_fewshot: int = 8
    limit: int | None = None
    folder: Path | None = None
    concurrency: int = 8


@dataclass(frozen=True)
class Answer:
    """One question, answered."""

    question: str
    split: str
    target: str
    text: str
    strict: bool
    flexible: bool


@dataclass(frozen=True)
class Score:
    """A share of right answers and its standard error, over `n` questions."""

    value: float
    stderr: float
    n: int

    @classmethod
    def of(cls, right: Iterable[bool]) -> "Score":
        found = list(right)
        n, value = len(found), sum(found) / len(found)
        return cls(value, math.sqrt(value * (1 - value) / max(n - 1, 1)), n)

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.stderr:.3f}"


@dataclass(frozen=True)
class Outcome:
    """What one arm did.

    Attributes:
        temperature: of the sampling.
        speculates: whether a draft was asked for; None where it is not known.
        counters: what the server counted meanwhile.
        seconds: for all questions, without the start of the server.
    """

    arm: str
    answers: tuple[Answer, ...]
    counters: Counters
    seconds: float
    temperature: float = 0.0
    speculates: bool | None = None

    def score(self, extraction: str = "strict", split: str | None = None) -> Score:
        """By "strict" or "flexible" extraction, over one split or all questions."""
        return Score.of(
            getattr(answer, extraction)
            for answer in self.answers
            if split in (None, answer.split)
        )

    @property
    def splits(self) -> list[str]:
        return list(dict.fromkeys(a.split for a in self.answers if a.split))

    def differing(self, other: "Outcome") -> int:
        """How many texts are not the other's."""
        pairs = zip(self.answers, other.answers, strict=True)
        return sum(mine.text != theirs.text for mine, theirs in pairs)

    def as_dict(self) -> dict[str, Any]:
        """The figures, without the texts."""
        acceptance = {
            "length": self.counters.acceptance_length,
            "rate": self.counters.acceptance_rate,
            "by_position": self.counters.acceptance_by_position,
            "admitted": self.counters.admitted_rate,
            "calibration_error": self.counters.calibration_error,
        }
        return {
            "arm": self.arm,
            "temperature": self.temperature,
            "strict": asdict(self.score()),
            "flexible": asdict(self.score("flexible")),
            "by_split": {s: asdict(self.score(split=s)) for s in self.splits},
            "acceptance": acceptance if self.counters.drafts else None,
            "counters": asdict(self.counters),
            "seconds": self.seconds,
        }


def measure(
    server: LiveServer,
    task: Task,
    arm: str,
    temperature: float = 0.0,
    speculates: bool | None = None,
) -> Outcome:
    """Ask a running server every question of the task.

    Raises:
        ServerError: it refused a request or stopped answering.
        OSError: the files of the task cannot be read.
        ValueError: no such task, or not one of generated answers.
    """
    from aiohttp import ClientError

    # lm-eval warns of what is set on purpose; its errors have the server's reasons.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    before = server.metrics()
    try:
        samples, seconds = _asked(server, task, temperature)
    except (ClientError, TimeoutError) as error:
        server.check()
        raise ServerError(
            f"{server.url} did not answer a question: {error!r}. The lines above have its reason; a prompt that is too long "
            f"needs fewer examples or a larger --max-model-len (now {server.max_model_len})."
        ) from None
    return Outcome(
        arm,
        answers_of(samples),
        server.metrics() - before,
        seconds,
        temperature,
        speculates,
    )


def _asked(
    server: LiveServer, task: Task, temperature: float
) -> tuple[list[dict[str, Any]], float]:
    """What lm-eval keeps of each question and filter, and the seconds for all of them."""
    from lm_eval import evaluate
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager, get_task_dict

    own = (FOLDER / f"{task.name}.yaml").is_file()
    metadata = {"folder": str(task.folder)} if task.folder else {}
    manager = TaskManager(
        include_path=str(FOLDER), include_defaults=not own, metadata=metadata
    )
    asked = get_task_dict([task.name], manager)
    problems = asked[task.name]
    problems.set_config("num_fewshot", task.num_fewshot)
    sampling = {"temperature": temperature, "do_sample": temperature > 0}
    problems.set_config("generation_kwargs", sampling, update=True)
    problems.set_fewshot_seed(SEED)
    model = LocalCompletionsAPI(
        model=server.model,
        base_url=f"{server.url}/v1/completions",
        # Prompts go as text, so no tokenizer is looked for, here or on a hub.
        tokenizer_backend="none",
        tokenized_requests=False,
        num_concurrent=task.concurrency,
        timeout=REQUEST_SECONDS,
        seed=SEED,
    )
    start = time.monotonic()
    results = evaluate(model, asked, limit=task.limit, bootstrap_iters=0)
    assert results is not None  # as on every rank but the first
    return results["samples"][task.name], time.monotonic() - start


def answers_of(samples: Sequence[Mapping[str, Any]]) -> tuple[Answer, ...]:
    """lm-eval's samples, of which it has one a filter, as one answer a question; ordered by question."""
    found: dict[int, dict[str, Any]] = {}
    for sample in samples:
        answer = found.setdefault(
            sample["doc_id"],
            {
                "question": sample["doc"]["question"],
                "split": sample["doc"].get("split", ""),
                "target": sample["target"],
                "text": sample["resps"][0][0],
            },
        )
        answer[FILTERS[sample["filter"]]] = bool(sample["exact_match"])
    return tuple(Answer(**found[number]) for number in sorted(found))


@dataclass(frozen=True)
class Check:
    """Something that must hold between arms."""

    what: str
    holds: bool


def checks(outcomes: Sequence[Outcome]) -> list[Check]:
    """What the arms say of one another; a claim whose arms are not there is not made."""
    made = []
    for outcome in outcomes:
        if outcome.speculates:
            drafts = outcome.counters.drafts
            made.append(Check(f"{outcome.arm}: {drafts:.0f} drafts", drafts > 0))
    plain = next((o for o in outcomes if o.speculates is False), None)
    greedy = [o for o in outcomes if o.temperature == 0]
    if plain is not None:
        base = plain.score()
        for outcome in greedy:
            if outcome.speculates:
                score = outcome.score()
                apart = abs(score.value - base.value)
                error = math.hypot(score.stderr, base.stderr)
                what = (
                    f"{outcome.arm}: accuracy {apart:.4f} from that of {plain.arm}, "
                    f"at most one combined standard error of {error:.4f}"
                )
                made.append(Check(what, apart <= error))
    for outcome in outcomes:
        if outcome.temperature > 0 and greedy:
            n, total = outcome.differing(greedy[0]), len(outcome.answers)
            what = f"{outcome.arm}: {n} of {total} texts differ from {greedy[0].arm}, more than half"
            made.append(Check(what, n > MOST * total))
    return made


def table(outcomes: Sequence[Outcome]) -> str:
    """The figures in Markdown, one row an arm."""
    splits = list(dict.fromkeys(split for o in outcomes for split in o.splits))
    first, adaptive = outcomes[0], any(o.counters.verified for o in outcomes)
    rows = []
    for outcome in outcomes:
        length = outcome.counters.acceptance_length
        positions = outcome.counters.acceptance_by_position
        rows.append(
            {
                "arm": outcome.arm,
                "strict": outcome.score(),
                "flexible": outcome.score("flexible"),
                **{split: outcome.score(split=split) for split in splits},
                "tokens a step": "–" if length is None else f"{length:.2f}",
                "accepted by position": " ".join(f"{p:.2f}" for p in positions) or "–",
                **({"drafts verified": _share(outcome.counters)} if adaptive else {}),
                f"texts unlike {first.arm}'s": (
                    "–"
                    if outcome is first
                    else f"{outcome.differing(first)} of {len(first.answers)}"
                ),
                "seconds": f"{outcome.seconds:.0f}",
            }
        )
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def _share(counters: Counters) -> str:
    rate = counters.admitted_rate
    return "–" if rate is None else f"{rate:.2f}"


def save(outcome: Outcome, out: Path) -> None:
    """Every question with its answer, as JSON lines."""
    lines = [json.dumps(asdict(a), ensure_ascii=False) + "\n" for a in outcome.answers]
    path = out / f"{outcome.arm}.samples.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
