"""Rows of training text on the device, made in the background while the device computes."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from training import corpus

FIRST, CHUNK = 512, 4096
"""Rows made before training can begin, and at once from then on."""


@dataclass(frozen=True)
class Rows:
    """A batch.

    Attributes:
        ids: [B, T + 1] int64.
        kinds: [B, T + 1] uint8, what each token is part of (corpus.py).
    """

    ids: torch.Tensor
    kinds: torch.Tensor


def batches(
    tokenizer: Path, seed: int, batch: int, steps: int, device: str, workers: int
) -> Iterator[Rows]:
    """`steps` batches of `batch` rows; the same for the same seed, whatever the number of workers."""
    total = batch * steps
    starts = [0, *range(FIRST - FIRST % batch, total, CHUNK - CHUNK % batch)]
    chunks = list(itertools.pairwise([*starts, total]))

    def make(first: int, end: int) -> corpus.Rows:
        return corpus.rows(tokenizer, seed + first, end - first, workers)

    with ThreadPoolExecutor(1) as background:
        coming = background.submit(make, *chunks[0])
        for following in [*chunks[1:], None]:
            made = coming.result()
            if following is not None:
                coming = background.submit(make, *following)
            for at in range(0, len(made.tokens), batch):
                tokens = made.tokens[at : at + batch].astype(np.int64)
                kinds = made.kinds[at : at + batch]
                yield Rows(
                    torch.from_numpy(tokens).to(device),
                    torch.from_numpy(kinds).to(device),
                )
