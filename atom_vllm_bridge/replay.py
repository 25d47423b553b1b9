"""Which requests compute the end of a prefix hit again, to fill their rings; how much of it, rollback.py says."""

import numpy as np
import torch
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.input_batch import InputBatch


class Replays:
    """Which requests replay, and from where; vLLM says so once, when a request starts or is resumed.

    Args:
        tokens: N.
        max_requests: slots.
    """

    def __init__(self, tokens: int, max_requests: int) -> None:
        self.tokens = tokens
        # Position of the first replayed token; 0: the request has no hit.
        self._start = np.zeros(max_requests, np.int64)

    def add(self, slot: int, request: NewRequestData) -> None:
        """A request takes a slot."""
        self._start[slot] = request.replay_start

    def begin(
        self, batch: InputBatch, slot_mappings: torch.Tensor
    ) -> torch.Tensor | None:
        """Keep a step from writing replayed tokens into blocks.

        Args:
            batch: the step.
            slot_mappings: [groups, T] int64; −1 is put where a token is replayed.

        Returns:
            [R] int64, where the replay of each request began, 0 for the others; None: none replays.
        """
        count = batch.num_reqs
        # Beyond its prompt a request is beyond its hit, too.
        start = np.where(
            batch.is_prefilling_np[:count],
            self._start[batch.idx_mapping_np[:count]],
            0,
        )
        if not start.any():
            return None
        device = slot_mappings.device
        visible_from = torch.from_numpy(start).to(device)
        ends = batch.query_start_loc[1 : count + 1]
        tokens = int(batch.query_start_loc_np[count])
        token = torch.arange(tokens, device=device)
        first = visible_from[torch.bucketize(token, ends, right=True)]
        replayed = (first > 0) & (batch.positions[:tokens] < first + self.tokens)
        slot_mappings[:, :tokens].masked_fill_(replayed, -1)
        return visible_from
