"""What a step costs on a CPU, by the tokens that the target takes and the requests that the draft serves.

vLLM times replays of captured graphs with events of the device. A CPU has neither: the same dummy runs are timed by the
host's clock, which is exact there, since nothing runs behind its back. Steps are not padded to a captured size either, so
that costs between two timed sizes lie on the line between them.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from vllm import envs

logger = logging.getLogger("vllm.atom_vllm_bridge")

# All sizes are run so often, by turns: a machine that is busy for a moment is so for one turn of a few sizes.
TURNS = 5
# After the second turn, no more than so long.
SECONDS = 10.0

Curve = list[tuple[int, float]]


class HostTimes:
    """Takes the place of vLLM's `StepTimingCollector` in a runner while steps are timed.

    Attributes:
        forward_ms: tokens of the target → times.
        other_ms: requests → times of what else a step does: it drafts, and prepares both.
    """

    def __init__(self) -> None:
        self.forward_ms: defaultdict[int, list[float]] = defaultdict(list)
        self.other_ms: defaultdict[int, list[float]] = defaultdict(list)
        self._tokens = self._requests = 0
        self._since = 0.0

    def step(self, run: Callable[[], Any]) -> None:
        """Time a step: what `run` does."""
        since = time.perf_counter()
        run()
        taken = _ms_since(since)
        self.other_ms[self._requests].append(taken - self.forward_ms[self._tokens][-1])

    def record_batch(self, input_batch: Any, full_cudagraph: bool) -> None:
        self._tokens, self._requests = input_batch.num_tokens, input_batch.num_reqs

    def forward_start(self) -> None:
        self._since = time.perf_counter()

    def forward_end(self) -> None:
        self.forward_ms[self._tokens].append(_ms_since(self._since))

    def drafter_start(self) -> None:
        """Of no interest: the rest of a step counts to the draft."""

    drafter_end = drafter_start


def _ms_since(start: float) -> float:
    return 1000 * (time.perf_counter() - start)


def cost_curves(runner: Any) -> tuple[Curve, Curve]:
    """Time dummy runs of a runner that serves nothing yet.

    Args:
        runner: vLLM's, with caches; requests have VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN tokens of context, or as
            many as fit.

    Returns:
        (requests, ms) of all but the target's forward, and (tokens, ms) of the target, for every count up to what a step may hold.
    """
    most_tokens = runner.max_num_tokens
    verified = min(runner.max_num_reqs * runner.decode_query_len, most_tokens)
    began = time.perf_counter()
    context = envs.VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN
    kept, runner.step_timing = runner.step_timing, HostTimes()
    try:
        for turn in range(1 + TURNS):
            if turn == 1:
                # The first run of a size may compile, and does not count.
                runner.step_timing = HostTimes()
            elif turn > 2 and time.perf_counter() > began + SECONDS:
                break
            for size in sizes(verified, most_tokens):
                runner.step_timing.step(
                    partial(runner._dummy_run, size, context_len=context)
                )
        times = runner.step_timing
    finally:
        runner.step_timing = kept
    logger.info(
        "Adaptive verification: timed steps of 1 to %d tokens in %.1f s.",
        most_tokens,
        time.perf_counter() - began,
    )
    return (
        every_count(times.other_ms, runner.max_num_reqs),
        every_count(times.forward_ms, most_tokens),
    )


def sizes(verified: int, most: int) -> Sequence[int]:
    """Tokens of the steps to time: closer where a step of drafts can be, and the largest of all.

    Args:
        verified: most tokens of a step in which every request verifies a draft.
        most: most tokens of a step.
    """
    found, size = {1, verified, most}, 1
    while size < verified:
        found |= {size, min(size + size // 2, verified)}
        size *= 2
    return sorted(found)


def every_count(times: Mapping[int, Iterable[float]], most: int) -> Curve:
    """The least at the counts that were timed, and straight lines between them: (count, ms) for 1 … `most`.

    What else the machine did meanwhile only adds to a time, and less work takes no longer than more.
    """
    counts = sorted(times)
    least = np.array([min(times[count]) for count in counts])
    least = np.minimum.accumulate(least[::-1])[::-1]
    every = np.arange(1, most + 1)
    return [
        (int(n), float(ms))
        for n, ms in zip(every, np.interp(every, counts, least), strict=True)
    ]
