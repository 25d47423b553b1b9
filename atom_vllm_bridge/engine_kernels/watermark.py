"""Keyed Gumbel noise of a watermark (vllm.v1.worker.gpu.sample.watermark).

A detector that knows the key draws the same noise again: it depends on the key, the
tokens before the row and the candidate token, not on the request's seed.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from atom_vllm_bridge.engine_kernels.float_rows import Float32
from atom_vllm_bridge.engine_kernels.philox import LOW, Words, philox4x32

CONTEXT_DOMAIN = 0x574D4358
TOKEN_DOMAIN = 0x574D544B


def watermarked_scores(
    logits: Float32, contexts: torch.Tensor, keys: tuple[int, int]
) -> Float32:
    """Logits plus the keyed noise; NaN counts as −inf.

    Args:
        logits: [n, V] float32.
        contexts: [n, width] integers, the tokens before each row, −1 for none.
        keys: two words below 2³².
    """
    words = np.array(keys, np.uint64)
    states = _context_states(contexts.numpy().astype(np.uint32), words)
    # One block of Philox serves four tokens.
    groups = np.arange(-(-logits.shape[1] // 4), dtype=np.uint64)
    domain = np.array([0, TOKEN_DOMAIN], np.uint64)
    scores = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    for row, state in enumerate(states.T):
        counter = np.empty((4, len(groups)), np.uint64)
        counter[0], counter[1:] = groups, state[:3, np.newaxis]
        key = words ^ domain ^ np.array([state[3], 0], np.uint64)
        random = philox4x32(counter, key[:, np.newaxis]).T.reshape(-1)
        uniform = _below_one(random[: logits.shape[1]])
        scores[row] -= np.log(-np.log(uniform))
    return scores


def _context_states(contexts: NDArray[np.uint32], keys: Words) -> Words:
    """[4, n] words that four tokens at a time are encrypted into."""
    num_rows, width = contexts.shape
    state = np.zeros((4, num_rows), np.uint64)
    state[0], state[1] = CONTEXT_DOMAIN, width
    for offset in range(0, width, 4):
        # What lies past the context counts as −2, −3 and −4.
        tokens = np.empty((4, num_rows), np.uint64)
        tokens[:] = LOW - np.arange(4, dtype=np.uint64)[:, np.newaxis]
        part = contexts[:, offset : offset + 4].T
        tokens[: len(part)] = part
        key = keys ^ np.array([offset, 0], np.uint64)
        state = philox4x32(state ^ tokens, key[:, np.newaxis])
    return state


def _below_one(random: Words) -> Float32:
    """The float32 just below (r + 1) · 2⁻²⁴, r the upper 24 bits: in (0, 1)."""
    mantissa = (random >> np.uint64(8)).astype(np.uint32) + np.uint32(1)
    scaled = mantissa.astype(np.float32) * np.float32(2.0**-24)
    return (scaled.view(np.uint32) - np.uint32(1)).view(np.float32)
