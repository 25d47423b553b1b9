"""How often the target answers a held-out problem right while it is trained: greedy text, computed over whole rows.

A server with caches measures the same with `atom-vllm-bridge eval`; this needs nothing but the training forward.
"""

import random
import re

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from training import model
from training.corpus import prompt
from training.dense import Dense
from training.frozen import held_out
from training.layer import Tensors, Trace
from training.problems import Problem, problem

ANSWER_TOKENS, ROWS_AT_ONCE = 128, 256
_FINAL = re.compile(r"#### (-?[0-9]+)")


def exact_match(
    view: Tensors, tokenizer: Tokenizer, shots: int, count: int, device: str
) -> float:
    """Share of `count` held-out problems that are answered right, each after `shots` training problems.

    They are other problems than those of `atom-vllm-bridge eval`, whose figures must not have steered anything.
    """
    rng = random.Random("progress")
    prompts, wanted = [], []
    for made in held_out("progress", count, without=set()):
        solved = [_form(problem(rng)) for _ in range(shots)]
        prompts.append(
            tokenizer.encode("\n\n".join([*solved, prompt(made.question)])).ids
        )
        wanted.append(str(made.value))
    right = 0
    for first in range(0, count, ROWS_AT_ONCE):
        at = slice(first, first + ROWS_AT_ONCE)
        texts = _continue(view, tokenizer, prompts[at], device)
        found = (_FINAL.search(text) for text in texts)
        right += sum(
            match is not None and match[1] == want
            for match, want in zip(found, wanted[at], strict=True)
        )
    return right / count


@torch.no_grad()
def _continue(
    view: Tensors, tokenizer: Tokenizer, prompts: list[list[int]], device: str
) -> list[str]:
    longest = max(map(len, prompts)) + ANSWER_TOKENS
    length = -(-longest // 128) * 128
    dense = Dense(model.dimensions(), length, device)
    ids = torch.zeros(len(prompts), length, dtype=torch.int64)
    for row, given in enumerate(prompts):
        ids[row, : len(given)] = torch.tensor(given)
    ids = ids.to(device)
    ends = torch.tensor([len(given) for given in prompts], device=device)
    row = torch.arange(len(prompts), device=device)
    for _ in range(ANSWER_TOKENS):
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            streams, _ = dense.target(view, ids, Trace(), ())
            hidden = dense.hidden(view, streams[row, ends - 1].unsqueeze(1))
            logits = F.linear(hidden, view["head.weight"]).float()
        ids[row, ends] = logits[:, 0].argmax(-1)
        ends = ends + 1
    rows = ids.tolist()
    return [
        tokenizer.decode(text[len(given) : len(given) + ANSWER_TOKENS]).split(
            "\n\nQuestion"
        )[0]
        for text, given in zip(rows, prompts, strict=True)
    ]


def _form(made: Problem) -> str:
    return f"{prompt(made.question)} {made.answer}"
