"""What adaptive verification did: how many draft tokens it let through, how many it expected to be kept, and how many were.

Of a draft token, the head (or vLLM's online estimate) gives the probability that it is kept if those before it are. The
product up to a position is what the budget ranks by, and what is compared here with the target's verdict.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.utils import CpuGpuBuffer

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from atom_vllm_bridge.metrics import Requests

# Steps after which the sums are shown; they also are when a request has ended.
STEPS = 16


def watch(runner: Any) -> None:
    """Have the model state of vLLM's runner count what adaptive verification does; nothing where drafts are verified whole."""
    if runner.adaptive_verification is not None:
        state = runner.model_state
        state.verdicts = Verdicts(runner.speculator, state.counted)


class Verdicts:
    """Sums by position, made on the device for several steps at once; no step waits for them."""

    def __init__(self, speculator: Any, counted: "Requests") -> None:
        """Args:
        speculator: vLLM's; its `draft_token_confidence_probs` holds [R, K] of the batch that drafted last.
        counted: where the sums are shown.
        """
        self._speculator, self._counted = speculator, counted
        shape, device = speculator.draft_tokens.shape, speculator.device
        self._confidence = torch.ones(shape, device=device)
        self._steps = torch.arange(shape[1], device=device)
        self._offered = np.zeros(shape[1])
        # Rows: admitted, expected to be kept, kept.
        self._sums = CpuGpuBuffer(3, shape[1], dtype=torch.float64, device=device)
        self._shown = np.zeros((4, shape[1]))
        # A copy of the sums is on its way to the host.
        self._sent: torch.cuda.Event | None = None
        self._drafted: torch.Tensor | None = None
        self._admitted: torch.Tensor | None = None
        # Of each step: admitted [R], confidence [R, K], and tokens sampled [R].
        self._ended: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._budget = 0
        counted.verified(self._shown.tolist())

    def begin(self, batch: "InputBatch") -> None:
        """A real batch is about to be verified."""
        if self._drafted is not None:
            rows = len(self._drafted)
            self._confidence[self._drafted] = (
                self._speculator.draft_token_confidence_probs[:rows]
            )
        self._drafted, self._budget = batch.idx_mapping, batch.num_draft_tokens
        offered = batch.num_draft_tokens_per_req
        if offered is None:
            self._admitted = None
            return
        steps = np.arange(len(self._offered))
        self._offered += (steps < offered[:, None]).sum(0)
        # One row more than drafts are verified of each request, the last.
        self._admitted = batch.cu_num_logits.diff() - 1

    def end(self, requests: torch.Tensor, num_sampled: torch.Tensor) -> None:
        """[R] slots of the batch that began, and how many tokens each got."""
        if self._admitted is None:
            return
        confidence = self._confidence[requests]
        self._ended.append((self._admitted, confidence, num_sampled.clone()))
        if len(self._ended) == STEPS:
            self.show()

    def show(self) -> None:
        """Add up the steps that have ended, hand on what has arrived of the sums, and send them again."""
        if self._ended:
            admitted, confidence, sampled = map(
                torch.cat, zip(*self._ended, strict=True)
            )
            self._ended.clear()
            verified = self._steps < admitted[:, None]
            kept = verified & (self._steps < sampled[:, None] - 1)
            expected = confidence.cumprod(1) * verified
            self._sums.gpu += torch.stack([verified, expected, kept]).sum(
                1, dtype=torch.float64
            )
        if self._sums.gpu.is_cpu:
            self._sums.copy_to_cpu()
        elif self._sent is not None and not self._sent.query():
            return
        found = np.concatenate((self._offered[None], self._sums.np))
        if not self._sums.gpu.is_cpu:
            self._sums.copy_to_cpu()
            self._sent = torch.cuda.Event()
            self._sent.record()
        self._counted.verified((found - self._shown).tolist(), self._budget)
        self._shown = found
