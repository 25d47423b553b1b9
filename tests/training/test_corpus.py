"""Rows of tokens: the formats, the packing, the tokenizer, and who made them."""

import random
import re
from itertools import groupby, pairwise

import numpy as np
import pytest

from atom_vllm_bridge.checkpoint.tokenizer import BOS, CONTROL, EOS, MARKERS
from training import corpus
from training.problems import problem, text_is_held_out
from training.prose import beginning, paragraph

# As a completion, and in a chat.
QUESTION = re.compile(
    r"(?:Question: |<｜User｜>)(.*)(?:\nAnswer:|<｜Assistant｜>)", re.MULTILINE
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    corpus.write_corpus_tokenizer(directory, 4096)
    return directory


@pytest.fixture(scope="module")
def tokenizer(directory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def made(directory):
    return corpus.rows(directory, seed=5, count=40)


def joined(pieces) -> str:
    return "".join(text for text, _ in pieces)


def test_the_vocabulary_is_full_and_digits_are_single_tokens(tokenizer):
    assert len(tokenizer) == corpus.VOCABULARY
    assert not any(token.startswith("<reserved") for token in tokenizer.get_vocab())
    plain = [t for t in tokenizer.get_vocab() if t not in (*CONTROL, *MARKERS)]
    assert all(len(t) == 1 for t in plain if any(c.isdigit() for c in t))
    ids = tokenizer.encode("It makes 907 × 12 = 345.", add_special_tokens=False)
    assert [t for t in map(tokenizer.decode, ids) if t.strip().isdigit()] == list(
        "90712345"
    )


def test_text_survives_the_tokenizer(tokenizer):
    rng = random.Random(31)
    texts = [joined(corpus.document(rng)) for _ in range(20)]
    for text in [*texts, "  Né 🙂\n\n\t12 34!  "]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text


def test_the_tokenizer_is_the_same_every_time(directory, tmp_path):
    corpus.write_corpus_tokenizer(tmp_path, 4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (directory / name).read_bytes()


def test_shots_are_written_as_lm_eval_writes_them():
    rng = random.Random(32)
    first, second = problem(rng), problem(rng)
    assert joined(corpus.shots([first, second])) == (
        f"{BOS}Question: {first.question}\nAnswer: {first.answer}\n\n"
        f"Question: {second.question}\nAnswer: {second.answer}{EOS}"
    )


def test_a_chat_is_what_vllm_encodes():
    from vllm.tokenizers.deepseek_v4_encoding import encode_messages

    one = problem(random.Random(33))
    asked = {"role": "user", "content": one.question}
    told = {"role": "assistant", "content": one.answer}
    pieces = list(corpus.chat(one))
    assert joined(pieces) == encode_messages([asked, told], thinking_mode="chat")
    prompt = encode_messages([asked], thinking_mode="chat")
    assert pieces[0] == (prompt, corpus.PROMPT)
    assert {kind for _, kind in pieces[1:]} == {corpus.ANSWER}


def test_prose_is_paragraphs_with_an_empty_line_between():
    rng = random.Random(34)
    texts = [paragraph(rng) for _ in range(3)]
    assert joined(corpus.prose(texts)) == BOS + "\n\n".join(texts) + EOS


def test_pieces_encode_apart_as_they_do_together(tokenizer, made):
    """A server encodes the whole prompt at once."""
    for row in made.tokens:
        text = tokenizer.decode(row)
        whole = tokenizer.encode(text, add_special_tokens=False)
        # The last token of a row may be cut from what it would have been merged with.
        assert whole[: len(row) - 8] == row[:-8].tolist()


def test_rows_are_whole_documents_but_for_the_last(tokenizer, made):
    assert made.tokens.shape == made.kinds.shape == (40, corpus.LENGTH)
    assert made.tokens.dtype == np.uint16
    assert made.kinds.dtype == np.uint8
    for row in made.tokens:
        begins = row == tokenizer.bos_token_id
        ends = row == tokenizer.eos_token_id
        assert begins[0]
        assert (begins[1:] == ends[:-1]).all()


def test_the_answers_are_what_a_server_would_generate(tokenizer, made):
    asked = set()
    for row, kinds in zip(made.tokens, made.kinds, strict=True):
        runs = [
            (kind, tokenizer.decode([token for _, token in run]))
            for kind, run in groupby(zip(kinds, row, strict=True), lambda pair: pair[0])
        ]
        for (_, before), (kind, text) in pairwise(runs[:-1]):
            if kind == corpus.ANSWER:
                assert before.endswith(("\nAnswer:", "</think>"))
                last = text.removesuffix(EOS).splitlines()[-1]
                assert last.startswith("#### ")
                assert last[5:].isdigit()
                asked.add(before.endswith("</think>"))
    assert asked == {True, False}


def test_prose_is_told_from_problems(tokenizer, made):
    for row, kinds in zip(made.tokens, made.kinds, strict=True):
        prose = tokenizer.decode(row[kinds == corpus.PROSE])
        assert "Question:" not in prose
        assert "####" not in prose
    assert 0.1 < (made.kinds == corpus.PROSE).mean() < 0.4


def test_rows_of_training_hold_nothing_that_is_held_out(tokenizer, made):
    asked, told = set(), set()
    for row in made.tokens:
        for document in tokenizer.decode(row).removeprefix(BOS).split(f"{EOS}{BOS}"):
            asked |= set(QUESTION.findall(document))
            if not QUESTION.search(document):
                told |= set(document.split("\n\n")[:-1])
    assert len(asked) > 300
    assert len(told) > 30
    assert not any(map(text_is_held_out, asked))
    assert not any(text_is_held_out(beginning(text, 2)) for text in told)


def test_held_out_rows_hold_nothing_else(directory, tokenizer):
    (row,) = corpus.rows(directory, seed=7, count=1, split="text").tokens
    asked = QUESTION.findall(tokenizer.decode(row))
    assert len(asked) > 3
    assert all(map(text_is_held_out, asked))


def test_rows_depend_on_their_number_and_seed_alone(directory, made):
    fewer = corpus.rows(directory, seed=5, count=3)
    assert (fewer.tokens == made.tokens[:3]).all()
    other = corpus.rows(directory, seed=6, count=3)
    assert (other.tokens != fewer.tokens).any(axis=1).all()
    assert len(np.unique(made.tokens, axis=0)) == len(made.tokens)


def test_workers_change_nothing(directory, made):
    parallel = corpus.rows(directory, seed=5, count=40, workers=2)
    assert (parallel.tokens == made.tokens).all()
    assert (parallel.kinds == made.kinds).all()
