"""How far a prefix hit is rolled back where state lies in rings, which a hit finds empty.

The last N tokens of a hit are computed again, to fill the rings: vLLM schedules them (`KVCacheSpec.prefix_replay_tokens`), and
what they would write into cached blocks, which other requests read, is left out. A token's raw keys depend, layer by layer,
on one window more of tokens before it, so after layers · (window − 1) replayed tokens all state is what it was; a draft that
reads the target's last layer needs one window more. Compressed entries are cached, so that nothing further back is needed.

| policy | tokens | |
|---|---|---|
| `exact` | layers · (window − 1), one window more with a draft | equals a cold run |
| `atom` | max(window + K, index_topk) | what ROCm/ATOM rolls back |
| `window` | window | |
| a number | so many | at least the window |

All are rounded up to a multiple of 128. Less than `exact` approximates.
"""

import numpy as np
import torch
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.input_batch import InputBatch

from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config

ALIGNMENT = 128


def rollback_tokens(policy: str, config: DeepseekV4Config, drafts: int) -> int:
    """N.

    Args:
        policy: `exact`, `atom`, `window`, or a number of tokens.
        config: the target's.
        drafts: tokens drafted at a time; 0: none.

    Raises:
        ValueError: fewer tokens than a window, whose keys a first token after the hit reads.
    """
    window = config.sliding_window
    if policy == "exact":
        tokens = config.num_hidden_layers * (window - 1) + (window if drafts else 0)
    elif policy == "atom":
        tokens = max(window + drafts, config.index_topk)
    else:
        tokens = window if policy == "window" else int(policy)
    if tokens < window:
        raise ValueError(
            f"prefix_rollback = {tokens} is less than the sliding window of {window} tokens, which would be read half empty. "
            f"Set {window} or more, or a policy: exact, atom, window."
        )
    return -(-tokens // ALIGNMENT) * ALIGNMENT


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
