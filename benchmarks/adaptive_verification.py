"""Tokens a second without drafts, with a fixed number of them, and with as many verified as pay, in one run.

    python benchmarks/adaptive_verification.py [--checkpoint DIR] [--plot FILE]
    python benchmarks/adaptive_verification.py --users 1,4,8,16,32,64,128,256 --dtype bfloat16     on a GPU

Each arm is an engine in a process of its own; all of them stay, and take turns at every number of requests, so that a machine
that slows down slows all. Prompts are the frozen prose and problems of `atom-vllm-bridge bench`, answers 96 greedy tokens,
and each turn is repeated; the best counts. The gain over K = 7 is also predicted from the timed costs of steps and from what
confidence expected: tokens for the time of the chosen budgets, against the same for whole drafts.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

NEW, TURNS = 96, 3
# Arms of `atom-vllm-bridge eval`, by how a reader knows them.
ARMS = {
    "off": "off",
    "K = 5": "dspark-5",
    "K = 7": "dspark-7",
    "adaptive K ≤ 7": "adaptive-7",
}


class Budgets:
    """What the steps of an adaptive engine were expected to give and to take, with their budgets and with whole drafts."""

    def __init__(self, manager: Any) -> None:
        import numpy as np

        self.offered = self.chosen = 0
        self.expected, self.cost = {"chosen": 0.0, "whole": 0.0}, {
            "chosen": 0.0,
            "whole": 0.0,
        }
        get_num_tokens, (draft, verify) = manager.get_num_tokens, manager.cost_tables

        def noting(tokens: Mapping[str, int], drafts: Mapping[str, list[int]]) -> int:
            total = get_num_tokens(tokens, drafts)
            slots = [manager.req_states.req_id_to_index[name] for name in tokens]
            stale = manager._stale_confidences[manager._stale_idx].np[slots]
            survival = np.sort(np.cumprod(stale, 1).ravel())[::-1]
            whole = sum(tokens.values())
            offered = sum(map(len, drafts.values()))
            budget = total - (whole - offered)
            self.offered, self.chosen = self.offered + offered, self.chosen + budget
            for name, kept, size in (
                ("chosen", budget, total),
                ("whole", offered, whole),
            ):
                self.expected[name] += len(slots) + float(survival[:kept].sum())
                self.cost[name] += float(draft[len(slots)] + verify[size])
            return total

        manager.get_num_tokens = noting

    def take(self) -> dict[str, float]:
        """The share that was verified and the predicted gain, since it was last asked."""
        ratio = {name: self.expected[name] / self.cost[name] for name in self.cost}
        found = {
            "verified": self.chosen / self.offered,
            "gain": ratio["chosen"] / ratio["whole"],
        }
        self.offered = self.chosen = 0
        for sums in (self.expected, self.cost):
            sums.update(chosen=0.0, whole=0.0)
        return found


def serve(arm: str, checkpoint: str, dtype: str, most: int) -> None:
    """An engine that answers each line of stdin, a number of requests, with a line of figures."""
    from vllm import LLM, SamplingParams

    from atom_vllm_bridge.measure import accuracy
    from atom_vllm_bridge.measure.workload import PROMPTS

    engine = LLM(
        checkpoint,
        dtype=dtype,
        max_model_len=1024,
        max_num_seqs=most,
        kv_cache_memory_bytes=1 << 30,
        speculative_config=accuracy.ARMS[ARMS[arm]].speculative_config,
        seed=0,
    )
    core: Any = engine.llm_engine.engine_core.engine_core
    manager = (
        core.model_executor.driver_worker.worker.model_runner.adaptive_verification
    )
    budgets = Budgets(manager) if manager else None
    kinds = (
        (PROMPTS / f"{kind}.jsonl").read_text().splitlines()
        for kind in ("prose", "problems")
    )
    prompts = [
        json.loads(line)["prompt"] for pair in zip(*kinds, strict=True) for line in pair
    ]
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    print("ready", flush=True)
    for line in sys.stdin:
        users = int(line)
        engine.reset_prefix_cache()
        made, start = 0, time.perf_counter()
        for first in range(0, max(8, 2 * users), users):
            turn = [prompts[i % len(prompts)] for i in range(first, first + users)]
            outputs = engine.generate(turn, sampling, use_tqdm=False)
            made += sum(len(output.outputs[0].token_ids) for output in outputs)
        speed = made / (time.perf_counter() - start)
        found = {"speed": speed} | (budgets.take() if budgets else {})
        print(json.dumps(found), flush=True)


@contextmanager
def engines(
    checkpoint: Path, threads: int, dtype: str, most: int
) -> Iterator[dict[str, subprocess.Popen]]:
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # About what a request holds here; with the default of 8,192 tokens, verification would be priced too high.
        "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN": "256",
    }
    started: dict[str, subprocess.Popen] = {}
    try:
        for arm in ARMS:
            started[arm] = subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    "--serve",
                    arm,
                    str(checkpoint),
                    dtype,
                    str(most),
                ],
                env=environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            # One after another: an adaptive engine times its steps at its start.
            answer(started[arm], until="ready")
        yield started
    finally:
        for process in started.values():
            process.kill()


def answer(process: subprocess.Popen, until: str = "{") -> str:
    """The next line that begins so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(until):
            return line
    raise SystemExit(f"an engine ended with {process.wait()}: {process.args!r}")


def measured(
    checkpoint: Path, threads: int, dtype: str, counts: list[int]
) -> dict[int, dict[str, dict[str, float]]]:
    """By requests and arm, the best of the turns."""
    found: dict[int, dict[str, dict[str, float]]] = {}
    with engines(checkpoint, threads, dtype, max(counts)) as processes:
        for users in counts:
            turns: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
            for _ in range(TURNS):
                for arm, process in processes.items():
                    assert process.stdin is not None
                    process.stdin.write(f"{users}\n")
                    process.stdin.flush()
                    turns[arm].append(json.loads(answer(process)))
            found[users] = {
                arm: max(each, key=lambda turn: turn["speed"])
                for arm, each in turns.items()
            }
    return found


def draw(found: Mapping[int, Mapping[str, Mapping[str, float]]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for arm in ARMS:
        speeds = [found[users][arm]["speed"] for users in found]
        axes.plot(list(found), speeds, marker="o", label=arm)
    axes.set(xlabel="requests at once", ylabel="output tokens/s", ylim=(0, None))
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(found), [str(users) for users in found])
    axes.grid(alpha=0.3)
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def main(
    checkpoint: Annotated[
        Path | None, typer.Option(help="With a DSpark draft; schoolbook unless given.")
    ] = None,
    threads: Annotated[int, typer.Option(help="OpenMP threads of each engine.")] = 2,
    users: Annotated[str, typer.Option(help="Requests at once.")] = "1,4,8,16",
    dtype: Annotated[str, typer.Option()] = "float32",
    plot: Annotated[Path, typer.Option()] = Path("build/adaptive_verification.png"),
) -> None:
    """Print tokens a second of every arm, and the predicted and the measured gain over K = 7."""
    from tabulate import tabulate

    from atom_vllm_bridge.checkpoint.make import make

    with tempfile.TemporaryDirectory() as folder:
        where = checkpoint or make(Path(folder) / "schoolbook", "schoolbook")
        counts = [int(count) for count in users.split(",")]
        found = measured(where, threads, dtype, counts)
    rows = []
    for at_once, arms in found.items():
        speed = {arm: figures["speed"] for arm, figures in arms.items()}
        (adaptive,) = (arms[arm] for arm in arms if arm.startswith("adaptive"))
        rows.append(
            [
                at_once,
                *(f"{each:.0f}" for each in speed.values()),
                f"{adaptive['verified']:.2f}",
                f"{adaptive['speed'] / max(speed['K = 5'], speed['K = 7']):.2f} ×",
                f"{adaptive['gain']:.2f} ×",
                f"{adaptive['speed'] / speed['K = 7']:.2f} ×",
            ]
        )
    titles = ["requests", *ARMS, "verified", "against the best fixed K"]
    print(
        tabulate(
            rows,
            [*titles, "over K = 7: predicted", "measured"],
            tablefmt="github",
            disable_numparse=True,
        )
    )
    draw(found, plot)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
    else:
        typer.run(main)
