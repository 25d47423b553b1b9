"""Rows of training text on the device, made in the background while the device computes."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from training import corpus


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
    nothing = np.empty((0, corpus.LENGTH), np.uint8)
    left = corpus.Rows(nothing.astype(np.uint16), nothing)
    for part in corpus.chunks(tokenizer, seed, batch * steps, workers):
        made = corpus.Rows(*map(np.concatenate, zip(left, part, strict=True)))
        whole = len(made.tokens) // batch * batch
        for at in range(0, whole, batch):
            ids = torch.from_numpy(made.tokens[at : at + batch].astype(np.int64))
            kinds = torch.from_numpy(made.kinds[at : at + batch])
            yield Rows(ids.to(device), kinds.to(device))
        left = corpus.Rows(made.tokens[whole:], made.kinds[whole:])
