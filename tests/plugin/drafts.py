"""What became of an engine's drafts, request by request and step by step."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from engines import Engine


@dataclass(frozen=True)
class Row:
    """One request in one step.

    Attributes:
        start: position of its first token in the step.
        drafts: drafted tokens after that one; 0 in a prefill.
        accepted: of them.
        prefilling: it reads its prompt, or again what a preemption threw away.
        sampled: tokens that the step gave it.
        proposed: the draft for the next step.
    """

    start: int
    drafts: int
    accepted: int
    prefilling: bool
    sampled: int
    proposed: tuple[int, ...]


@dataclass
class Watch:
    """The steps, each a list of rows."""

    steps: list[list[Row]] = field(default_factory=list)

    @property
    def rows(self) -> Iterator[Row]:
        return (row for step in self.steps for row in step)

    def mixed(self) -> int:
        """Steps in which one request prefills while another verifies a draft."""
        return sum(
            any(row.prefilling for row in step) and any(row.drafts for row in step)
            for step in self.steps
        )

    def acceptance(self) -> float:
        """Accepted drafts among those up to the first that is not (the others were never judged)."""
        judged = sum(min(row.accepted + 1, row.drafts) for row in self.rows)
        return sum(row.accepted for row in self.rows) / judged

    def crossings(self, period: int) -> set[tuple[int, bool]]:
        """(which draft of a step is the first token after a multiple of `period`, whether it was accepted)."""
        return {
            (place, place <= row.accepted)
            for row in self.rows
            for place in range(1, row.drafts + 1)
            if (row.start + place) % period == 0
        }


@contextmanager
def watching(engine: Engine) -> Iterator[Watch]:
    """Look over the shoulder of the engine's speculator."""
    watch, speculator = Watch(), engine.runner.speculator
    propose = speculator.propose
    signature = inspect.signature(propose)

    def watched(*args, **options):
        given = signature.bind(*args, **options).arguments
        batch = given["input_batch"]
        sampled, rejected = (
            given["num_sampled"].tolist(),
            given["num_rejected"].tolist(),
        )
        first = batch.positions[batch.query_start_loc[: batch.num_reqs].long()].tolist()
        drafts = batch.num_draft_tokens_per_req
        drafts = [0] * batch.num_reqs if drafts is None else drafts.tolist()
        prefilling = batch.is_prefilling_np.tolist()
        proposed = propose(*args, **options)
        watch.steps.append(
            [
                Row(
                    first[r],
                    drafts[r],
                    drafts[r] - rejected[r],
                    prefilling[r],
                    sampled[r],
                    tuple(proposed[r].tolist()),
                )
                for r in range(batch.num_reqs)
            ]
        )
        return proposed

    speculator.propose = watched
    try:
        yield watch
    finally:
        del speculator.propose
