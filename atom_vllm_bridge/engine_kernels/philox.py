"""Philox4x32-10 (Salmon et al., SC 2011), the counter-based generator of tl.rand."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

ROUNDS = 10
# Each round multiplies words 2 and 0, in this order.
MULTIPLIERS = np.array([[0xCD9E8D57], [0xD2511F53]], np.uint64)
KEY_STEPS = np.arange(ROUNDS, dtype=np.uint64)[:, np.newaxis, np.newaxis] * np.array(
    [[0x9E3779B9], [0xBB67AE85]], np.uint64
)
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
RAND_SCALE = np.float32(4.6566127342e-10)  # 2⁻³¹ · (2²³ − 1) / 2²³

Words = NDArray[np.uint64]


def philox4x32(counter: Words, key: Words) -> Words:
    """Encrypt counters.

    Args:
        counter: [4, n], words below 2³².
        key: [2, n] or [2, 1], words below 2³².

    Returns:
        [4, n] words below 2³².
    """
    even, odd = counter[2::-2], counter[1::2]
    for round_key in (key + KEY_STEPS) & LOW:
        product = even * MULTIPLIERS
        # Words 0 and 2 take each other's high half; the low halves become 1 and 3.
        high = product >> HALF
        high ^= odd
        high ^= round_key
        even = high[::-1]
        odd = product & LOW
    return np.stack([even[1], odd[0], even[0], odd[1]])


def uniform(
    seeds: NDArray[np.int64], offsets: NDArray[np.integer[Any]]
) -> NDArray[np.float32]:
    """Triton's tl.rand(seed, offset), to the bit.

    Args:
        seeds: [n] int64.
        offsets: [n], 64 bits.

    Returns:
        [n] float32 in [0, 1).
    """
    seed, offset = seeds.astype(np.uint64), offsets.astype(np.int64).view(np.uint64)
    counter = np.zeros((4, len(seed)), np.uint64)
    counter[0], counter[1] = offset & LOW, offset >> HALF
    word = philox4x32(counter, np.stack([seed & LOW, seed >> HALF]))[0]
    signed = word.astype(np.uint32).view(np.int32)
    return np.where(signed < 0, ~signed, signed).astype(np.float32) * RAND_SCALE
