"""Reductions over blocks of the vocabulary, with the bits of Triton's interpreter.

A kernel reduces the vocabulary block by block, and a later one the blocks. A sum
depends on how its terms are grouped: numpy halves a contiguous run down to 128 terms,
so padding with zeros to a power of two from 128 on, or to more, gives the same bits.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atom_vllm_bridge.engine_kernels.float_rows import Float32


class BlockStats(NamedTuple):
    """[T, blocks] maxima m, and sums of exp(l − m), 0 where all is −inf."""

    maxima: Float32
    sums: Float32

    def logsumexp(self, rows: NDArray[np.integer]) -> Float32:
        """[rows] log Σ exp(l) over the whole vocabulary."""
        maxima = self.maxima[rows]
        largest = np.fmax.reduce(maxima, axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            scaled = self.sums[rows] * np.exp(maxima - largest[:, np.newaxis])
            return largest + np.log(sum_over_blocks(scaled))


def block_stats(logits: Float32, block_size: int) -> BlockStats:
    """Reduce each block of columns of logits [T, V] float32."""
    blocks = in_blocks(logits, block_size, -np.inf)
    maxima = np.fmax.reduce(blocks, axis=2)
    with np.errstate(invalid="ignore"):
        sums = np.exp(blocks - maxima[:, :, np.newaxis]).sum(axis=2)
    return BlockStats(maxima, np.where(maxima > -np.inf, sums, np.float32(0.0)))


def block_argmax(
    scores: NDArray[np.floating], block_size: int
) -> tuple[NDArray[np.floating], NDArray[np.int64]]:
    """Maximum and its lowest column in each block of columns; NaN counts as −inf.

    Args:
        scores: [T, V].

    Returns:
        (maximum [T, blocks], column in [0, V) [T, blocks] int64).
    """
    num_tokens, width = scores.shape
    whole = width // block_size
    parts = []
    if whole:
        blocks = scores[:, : whole * block_size]
        inside = blocks.reshape(num_tokens, whole, block_size).argmax(axis=2)
        parts.append(inside + np.arange(whole) * block_size)
    if width % block_size:
        tail = scores[:, whole * block_size :].argmax(axis=1)
        parts.append(tail[:, np.newaxis] + whole * block_size)
    column = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    maximum = scores[np.arange(num_tokens)[:, np.newaxis], column]
    if np.isnan(maximum).any():
        return block_argmax(np.where(np.isnan(scores), -np.inf, scores), block_size)
    return maximum, column


def in_blocks(values: Float32, block_size: int, fill: float) -> Float32:
    """[T, V] cut into [T, blocks, ·], padded with `fill` as sums need it."""
    num_tokens, width = values.shape
    num_blocks = -(-width // block_size)
    if num_blocks == 1:
        block_size = min(block_size, max(128, _power_of_two(width)))
    values = _padded(values, num_blocks * block_size, fill)
    return values.reshape(num_tokens, num_blocks, block_size)


def sum_over_blocks(values: Float32) -> Float32:
    """[T] sums of [T, blocks], which a kernel pads to a power of two."""
    return _padded(values, _power_of_two(values.shape[1]), 0.0).sum(axis=1)


def _padded(values: Float32, width: int, fill: float) -> Float32:
    if values.shape[1] == width:
        return values
    padded = np.full((len(values), width), fill, np.float32)
    padded[:, : values.shape[1]] = values
    return padded


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
