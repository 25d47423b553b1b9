"""Documents of problems, chats and prose, packed into rows of tokens.

A document starts with BOS and ends with EOS. Documents follow one another in a row; a row
starts with a document and cuts its last one off. Row i of a seed is the same whoever makes
it, so rows may be made by any number of processes, or again later.
"""

import functools
import itertools
import multiprocessing
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from atom_vllm_bridge.checkpoint.tokenizer import BOS, EOS, write_tokenizer
from training.problems import Problem, problem
from training.prose import paragraph

INPUTS = 2048
LENGTH = INPUTS + 1
"""Tokens of a row: the inputs and, one later, their targets."""

VOCABULARY = 1024
SHARES = {"shots": 0.6, "chat": 0.1, "prose": 0.3}
"""Of documents, not of tokens."""

MOST_SHOTS, MOST_PARAGRAPHS = 14, 4
CHUNK = 32
CHARACTERS_PER_TOKEN = 3.0
TOKENIZER_SEED, TOKENIZER_DOCUMENTS = "tokenizer", 600

PROMPT, ANSWER, PROSE = range(3)
"""What a stretch of text is: what a server is given, what it is to write, or prose."""

Piece = tuple[str, int]
"""A stretch of text and which of these it is."""


class Rows(NamedTuple):
    """tokens: [count, 2049] uint16. kinds: [count, 2049] uint8, PROMPT, ANSWER (`#### n`
    and the EOS after it included) or PROSE for each token."""

    tokens: np.ndarray
    kinds: np.ndarray


def prompt(question: str) -> str:
    """What a model is given to complete, as lm-eval's form of such tasks has it."""
    return f"Question: {question}\nAnswer:"


def shots(problems: Iterable[Problem]) -> Iterator[Piece]:
    """Problems one after another; the last answer ends the document."""
    before = BOS
    for made in problems:
        yield before + prompt(made.question), PROMPT
        yield f" {made.answer}", ANSWER
        before = "\n\n"
    yield EOS, ANSWER


def chat(made: Problem) -> Iterator[Piece]:
    """One turn in DeepSeek-V4's chat encoding, without thinking."""
    asked = f"{BOS}<｜User｜>{made.question}<｜Assistant｜></think>"
    yield asked, PROMPT
    yield made.answer, ANSWER
    yield EOS, ANSWER


def prose(paragraphs: Iterable[str]) -> Iterator[Piece]:
    """Paragraphs with an empty line between them."""
    before = BOS
    for text in paragraphs:
        yield before + text, PROSE
        before = "\n\n"
    yield EOS, PROSE


def document(rng: random.Random, split: str = "train") -> Iterator[Piece]:
    """Draw a document of a split: "train" or "text" (see `training.problems`).

    It is drawn while it is read. Pieces meet where the tokenizer splits anyway, so that they
    may be encoded apart.
    """
    (kind,) = rng.choices(list(SHARES), list(SHARES.values()))
    if kind == "shots":
        return shots(problem(rng, split) for _ in range(rng.randint(1, MOST_SHOTS)))
    if kind == "chat":
        return chat(problem(rng, split))
    count = rng.randint(1, MOST_PARAGRAPHS)
    return prose(paragraph(rng, split) for _ in range(count))


def write_corpus_tokenizer(out: Path, max_length: int) -> None:
    """The tokenizer of the corpus: 1024 ids, merges learnt from training documents."""
    rng = random.Random(TOKENIZER_SEED)
    texts = ("".join(t for t, _ in document(rng)) for _ in range(TOKENIZER_DOCUMENTS))
    plain = (text.replace(BOS, "").replace(EOS, "") for text in texts)
    write_tokenizer(out, VOCABULARY, max_length, texts=plain, single_digits=True)


def rows(
    tokenizer_dir: str | Path,
    seed: int,
    count: int,
    workers: int = 1,
    split: str = "train",
) -> Rows:
    """Rows 0 … count − 1 of a seed; see `chunks`."""
    parts = chunks(tokenizer_dir, seed, count, workers, split)
    tokens, kinds = zip(*parts, strict=True)
    return Rows(np.concatenate(tokens), np.concatenate(kinds))


def chunks(
    tokenizer_dir: str | Path,
    seed: int,
    count: int,
    workers: int = 1,
    split: str = "train",
) -> Iterator[Rows]:
    """Make rows 0 … count − 1 of a seed, CHUNK at a time; several workers run ahead.

    Args:
        tokenizer_dir: holds tokenizer.json.
        seed: other seeds, other rows.
        count: how many.
        workers: processes; they change nothing but the time. With more than one, call
            it under `if __name__ == "__main__":`, because processes are spawned.
        split: "train", or "text" for held-out rows (many times slower).

    Raises:
        ValueError: a vocabulary that uint16 does not hold.
    """
    file = str(Path(tokenizer_dir) / "tokenizer.json")
    size = Tokenizer.from_file(file).get_vocab_size()
    if size > 1 << 16:
        raise ValueError(f"{file} has {size} ids, but rows are uint16: 65536 at most")
    numbers = [range(i, min(i + CHUNK, count)) for i in range(0, count, CHUNK)]
    make = functools.partial(_chunk, file, seed, split)
    if workers == 1:
        yield from map(make, numbers)
        return
    # Spawned: a fork of a process with threads of torch or tokenizers may hang.
    with multiprocessing.get_context("spawn").Pool(workers, _one_thread) as pool:
        yield from pool.imap(make, numbers)


def _one_thread() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


@functools.lru_cache(maxsize=1)
def _tokenizer(file: str) -> Tokenizer:
    return Tokenizer.from_file(file)


def _chunk(file: str, seed: int, split: str, numbers: range) -> Rows:
    tokenizer = _tokenizer(file)
    parts = [_row(tokenizer, random.Random(f"{seed}/{i}"), split) for i in numbers]
    tokens, kinds = zip(*parts, strict=True)
    return Rows(np.stack(tokens), np.stack(kinds))


def _row(
    tokenizer: Tokenizer, rng: random.Random, split: str
) -> tuple[np.ndarray, np.ndarray]:
    pieces = itertools.chain.from_iterable(
        document(rng, split) for _ in itertools.count()
    )
    tokens: list[int] = []
    kinds: list[int] = []
    while len(tokens) < LENGTH:
        missing = (LENGTH - len(tokens)) * CHARACTERS_PER_TOKEN
        batch = []
        while missing > 0:
            piece = next(pieces)
            batch.append(piece)
            missing -= len(piece[0])
        encoded = tokenizer.encode_batch_fast(
            [text for text, _ in batch], add_special_tokens=False
        )
        for (_, kind), encoding in zip(batch, encoded, strict=True):
            ids = encoding.ids
            tokens += ids
            kinds += [kind] * len(ids)
    return np.array(tokens[:LENGTH], np.uint16), np.array(kinds[:LENGTH], np.uint8)
