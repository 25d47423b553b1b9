"""What adaptive verification did: how many draft tokens it let through, how many it expected to be kept, and how many were.

Of a draft token, the head (or vLLM's online estimate) gives the probability that it is kept if those before it are. The
product up to a position is what the budget ranks by, and what is compared here with the target's verdict.
"""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from atom_vllm_bridge.metrics import Requests


class Verdicts:
    """Sums by position, on the device; no step waits for them."""

    def __init__(self, speculator: Any, counted: "Requests") -> None:
        """Args:
        speculator: vLLM's; its `draft_token_confidence_probs` holds [R, K] of the batch that drafted last.
        counted: where the sums are shown.
        """
        self._speculator, self._counted = speculator, counted
        shape, device = speculator.draft_tokens.shape, speculator.device
        self._confidence = torch.ones(shape, device=device)
        self._steps = torch.arange(shape[1], device=device)
        # Rows: offered, admitted, expected to be kept, kept.
        self._sums = torch.zeros(4, shape[1], dtype=torch.float64, device=device)
        self._shown = torch.zeros(4, shape[1], dtype=torch.float64)
        self._arriving: tuple[torch.Tensor, torch.cuda.Event] | None = None
        self._drafted: torch.Tensor | None = None
        self._offered = self._admitted = self._steps[:0]
        counted.verified(self._shown.tolist(), None)

    def begin(self, batch: "InputBatch") -> None:
        """A real batch is about to be verified."""
        if self._drafted is not None:
            rows = len(self._drafted)
            self._confidence[self._drafted] = (
                self._speculator.draft_token_confidence_probs[:rows]
            )
        self._drafted = batch.idx_mapping
        # One row more than drafts are verified of each request, the last.
        self._admitted = batch.cu_num_logits.diff() - 1
        offered = batch.num_draft_tokens_per_req
        self._offered = (
            torch.zeros_like(self._admitted)
            if offered is None
            else torch.from_numpy(offered).to(self._admitted.device, non_blocking=True)
        )
        self._show(batch.num_draft_tokens)

    def end(self, requests: torch.Tensor, num_sampled: torch.Tensor) -> None:
        """[R] slots of the batch that began, and how many tokens each got."""
        offered = self._steps < self._offered[:, None]
        admitted = self._steps < self._admitted[:, None]
        kept = admitted & (self._steps < num_sampled[:, None] - 1)
        survival = self._confidence[requests].cumprod(1)
        self._sums += torch.stack([offered, admitted, survival * admitted, kept]).sum(
            1, dtype=torch.float64
        )

    def _show(self, budget: int) -> None:
        """Hand on what has arrived of the sums, and send them again."""
        if self._sums.is_cpu:
            arrived = self._sums.clone()
        else:
            if self._arriving is not None and not self._arriving[1].query():
                return
            arrived = self._shown if self._arriving is None else self._arriving[0]
            on_host = torch.empty_like(self._shown, pin_memory=True)
            on_host.copy_(self._sums, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._arriving = on_host, event
        self._counted.verified((arrived - self._shown).tolist(), budget)
        self._shown = arrived
