"""Tokens a second without a draft, with DSpark and with MTP, and where the time of a step goes; on a CPU, in one run.

    python benchmarks/speculation.py                    checkpoints of the preset `agreeing` are made for the run
    python benchmarks/speculation.py --preset tiny      with random drafts, which are hardly ever accepted

The checkpoints' targets have the same shape; of the preset `agreeing` they differ in values. Every engine runs in a process of its own with the same prompts, new tokens and
threads; each measurement is repeated, and the median counts. The parts of a step are measured in the same runs: target
(forward, its metadata not counted), draft (all that the speculator does), sampler (logits, sampling, rejection), scheduler.
"""

import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from cpu_speed import (
    NEW,
    PROMPT,
    REPEATS,
    REQUESTS,
    engine_of,
    in_a_process,
    measured,
)

METHODS = {"off": None, "DSpark, K = 5": ("dspark", 5), "MTP, K = 1": ("mtp", 1)}
PARTS = ("target", "draft", "sampler", "scheduler")


class Clock:
    """Seconds spent in some methods of live objects."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.steps = 0

    def measure(self, part: str, owner: Any, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - start
                self.steps += part == "target"

        setattr(owner, name, timed)

    def attach(self, engine: Any) -> None:
        core = engine.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        self.measure("target", runner.model, "forward")
        self.measure("sampler", runner, "sample")
        self.measure("scheduler", core.scheduler, "schedule")
        self.measure("scheduler", core.scheduler, "update_from_output")
        if runner.speculator is not None:
            self.measure("draft", runner.speculator, "propose")


def one(checkpoint: Path, method: str | None, length: int) -> None:
    """Measure one engine in this process; the last line tells, for each number of requests, what was found."""
    from vllm import SamplingParams

    speculation = None
    if method is not None:
        speculation = {"method": method, "num_speculative_tokens": length}
    engine = engine_of(checkpoint, "float32", speculative_config=speculation)
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    clock = Clock()
    clock.attach(engine)
    found: dict[int, dict[str, float]] = {}

    def generate(batch: list[list[int]]) -> int:
        clock.seconds.clear()
        clock.steps = 0
        start = time.perf_counter()
        outputs = engine.generate(
            [{"prompt_token_ids": ids} for ids in batch], sampling, use_tqdm=False
        )
        whole = time.perf_counter() - start
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        # The last run of a number of requests stays.
        found[len(batch)] = {
            "step": 1e3 * whole / clock.steps,
            "tokens": made / clock.steps / len(batch),
            **{part: 1e3 * clock.seconds[part] / clock.steps for part in PARTS},
        }
        return made

    speed = measured(generate)
    print(
        json.dumps({count: found[count] | {"speed": speed[count]} for count in speed})
    )


def main(
    preset: Annotated[
        Literal["agreeing", "tiny"], typer.Option(help="Of the checkpoints.")
    ] = "agreeing",
    threads: Annotated[int, typer.Option(help="OpenMP threads of each engine.")] = 2,
) -> None:
    """Print speeds, tokens a step and the parts of a step."""
    from tabulate import tabulate

    from atom_vllm_bridge.checkpoint.make import make

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = {
            draft: make(Path(folder) / draft, preset, layout="bf16", draft=draft)
            for draft in ("dspark", "mtp")
        }
        for name, chosen in METHODS.items():
            method, length = chosen or (None, 0)
            checkpoint = checkpoints[method or "dspark"]
            found = in_a_process(
                [__file__, str(checkpoint), method or "", str(length)], threads
            )
            for count in REQUESTS:
                if isinstance(found, str):
                    rows.append([name, count, found])
                    continue
                at = found[count]
                parts = [at[part] for part in PARTS]
                rest = at["step"] - sum(parts)
                numbers = [at["speed"], at["tokens"], at["step"], *parts, rest]
                rows.append([name, count, *(f"{number:.1f}" for number in numbers)])
    print(
        f"{PROMPT} prompt and {NEW} new tokens, float32, {threads} threads, preset {preset}; speeds are medians of "
        f"{REPEATS}, parts of a step in ms, of the last run.\n"
    )
    titles = ["draft", "at once", "tokens/s", "tokens a step", "step", *PARTS, "rest"]
    print(tabulate(rows, titles, tablefmt="github"))


if __name__ == "__main__":
    if len(sys.argv) == 4 and not sys.argv[1].startswith("--"):
        one(Path(sys.argv[1]), sys.argv[2] or None, int(sys.argv[3]))
    else:
        typer.run(main)
