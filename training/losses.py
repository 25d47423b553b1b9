"""What each part learns from, and what is told about it while it does."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from training.corpus import ANSWER, PROMPT, PROSE
from training.dense import Dense
from training.drafts import context_rows, dspark_blocks, mtp_hidden, mtp_step
from training.layer import Tensors, Trace, rms

PROMPT_WEIGHT = 0.25
"""Of tokens that nobody will ask the model to write: names and numbers of questions cannot be known."""

INDEX_WEIGHT = 0.5
CONFIDENCE_WEIGHT = 0.2
DRAFT_DECAY = 0.85
"""A draft counts only if all before it were accepted."""


@dataclass(frozen=True)
class Target:
    """A trained target, as its drafts see it: what it is computed with, and where it is tapped."""

    tensors: Tensors
    taps: tuple[int, ...]


def target_loss(
    dense: Dense, view: Tensors, ids: torch.Tensor, kinds: torch.Tensor, trace: Trace
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Cross-entropy of the next token, and the indexers' loss."""
    streams, _ = dense.target(view, ids[:, :-1], trace, ())
    logits = F.linear(dense.hidden(view, streams), view["head.weight"]).float()
    each = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    kind = kinds[:, 1:].flatten()
    weight = torch.where(kind == PROMPT, PROMPT_WEIGHT, 1.0)
    index = torch.stack(trace.index_losses).mean()
    loss = (each * weight).sum() / weight.sum()
    figures = {
        "answer": _mean(each, kind == ANSWER),
        "prompt": _mean(each, kind == PROMPT),
        "prose": _mean(each, kind == PROSE),
        "index": index.detach(),
    }
    return loss + INDEX_WEIGHT * index, figures


@torch.no_grad()
def observe(
    dense: Dense, target: Target, ids: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """The target over rows: its streams, its taps, and the logarithms of its distribution at every position [B, T, V]."""
    streams, taps = dense.target(target.tensors, ids, Trace(), target.taps)
    hidden = dense.hidden(target.tensors, streams)
    logits = F.linear(hidden, target.tensors["head.weight"]).float()
    return streams, taps, logits.log_softmax(-1)


@dataclass(frozen=True)
class Drafts:
    """What a DSpark draft made of blocks, [B, A, K] each.

    Attributes:
        divergence: of its distribution from the target's, Σ p · log(p / q).
        accepted: chance that a draft drawn from q is accepted at temperature 1, Σ min(p, q).
        hit: whether both have the same likeliest token, so that it is accepted at temperature 0.
        confidence: the head's logit of that chance.
    """

    divergence: torch.Tensor
    accepted: torch.Tensor
    hit: torch.Tensor
    confidence: torch.Tensor


def draft_blocks(
    dense: Dense,
    view: Tensors,
    stages: int,
    noise: int,
    target: Target,
    ids: torch.Tensor,
    anchors: torch.Tensor,
    size: int,
    trace: Trace,
) -> Drafts:
    """Draft blocks and compare them with the target.

    The token before a draft is the text's own, as it is whenever the drafts before were accepted.

    Args:
        ids: [B, T].
        anchors: [B, A], first positions of blocks, at most T − size − 1.
        size: tokens a block.
    """
    _, taps, log_p = observe(dense, target, ids)
    rows, count = anchors.shape
    at = anchors.unsqueeze(-1) + torch.arange(size, device=ids.device)
    before = ids.gather(1, at.flatten(1)).view(rows, count, size)
    block = torch.full_like(before, noise)
    block[..., 0] = before[..., 0]
    context = context_rows(view, taps, dense.config.rms_norm_eps)
    embedded = F.embedding(block, target.tensors["embed.weight"])
    hidden = dspark_blocks(dense, view, stages, context, anchors, embedded, trace)

    last = f"mtp.{stages - 1}."
    normed = rms(hidden, view[f"{last}norm.weight"], dense.config.rms_norm_eps)
    markov = F.embedding(before, view[f"{last}markov_head.markov_w1.weight"])
    logits = F.linear(normed, target.tensors["head.weight"]).float()
    logits = logits + F.linear(markov, view[f"{last}markov_head.markov_w2.weight"])
    log_q = logits.float().log_softmax(-1)
    index = at.flatten(1).unsqueeze(-1).expand(-1, -1, log_p.shape[-1])
    wanted = log_p.gather(1, index).view(log_q.shape)
    with torch.autocast(ids.device.type, enabled=False):
        both = torch.cat((hidden.float(), markov.float()), -1)
        confidence = F.linear(both, view[f"{last}confidence_head.proj.weight"])
    return Drafts(
        divergence=(wanted.exp() * (wanted - log_q)).sum(-1),
        accepted=torch.minimum(wanted.exp(), log_q.detach().exp()).sum(-1),
        hit=log_q.argmax(-1) == wanted.argmax(-1),
        confidence=confidence.squeeze(-1),
    )


def dspark_loss(drafts: Drafts) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Divergence of the drafts from the target, and of the confidence from the chance of acceptance."""
    size = drafts.accepted.shape[-1]
    decay = DRAFT_DECAY ** torch.arange(size, device=drafts.accepted.device)
    told = F.binary_cross_entropy_with_logits(
        drafts.confidence, drafts.accepted, reduction="none"
    )
    each = drafts.divergence + CONFIDENCE_WEIGHT * told
    hits = drafts.hit.float()
    return (each * decay).mean() * size / decay.sum(), {
        "divergence": drafts.divergence.mean(),
        "confidence": told.mean(),
        "accepted at T=1": drafts.accepted.cumprod(-1).sum(-1).mean() + 1,
        "accepted greedily": hits.cumprod(-1).sum(-1).mean() + 1,
        "calibration": calibration(drafts.confidence.sigmoid(), drafts.accepted).mean(),
    }


def mtp_loss(
    dense: Dense, view: Tensors, target: Target, ids: torch.Tensor, kinds: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Divergence of the first draft from the target, and of the second, which builds on the draft's own streams."""
    streams, _, log_p = observe(dense, target, ids[:, :-1])
    embedded = F.embedding(ids[:, 1:], target.tensors["embed.weight"])
    # Row t drafts the token at t + 2, of which the target speaks at t + 1.
    kind = kinds[:, 2:]
    weight = torch.where(kind == PROMPT, PROMPT_WEIGHT, 1.0)
    loss, figures = torch.zeros((), device=ids.device), {}
    for step in (1, 2):
        streams = mtp_step(dense, view, embedded, streams, Trace())
        hidden = mtp_hidden(dense.config, view, streams)
        log_q = F.linear(hidden, target.tensors["head.weight"]).float().log_softmax(-1)
        wanted, log_q = log_p[:, 1:], log_q[:, :-1]
        each = (wanted.exp() * (wanted - log_q)).sum(-1)
        # The first row of the second step has no draft before it.
        loss = loss + (each * weight)[:, 1:].sum() / weight[:, 1:].sum()
        hit = (log_q.argmax(-1) == wanted.argmax(-1)).float()
        figures[f"divergence {step}"] = each.mean()
        figures[f"accepted {step}"] = _mean(hit, kind != PROMPT)
        streams = F.pad(streams, (0, 0, 0, 0, 1, 0))[:, :-1]
    return loss, figures


def _mean(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    return (values * where).sum() / where.sum().clamp(min=1)


def calibration(told: torch.Tensor, happened: torch.Tensor) -> torch.Tensor:
    """Expected calibration error by position, in ten bins of equal width (Guo et al. 2017, section 2).

    Args:
        told, happened: [..., K] probabilities, and what came of them: outcomes or their own probabilities.

    Returns:
        [K].
    """
    told, happened = told.detach().flatten(0, -2), happened.float().flatten(0, -2)
    place = (told * 10).long().clamp(0, 9)
    gap = torch.zeros(10, told.shape[1], device=told.device)
    gap.scatter_add_(0, place, told - happened)
    return gap.abs().sum(0) / told.shape[0]
