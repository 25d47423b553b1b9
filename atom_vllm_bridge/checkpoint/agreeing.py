"""Weights with which a draft agrees with its target often, but not always: preset "agreeing".

Everything that can carry agreement has a share in it, so that what is computed wrong is accepted less:

- A draft stage is a copy of one of the target's last layers. These write into the residual stream six to eight times as
  strongly as the layers before them, which no stage stands for; so the first slot's U is close to the target's logits.
- Hidden channel 0 is the noise token's: its embedding lies there, and the output head does not read it. In the slots of
  noise tokens U is then what the stages make of the context, and a bias that is the same in all of them.
- The Markov head is an associative memory. W1 holds a random code for each token, and W2 adds up, at each token, the codes
  of the tokens after which the target says it. One column of W1 is constant, and its row of W2 takes that bias back.

The memory is weak: it decides where U is flat, and loses against a U that is wrong, or a bias that is not what it takes back.
MTP's e_proj and h_proj are multiples of the identity; its layer is a copy of the target's last one.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from atom_vllm_bridge.models.deepseek_v4.checkpoint import draft_kind, draft_stages
from atom_vllm_bridge.models.deepseek_v4.config import MOE, SLIDING, DeepseekV4Config
from atom_vllm_bridge.models.deepseek_v4.dspark import DSparkConfig, DSparkDraft
from atom_vllm_bridge.models.deepseek_v4.local_state import LocalState
from atom_vllm_bridge.models.deepseek_v4.model import DeepseekV4Model
from atom_vllm_bridge.models.deepseek_v4.sharding import Elsewhere

Read = Callable[[str], torch.Tensor]

EARLY, COPIED = 0.25, 2.0
"""Factors on what layers write into the residual stream, without and with a stage that copies them."""
NOISE = 2.0
"""Root mean square of the noise token's embedding; other tokens' is 1."""
MEMORY = 0.5
"""Logit that the Markov head gives a token that always follows."""
STREAMS = 0.25
"""What an MTP draft keeps of the streams it is given."""
TEXTS, PROMPT, SPOKEN = 32, 96, 96
"""Texts from which the Markov head is learnt: random tokens, then tokens of the target's own."""


def shape(name: str, draw: Read, config: Mapping[str, Any]) -> torch.Tensor:
    """The unquantised values of one tensor, all but those of `markov_w2`.

    Args:
        name: its name in the checkpoint.
        draw: the random values of any tensor, by name.
        config: the content of config.json.
    """
    if name.startswith("mtp."):
        return _draft_tensor(name, draw, config)
    values = draw(name)
    if name.endswith(("wo_b.weight", "w2.weight")):
        depth = config["num_hidden_layers"] - draft_stages(config)
        return values * (EARLY if int(name.split(".")[1]) < depth else COPIED)
    if draft_kind(config) == "dspark":
        if name == "head.weight":
            values[:, 0] = 0
        if name == "embed.weight":
            noise = config["dspark_noise_token_id"]
            values[noise] = 0
            values[noise, 0] = NOISE * values.shape[1] ** 0.5
    return values


def _draft_tensor(name: str, draw: Read, config: Mapping[str, Any]) -> torch.Tensor:
    _, stage, part = name.split(".", 2)
    d = config["hidden_size"]
    if part == "main_proj.weight":
        # One row of context serves all stages; the first tap is what the middle one's original reads.
        taps = len(config["dspark_target_layer_ids"])
        return torch.cat((torch.eye(d), torch.zeros(d, (taps - 1) * d)), 1)
    if part == "e_proj.weight":
        return torch.eye(d)
    if part == "h_proj.weight":
        return STREAMS * torch.eye(d)
    if part.endswith("markov_w1.weight"):
        codes = draw(name)
        codes[:, 0] = 1
        return codes
    if part == "norm.weight" or part.startswith("hc_head_"):
        return shape(part, draw, config)
    depth = config["num_hidden_layers"]
    layer = max(0, depth - draft_stages(config) + int(stage))
    # A hash layer has no bias that could be copied.
    hashed = layer < config["num_hash_layers"] and part == "ffn.gate.bias"
    own = ("main_norm", "enorm", "hnorm", "confidence_head")
    if hashed or part.startswith(own):
        return draw(name)
    return shape(f"layers.{layer}.{part}", draw, config)


def learn_markov_w2(config: Mapping[str, Any], read: Read) -> torch.Tensor:
    """Listen to the target, and to the draft's stages, and fill the memory.

    Sums of float32 products: between CPUs, and nowhere else, the last bits may differ.

    Args:
        config: the content of config.json, with a DSpark draft.
        read: any other tensor as a checkpoint of the bf16 layout holds it.

    Returns:
        [V, r] float32.
    """
    dims, dspark = DeepseekV4Config.from_hf(config), DSparkConfig.from_hf(config)
    stages = draft_stages(config)
    target = DeepseekV4Model(dims, dtype=torch.float32)
    draft = DSparkDraft(
        dims,
        dspark,
        stages,
        confidence=False,
        dtype=torch.float32,
        device="cpu",
        kv_codec=target.codec,
    )
    for name, slot in (target.weight_slots() | draft.weight_slots()).items():
        if not name.endswith("markov_w2.weight"):
            assert not isinstance(slot, Elsewhere)
            slot.copy_(read(name))
    tokens, said, taps = _listen(target, dspark)
    bias = _bias(target, draft, tokens, taps)

    codes = draft.markov_w1[:, 1:]
    token, said = tokens.flatten(), said.flatten()
    # However often a token comes up, what is said after it adds up to its code.
    share = codes / torch.bincount(token, minlength=len(codes)).clamp(min=1)[:, None]
    memory = torch.zeros_like(codes).index_add_(0, said, share[token])
    memory *= MEMORY / codes.square().sum(1).mean()
    return torch.cat((-bias.unsqueeze(1), memory), 1)


@torch.inference_mode()
def _listen(
    target: DeepseekV4Model, dspark: DSparkConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Texts [R, N], the likeliest token after each of their tokens [R, N], and the taps [R, N, n · d]."""
    config = target.config
    generator = torch.Generator().manual_seed(0)
    # Every token comes up before any comes up again.
    rounds = -(-TEXTS * PROMPT // config.vocab_size)
    tokens = torch.cat(
        [torch.randperm(config.vocab_size, generator=generator) for _ in range(rounds)]
    )
    tokens = tokens[: TEXTS * PROMPT].view(TEXTS, PROMPT)
    state = LocalState(config, TEXTS, PROMPT + SPOKEN, target.codec)
    aux = tuple(layer + 1 for layer in dspark.target_layer_ids)
    texts, answers, tapped = [], [], []
    for start in (0, *range(PROMPT, PROMPT + SPOKEN)):
        count = tokens.shape[1]
        batch, caches = state.step([(r, start, count) for r in range(TEXTS)])
        streams, taps = target(tokens.flatten(), batch, caches, aux)
        said = target.logits(target.reduce(streams)).argmax(-1).view(TEXTS, count)
        texts.append(tokens)
        answers.append(said)
        tapped.append(torch.cat(taps, -1).view(TEXTS, count, -1))
        tokens = said[:, -1:]
    return torch.cat(texts, 1), torch.cat(answers, 1), torch.cat(tapped, 1)


@torch.inference_mode()
def _bias(
    target: DeepseekV4Model,
    draft: DSparkDraft,
    tokens: torch.Tensor,
    taps: torch.Tensor,
) -> torch.Tensor:
    """[V], the mean U of noise tokens' slots, from one block at the end of each text."""
    count, k = tokens.shape[1] - 1, max(2, draft.dspark.block_size)
    stages = len(draft.stages)
    config = replace(
        target.config,
        num_hidden_layers=stages,
        layer_types=(SLIDING,) * stages,
        mlp_layer_types=(MOE,) * stages,
    )
    state = LocalState(config, TEXTS, count + k, target.codec)
    batch, caches = state.step([(r, 0, count) for r in range(TEXTS)])
    context = draft.context(taps[:, :count].flatten(0, 1))
    draft.write_context(context, batch.positions, [layer.window for layer in caches])

    batch, caches = state.step([(r, count, k) for r in range(TEXTS)])
    block = F.pad(tokens[:, -1:], (0, k - 1), value=draft.dspark.noise_token_id)
    embedded = target.embed_tokens(block.flatten())
    hidden = draft(embedded, batch, [layer.window for layer in caches])
    noise = hidden.view(TEXTS, k, -1)[:, 1:].flatten(0, 1)
    return target.logits(draft.head_input(noise)).mean(0)
