"""A byte-level BPE tokenizer made on the spot: every text in, the same text out.

Its special tokens are those that DeepSeek-V4's chat encoding and vLLM's `deepseek_v4`
reasoning and tool parsers look for, one id each.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
CONTROL = (BOS, EOS, PAD)
"""Left out of decoded text on request; ids 0, 1, 2."""

MARKERS = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    "<｜deepseek_image｜>",
)
"""Part of the text that parsers read, so always decoded."""

SMALLEST = len(CONTROL) + len(MARKERS) + 256


def write_tokenizer(
    out: Path,
    vocab_size: int,
    max_length: int,
    *,
    texts: Iterable[str] | None = None,
    single_digits: bool = False,
) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    Args:
        out: an existing directory.
        vocab_size: ids: special tokens, 256 bytes, merges, then entries that no text
            reaches, so that every id of the model decodes to something.
        max_length: `model_max_length` of the tokenizer.
        texts: what the merges are learnt from; the text below by default.
        single_digits: every digit is a token of its own, so that a small model can
            learn to calculate.

    Raises:
        ValueError: a vocabulary that cannot hold the bytes.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from tokenizers.processors import TemplateProcessing

    if vocab_size < SMALLEST:
        raise ValueError(
            f"vocab_size = {vocab_size} holds no byte-level tokenizer: {SMALLEST} or more, "
            "or leave the tokenizer out"
        )
    pre_tokenizer = _pre_tokenizer(single_digits)
    vocab, merges = _vocabulary(
        vocab_size, [TEXT] if texts is None else texts, pre_tokenizer
    )
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocab[BOS])]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=False) for token in MARKERS]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (out / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def _pre_tokenizer(single_digits: bool) -> Any:
    from tokenizers import pre_tokenizers

    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if not single_digits:
        return words
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, words])


def _vocabulary(
    size: int, texts: Iterable[str], pre_tokenizer: Any
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Token → id, and the merges in order of rank."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizer
    trained.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=size - len(CONTROL) - len(MARKERS),
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    learnt = json.loads(trained.to_str())["model"]["merges"]
    merges = [(left, right) for left, right in learnt]
    tokens = [*CONTROL, *MARKERS, *alphabet, *(left + right for left, right in merges)]
    tokens += [f"<reserved_{i}>" for i in range(size - len(tokens))]
    return {token: i for i, token in enumerate(tokens)}, merges


TEXT = """\
A river begins as rain on high ground. The water finds the lowest path between the
stones, and where two paths meet the stream grows. By the time it reaches the valley it
carries sand, leaves and the colour of the hills, and people have built a town where it
can be crossed. The town has a bridge, a market and a school. In the morning the children
walk over the bridge, and in the evening the lamps are lit one after another along the
bank, until the whole street is reflected in the slow black water.

What is a bridge? It is a promise that the road goes on. Someone measured the distance,
chose the stone, drew the arch and checked the numbers again, because a bridge that is
almost right is wrong. The same is true of a program. It reads a question, thinks about
it step by step, calls the tools that it needs and writes an answer. When the answer is
not known, the right thing to say is that it is not known.

Hello, my name is Ada, and I would like to know what the weather will be tomorrow. The
capital of France is Paris; the capital of Italy is Rome; the capital of Japan is Tokyo.
Once upon a time there was a number that wanted to be a letter. "You count things," said
the letters, "and we tell about them. Why would you change?" The number thought for a
long while. "Because I have never been part of a story," it said, and so they made room
for it on the first line of the first page.

To compute the sum of a list, start with zero, take each value in turn and add it. For
example, the sum of 1, 2, 3, 4 and 5 is 15. To find the largest value, keep the best one
seen so far and compare it with every other. These two loops have the same shape: there
is a state, there is a next item, and there is a rule that joins them. A good function
does one thing, has a name that says which, and returns a value that can be tested.

def add(left, right):
    return left + right

for index in range(10):
    print(index, add(index, 1))

{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}
{"type": "function", "parameters": {"properties": {"query": {"type": "string"}}}}

You are a helpful assistant. Please answer the question using the information that you
have been given. If a tool is available, call it with the required parameters and wait
for the result before you continue. Explain your reasoning, but keep the final answer
short. Thank you very much; this was exactly what I was looking for. Could you also show
me how many people live there, how far it is from here, and which train I should take?

Light takes eight minutes to travel from the sun to the earth. Sound is much slower: it
needs about three seconds for every kilometre. If you see lightning and count the seconds
until the thunder, you can tell how far away the storm is. Winter nights are long in the
north, and summer days hardly end. The moon turns around the earth in twenty-seven days,
the earth turns around the sun in a year, and none of them ever arrives anywhere.
"""
