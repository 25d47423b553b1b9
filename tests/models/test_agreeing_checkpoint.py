"""Preset "agreeing": drafts are accepted often and not always, and every part of the draft has a share in it."""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
import torch.nn.functional as F
from harness import SMALL, config_of
from safetensors.torch import load_file

from atom_vllm_bridge.checkpoint.make import make
from atom_vllm_bridge.models.deepseek_v4.config import MOE, SLIDING
from atom_vllm_bridge.models.deepseek_v4.dspark import DSparkConfig, DSparkDraft
from atom_vllm_bridge.models.deepseek_v4.loading import iterate, load
from atom_vllm_bridge.models.deepseek_v4.local_state import LocalState
from atom_vllm_bridge.models.deepseek_v4.model import DeepseekV4Model
from atom_vllm_bridge.models.deepseek_v4.mtp import MTPDraft
from atom_vllm_bridge.models.quantization import block_fp8, mxfp4

BLOCK, SPOKEN, SHORTEST, LONGEST = 5, 64, 24, 200
STAGES = 3


@cache
def checkpoint(layout="bf16", draft="dspark", vocabulary=1024, seed=0):
    return make(
        Path(mkdtemp(prefix="agreeing-")) / "checkpoint",
        "agreeing",
        layout,
        seed=seed,
        draft=draft,
        overrides=SMALL | {"vocab_size": vocabulary},
        tokenizer=False,
    )


@dataclass
class Text:
    """One sequence: random tokens, then the target's own.

    Attributes:
        tokens: [N] ids.
        first: how many of them are random.
        logits: [N, V], the target's at each token.
        taps: [N, n · d] of the tapped layers.
        streams: [N, n, d] after the last layer.
    """

    tokens: torch.Tensor
    first: int
    logits: torch.Tensor
    taps: torch.Tensor
    streams: torch.Tensor


def filled(directory):
    """The target and the draft of a checkpoint, in float32."""
    config, hf = config_of(directory), json.loads(
        (directory / "config.json").read_text()
    )
    target = DeepseekV4Model(config, dtype=torch.float32)
    kind = {"dtype": torch.float32, "device": "cpu", "kv_codec": target.codec}
    if "dspark_markov_rank" in hf:
        dspark = DSparkConfig.from_hf(hf)
        draft = DSparkDraft(config, dspark, STAGES, confidence=True, **kind)
    else:
        draft = MTPDraft(config, **kind)
    slots = target.weight_slots() | draft.weight_slots()
    load(slots, iterate(directory, progress=False))
    return target, draft


@torch.inference_mode()
def speak(target, aux, prompts, temperature=0.0):
    """Let the target go on from each prompt."""
    count, generator = len(prompts), torch.Generator().manual_seed(7)
    state = LocalState(
        target.config, count, max(map(len, prompts)) + SPOKEN, target.codec
    )
    pieces = [[] for _ in prompts]
    starts, now = [0] * count, list(prompts)
    for _ in range(SPOKEN + 1):
        lengths = [len(ids) for ids in now]
        batch, caches = state.step(
            list(zip(range(count), starts, lengths, strict=True))
        )
        streams, taps = target(torch.cat(now), batch, caches, aux)
        logits = target.logits(target.reduce(streams))
        rows = (torch.cat(now), logits, torch.cat(taps, -1), streams)
        for piece, *part in zip(pieces, *(x.split(lengths) for x in rows), strict=True):
            piece.append(part)
        starts = [a + b for a, b in zip(starts, lengths, strict=True)]
        last = torch.stack([piece[-1][1][-1] for piece in pieces])
        if temperature:
            said = torch.multinomial(
                (last / temperature).softmax(-1), 1, generator=generator
            )
        else:
            said = last.argmax(-1, keepdim=True)
        now = list(said)
    texts = []
    for prompt, piece in zip(prompts, pieces, strict=True):
        tokens, logits, taps, streams = map(torch.cat, zip(*piece, strict=True))
        texts.append(Text(tokens, len(prompt), logits, taps, streams))
    return texts


def prompts_of(vocabulary, count=16):
    g = torch.Generator().manual_seed(3)
    step = (LONGEST - SHORTEST) // (count - 1)
    return [
        torch.randint(vocabulary - 1, (SHORTEST + step * i,), generator=g)
        for i in range(count)
    ]


@cache
def spoken(directory, temperature=0.0):
    target, draft = filled(directory)
    aux = tuple(layer + 1 for layer in draft.dspark.target_layer_ids)
    vocabulary = target.config.vocab_size
    return target, draft, speak(target, aux, prompts_of(vocabulary), temperature)


@torch.inference_mode()
def drafted(target, draft, texts, every=4):
    """Draft a block at many places of each text, given what the target said there.

    Returns:
        The draft's and the target's logits, [places, BLOCK, V] each.
    """
    places = [
        (text, at)
        for text in texts
        for at in range(text.first, len(text.tokens) - BLOCK, every)
    ]
    config = replace(
        target.config,
        num_hidden_layers=STAGES,
        layer_types=(SLIDING,) * STAGES,
        mlp_layer_types=(MOE,) * STAGES,
    )
    state = LocalState(config, len(places), LONGEST + SPOKEN + BLOCK, target.codec)
    batch, caches = state.step([(i, 0, at) for i, (_, at) in enumerate(places)])
    context = draft.context(torch.cat([text.taps[:at] for text, at in places]))
    draft.write_context(context, batch.positions, [layer.window for layer in caches])
    batch, caches = state.step([(i, at, BLOCK) for i, (_, at) in enumerate(places)])

    def block(rows):
        return torch.stack([rows(text)[at : at + BLOCK] for text, at in places])

    tokens = block(lambda text: text.tokens)
    noise = draft.dspark.noise_token_id
    ids = F.pad(tokens[:, :1], (0, BLOCK - 1), value=noise).flatten()
    hidden = draft(target.embed_tokens(ids), batch, [layer.window for layer in caches])
    U = target.logits(draft.head_input(hidden)).view(len(places), BLOCK, -1)
    bias = draft.markov_bias(draft.markov_embed(tokens.flatten())).view_as(U)
    return U + bias, block(lambda text: text.logits)


def accepted(ours, theirs):
    """[BLOCK], how often greedy drafts are accepted up to each slot."""
    right = ours.argmax(-1) == theirs.argmax(-1)
    return right.long().cumprod(-1).float().mean(0)


@pytest.fixture
def restored():
    """Zero tensors for one test; they come back after it."""
    kept = []

    def zero(*tensors):
        kept.extend((tensor, tensor.clone()) for tensor in tensors)
        for tensor in tensors:
            tensor.zero_()

    yield zero
    for tensor, values in kept:
        tensor.copy_(values)


def test_dspark_drafts_are_accepted_often_and_not_always():
    rates = accepted(*drafted(*spoken(checkpoint())))
    assert 2.2 <= 1 + rates.sum() <= 4.5, rates
    assert rates[0] < 0.95
    assert rates[2] > 0.1


@pytest.mark.parametrize("stage", range(STAGES))
def test_without_what_a_stage_writes_less_is_accepted(stage, restored):
    target, draft, texts = spoken(checkpoint())
    with_it = accepted(*drafted(target, draft, texts))
    block = draft.stages[stage]
    restored(block.attn.wo_b, block.ffn.w2, block.ffn.shared_w2)
    without = accepted(*drafted(target, draft, texts))
    assert without[0] < with_it[0] - 0.02
    assert without.sum() < with_it.sum() - 0.1


def test_without_the_markov_head_only_the_first_slot_is_accepted(restored):
    target, draft, texts = spoken(checkpoint())
    with_it = accepted(*drafted(target, draft, texts))
    restored(draft.markov_w2)
    without = accepted(*drafted(target, draft, texts))
    assert without[0] > 0.5
    assert without[1] < 0.1 < with_it[1]


def test_at_temperature_1_a_small_vocabulary_rejects_between_a_fifth_and_four_fifths():
    texts = spoken(checkpoint(vocabulary=64), temperature=1.0)
    ours, theirs = (logits.softmax(-1) for logits in drafted(*texts))
    # The chance that a token drawn from ours is accepted, and that a draft of two is.
    overlap = torch.minimum(ours, theirs).sum(-1)
    one = overlap[:, 0].mean()
    two = (overlap[:, 0] * overlap[:, 1]).mean()
    assert 0.2 <= (one + two) / 2 <= 0.8
    assert one < 0.95


@torch.inference_mode()
def test_mtp_drafts_are_accepted_often_and_not_always():
    target, draft = filled(checkpoint(draft="mtp"))
    texts = speak(target, (1,), prompts_of(target.config.vocab_size))
    config = replace(
        target.config,
        num_hidden_layers=1,
        layer_types=(SLIDING,),
        mlp_layer_types=(MOE,),
    )
    state = LocalState(config, len(texts), LONGEST + SPOKEN, target.codec)
    batch, caches = state.step([(i, 0, len(t.tokens) - 1) for i, t in enumerate(texts)])
    ids = torch.cat([text.tokens[1:] for text in texts])
    streams = torch.cat([text.streams[:-1] for text in texts])
    out = draft(target.embed_tokens(ids), streams, batch, caches[0].window)
    ours = target.logits(draft.head_input(out)).argmax(-1)
    lengths = [len(text.tokens) - 1 for text in texts]
    right = torch.cat(
        [
            drafts[text.first - 1 :] == text.logits[text.first :].argmax(-1)
            for drafts, text in zip(ours.split(lengths), texts, strict=True)
        ]
    )
    assert 0.3 <= right.float().mean() <= 0.9


def tensors_of(directory):
    return load_file(directory / "model-00001-of-00001.safetensors")


@pytest.mark.parametrize("draft", ["dspark", "mtp"])
def test_bf16_holds_what_the_quantised_layout_dequantises_to(draft):
    plain = tensors_of(checkpoint(draft=draft))
    quantised = tensors_of(checkpoint("mxfp4", draft))
    for name, values in plain.items():
        stored = quantised[name]
        scale = quantised.get(name.removesuffix(".weight") + ".scale")
        if scale is not None:
            module = mxfp4 if stored.dtype == torch.int8 else block_fp8
            stored = module.dequantize(stored, scale)
        assert torch.equal(stored.to(values.dtype), values), name


def test_the_same_seed_gives_the_same_bytes():
    first, again = tensors_of(checkpoint()), tensors_of(checkpoint.__wrapped__())
    assert first.keys() == again.keys()
    for name, values in first.items():
        assert torch.equal(values, again[name]), name
    other = tensors_of(checkpoint(seed=1))
    w2 = f"mtp.{STAGES - 1}.markov_head.markov_w2.weight"
    assert not torch.equal(other[w2], first[w2])
