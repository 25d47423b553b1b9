"""Temperature and Gumbel-max sampling (vllm.v1.worker.gpu.sample.gumbel).

argmax(logits / temperature + noise) draws from softmax(logits / temperature) when
the noise is Gumbel. Here the noise of a token is a hash (MurmurHash3's 32-bit
finish) of the request's seed, the position and the token, so that a seed gives the
same tokens in any batch. Arithmetic is float32 or float64 in the kernel's order, by
the functions that Triton's interpreter uses: the results agree to the bit.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atom_vllm_bridge.engine_kernels.float_rows import (
    PASS_ELEMENTS,
    Float32,
    edited,
    widened,
)
from atom_vllm_bridge.engine_kernels.vocabulary_blocks import block_argmax

Uint32 = NDArray[np.uint32]

MODULE = "vllm.v1.worker.gpu.sample.gumbel"

# A draft's noise is drawn 2³⁰ positions away from its verification's.
DRAFT_POSITION_OFFSET = 1 << 30
SECOND_HASH = 0x9E3779B9


def _temperature(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    temperature_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Divide each row by its request's temperature; 0 and 1 leave it alone.

    Args:
        logits_ptr: [T, V'], V' ≥ vocab_size, any float type.
        expanded_idx_mapping_ptr: [T], request of each row.
        temperature_ptr: [requests] float32.
    """
    num_tokens = grid[0]
    requests = expanded_idx_mapping_ptr.numpy()[:num_tokens]
    temperature = widened(temperature_ptr)[requests]
    rows = np.flatnonzero((temperature != 0.0) & (temperature != 1.0))
    if not len(rows):
        return
    with edited(logits_ptr) as logits:
        if len(rows) == len(logits) == num_tokens:
            within = logits[:, :vocab_size]
            np.divide(within, temperature[:, np.newaxis], out=within)
            return
        for row in rows:
            logits[row, :vocab_size] /= temperature[row]


def _gumbel_sample(
    local_argmax_ptr: torch.Tensor,
    local_argmax_stride: int,
    local_max_ptr: torch.Tensor,
    local_max_stride: int,
    logits_cache_ptr: torch.Tensor | None,
    logits_cache_stride_0: int,
    logits_cache_stride_1: int,
    logits_cache_col_ptr: torch.Tensor | None,
    logits_cache_source_ptr: torch.Tensor | None,
    logits_cache_source_stride: int,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    seeds_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
    PER_TOKEN_COL: bool,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Store the winner of every block of the vocabulary.

    Args:
        local_argmax_ptr: [T, blocks] int64, out: winning token of the block.
        local_max_ptr: [T, blocks] float32 (float64 with USE_FP64), out: its score.
        logits_cache_ptr: [requests, columns, V'] or None, out: the source's rows,
            at column logits_cache_col_ptr (a scalar, or [T] with PER_TOKEN_COL).
        logits_cache_source_ptr: [T, V'] in the cache's type.
        logits_ptr: [T, V'], any float type.
        expanded_idx_mapping_ptr: [T], request of each row; −1 is padding, which is
            sampled greedily and cached nowhere.
        seeds_ptr, temp_ptr: [requests] int64, float32. Temperature 0 is greedy.
        pos_ptr: [T], position of each row in its sequence.
    """
    num_tokens = grid[0]
    requests = expanded_idx_mapping_ptr.numpy()[:num_tokens]
    valid = requests >= 0
    temperature = np.where(valid, widened(temp_ptr)[requests], np.float32(0.0))
    seeds = np.where(valid, seeds_ptr.numpy()[requests], 0)
    if logits_cache_ptr is not None:
        assert logits_cache_source_ptr is not None
        assert logits_cache_col_ptr is not None
        rows = torch.from_numpy(np.flatnonzero(valid))
        columns = logits_cache_col_ptr.view(-1)
        if PER_TOKEN_COL:
            columns = columns[rows]
        logits_cache_ptr[
            torch.from_numpy(requests[valid]).long(), columns.long(), :vocab_size
        ] = logits_cache_source_ptr[rows, :vocab_size]
    best_score, best_token = noised_block_argmax(
        widened(logits_ptr)[:num_tokens, :vocab_size],
        temperature,
        seeds,
        pos_ptr.numpy()[:num_tokens],
        BLOCK_SIZE,
        is_drafting=IS_DRAFTING,
        use_fp64=USE_FP64,
        divide=APPLY_TEMPERATURE,
    )
    local_argmax_ptr.numpy()[:num_tokens, : grid[1]] = best_token
    local_max_ptr.numpy()[:num_tokens, : grid[1]] = best_score


OVERRIDES = {
    f"{MODULE}._temperature_kernel": _temperature,
    f"{MODULE}._gumbel_sample_kernel": _gumbel_sample,
}


def noised_block_argmax(
    logits: Float32,
    temperature: Float32,
    seeds: NDArray[np.int64],
    positions: NDArray[np.integer],
    block_size: int,
    *,
    is_drafting: bool = False,
    use_fp64: bool = False,
    divide: bool = False,
) -> tuple[NDArray[np.floating], NDArray[np.int64]]:
    """Gumbel-max over each block of the vocabulary; plain argmax at temperature 0.

    Args:
        logits: [T, V] float32, left as it is.
        temperature: [T] float32.
        seeds: [T] int64.
        positions: [T].
        divide: divide the logits by the temperature first.

    Returns:
        (score [T, blocks] float32 or float64, token [T, blocks] int64). The lowest
        token wins a tie; NaN counts as −inf.
    """
    num_tokens, vocab_size = logits.shape
    is_noisy = temperature != 0.0
    noisy = np.flatnonzero(is_noisy)
    if divide:
        divisor = np.where(is_noisy, temperature, np.float32(1.0))
        logits = logits / divisor[:, np.newaxis]
    values: NDArray[np.floating] = logits.astype(np.float64) if use_fp64 else logits
    if not len(noisy):
        return block_argmax(values, block_size)
    seeds, positions = seeds[noisy], positions[noisy]
    if is_drafting:
        positions = positions + DRAFT_POSITION_OFFSET
    low_prefix = _hash_prefix(seeds, positions, 0)
    high_prefix = _hash_prefix(seeds, positions, SECOND_HASH) if use_fp64 else None
    tokens = _hashed_tokens(vocab_size)
    scores = np.empty_like(values) if len(noisy) == num_tokens else values.copy()
    for part, span in _passes(len(noisy), vocab_size):
        rows = part if len(noisy) == num_tokens else noisy[part]
        hashed = _finish_hash(low_prefix[part], tokens[span])
        noise: NDArray[np.floating]
        if high_prefix is None:
            noise = _gumbel_float32(hashed)
        else:
            high = _finish_hash(high_prefix[part], tokens[span])
            noise = _gumbel_float64(hashed, high)
        scores[rows, span] = np.add(values[rows, span], noise, out=noise)
    return block_argmax(scores, block_size)


def _passes(num_rows: int, width: int) -> Iterator[tuple[slice, slice]]:
    """(rows, columns) that cover [num_rows, width], about PASS_ELEMENTS in each."""
    rows_of_pass = max(1, PASS_ELEMENTS // width)
    for row in range(0, num_rows, rows_of_pass):
        for column in range(0, width, PASS_ELEMENTS):
            yield (
                slice(row, row + rows_of_pass),
                slice(column, column + PASS_ELEMENTS),
            )


# MurmurHash3_x86_32 (Austin Appleby, public domain). A word k is mixed into the
# state h by h ← rotl(h ^ scramble(k), 13)·5 + 0xe6546b64. Rotation distributes over
# xor, so the token's half, rotl(scramble(token), 13), is computed once for all rows.


def _rotate_left(value: Uint32, shift: int) -> Uint32:
    return (value << np.uint32(shift)) | (value >> np.uint32(32 - shift))


def _scramble(word: Uint32) -> Uint32:
    return _rotate_left(word * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)


def _mix(state: Uint32, word: Uint32) -> Uint32:
    state = _rotate_left(state ^ _scramble(word), 13)
    return state * np.uint32(5) + np.uint32(0xE6546B64)


@lru_cache(maxsize=4096)
def _seed_state(seed: int, domain: int) -> int:
    """The state after a request's seed, which lasts as long as the request."""
    state = np.array([domain], np.uint32)
    for word in (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF):
        state = _mix(state, np.array([word], np.uint32))
    return int(state[0])


def _hash_prefix(
    seeds: NDArray[np.int64], positions: NDArray[np.integer], domain: int
) -> Uint32:
    """[T] rotl(h, 13), where h has mixed in the seed's two words and the position."""
    states = [_seed_state(seed, domain) for seed in seeds.tolist()]
    state = _mix(np.array(states, np.uint32), positions.astype(np.uint32))
    return _rotate_left(state, 13)


@lru_cache(maxsize=8)
def _hashed_tokens(vocab_size: int) -> Uint32:
    """[V] rotl(scramble(token), 13)."""
    return _rotate_left(_scramble(np.arange(vocab_size, dtype=np.uint32)), 13)


def _finish_hash(prefix: Uint32, hashed_tokens: Uint32) -> Uint32:
    """[rows, tokens] hash of 16 bytes: seed, position, token."""
    h = prefix[:, np.newaxis] ^ hashed_tokens
    h *= np.uint32(5)
    h += np.uint32(0xE6546B64)
    h ^= np.uint32(16)
    shifted = h >> np.uint32(16)
    h ^= shifted
    h *= np.uint32(0x85EBCA6B)
    h ^= np.right_shift(h, np.uint32(13), out=shifted)
    h *= np.uint32(0xC2B2AE35)
    h ^= np.right_shift(h, np.uint32(16), out=shifted)
    return h


def _gumbel_float32(hashed: Uint32) -> Float32:
    """−log(−log1p(−u)), u = (hash + ½)·2⁻³² rounded to float32."""
    high = (hashed >> np.uint32(16)).view(np.int32).astype(np.float32)
    low = (hashed & np.uint32(0xFFFF)).view(np.int32).astype(np.float32)
    low += np.float32(0.5)
    low *= np.float32(2.0**-32)
    high *= np.float32(2.0**-16)
    uniform = np.add(high, low, out=high)
    # −log1p(−u): eight terms of its series below ¼, −log(1 − u) above.
    series = uniform * np.float32(1.0 / 8.0)
    for denominator in (7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0):
        series += np.float32(1.0 / denominator)
        series *= uniform
    direct = np.subtract(np.float32(1.0), uniform, out=low)
    np.maximum(direct, np.float32(2.0**-24), out=direct)
    np.log(direct, out=direct)
    np.negative(direct, out=direct)
    exponential = np.where(uniform < np.float32(0.25), series, direct)
    np.log(exponential, out=exponential)
    return np.negative(exponential, out=exponential)


def _gumbel_float64(low: Uint32, high: Uint32) -> NDArray[np.float64]:
    """−log(−log(u)), u = (r + ½)·2⁻⁵³ below 1, r the upper 53 bits of two hashes."""
    random53 = ((high.astype(np.uint64) << np.uint64(32)) | low) >> np.uint64(11)
    uniform = random53.astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-53
    uniform[uniform == 1.0] -= 2.0**-53
    exponential = np.negative(np.log(uniform, out=uniform), out=uniform)
    return np.negative(np.log(exponential, out=exponential), out=exponential)
