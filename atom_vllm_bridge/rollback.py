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
