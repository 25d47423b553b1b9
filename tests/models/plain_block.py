"""A sliding-window block of DeepSeek-V4 as the formulas say it: one token, one head, one expert at a time, in float64.

Shares nothing with `models/deepseek_v4`: it reads the tensors of a bf16 checkpoint by their published names, and the
dict of config.json. Nothing is rounded in between, neither the streams nor the keys. The router is that of layers
without a hash table.

    d hidden_size, n hc_mult streams, V vocabulary, H heads of D = head_dim; the last r = qk_rope_head_dim rotate
    R [n, d] residual of one token, x [d] one token's hidden vector, ε rms_norm_eps, δ hc_eps
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]
Config = Mapping[str, Any]


def block(
    tensors: Tensors,
    config: Config,
    prefix: str,
    streams: Sequence[torch.Tensor],
    positions: Sequence[int],
    sees: Callable[[int], range],
    context: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """Attention over a sliding window, then the experts, each read from the streams and written back to them.

    Args:
        streams: R [n, d] of each token.
        positions: of each token.
        sees: from a token's index to the indices of the tokens here that it attends to.
        context: keys of other tokens, that all attend to as well.

    Returns:
        R [n, d] of each token.
    """
    reads = [hyper_read(tensors, config, f"{prefix}.hc_attn", R) for R in streams]
    inputs = [
        norm(tensors, config, f"{prefix}.attn_norm.weight", x) for x, _, _ in reads
    ]
    keys = [
        key_value(tensors, config, f"{prefix}.attn", x, position)
        for x, position in zip(inputs, positions, strict=True)
    ]
    after_attention = []
    for t, (R, (_, post, C)) in enumerate(zip(streams, reads, strict=True)):
        seen = [*context, *(keys[s] for s in sees(t))]
        y = attend(tensors, config, f"{prefix}.attn", inputs[t], positions[t], seen)
        after_attention.append(hyper_write(y, R, post, C))

    after_experts = []
    for R in after_attention:
        x, post, C = hyper_read(tensors, config, f"{prefix}.hc_ffn", R)
        x = norm(tensors, config, f"{prefix}.ffn_norm.weight", x)
        y = feed_forward(tensors, config, f"{prefix}.ffn", x)
        after_experts.append(hyper_write(y, R, post, C))
    return after_experts


def hyper_read(
    tensors: Tensors, config: Config, prefix: str, R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Read a block's input from the streams, and the weights with which its output goes back.

    m = fn · (z / √(mean z² + ε)) with z = flatten(R); pre = σ(m·s₀ + b) + δ; post = 2σ(m·s₁ + b);
    C = Sinkhorn(m·s₂ + b); x = Σ_i pre_i R_i.

    Returns:
        x [d], not normed; post [n]; C [n, n].
    """
    n = config["hc_mult"]
    m = hyper_mix(tensors, config, prefix, R)
    b, s = weight(tensors, f"{prefix}_base"), weight(tensors, f"{prefix}_scale")
    pre = torch.sigmoid(m[:n] * s[0] + b[:n]) + config["hc_eps"]
    post = 2 * torch.sigmoid(m[n : 2 * n] * s[1] + b[n : 2 * n])
    C = sinkhorn(config, (m[2 * n :] * s[2] + b[2 * n :]).reshape(n, n))
    return pre @ R, post, C


def sinkhorn(config: Config, logits: torch.Tensor) -> torch.Tensor:
    """A positive [n, n] whose rows and columns sum to 1; the last step is of columns, the first softmax of rows."""
    delta = config["hc_eps"]
    C = torch.softmax(logits, dim=1) + delta
    C = C / (C.sum(0) + delta)
    for _ in range(config["hc_sinkhorn_iters"] - 1):
        C = C / (C.sum(1, keepdim=True) + delta)
        C = C / (C.sum(0) + delta)
    return C


def hyper_write(
    y: torch.Tensor, R: torch.Tensor, post: torch.Tensor, C: torch.Tensor
) -> torch.Tensor:
    """R'_j = post_j · y + Σ_i C[i, j] · R_i."""
    new = []
    for j in range(len(R)):
        carried = sum(C[i, j] * R[i] for i in range(len(R)))
        new.append(post[j] * y + carried)
    return torch.stack(new)


def hyper_head(
    tensors: Tensors, config: Config, prefix: str, R: torch.Tensor
) -> torch.Tensor:
    """The streams reduced at the end, [d]: Σ_i (σ(m_i·s + b_i) + δ) R_i."""
    m = hyper_mix(tensors, config, prefix, R)
    b, s = weight(tensors, f"{prefix}_base"), weight(tensors, f"{prefix}_scale")
    return (torch.sigmoid(m * s[0] + b) + config["hc_eps"]) @ R


def hyper_mix(
    tensors: Tensors, config: Config, prefix: str, R: torch.Tensor
) -> torch.Tensor:
    """fn · (z / √(mean z² + ε)), z = flatten(R), stream after stream."""
    return weight(tensors, f"{prefix}_fn") @ rms(config, R.flatten())


def key_value(
    tensors: Tensors, config: Config, prefix: str, x: torch.Tensor, position: int
) -> torch.Tensor:
    """The one key of a token, [D], which is its value too: kv_norm(wkv · x), rotated."""
    kv = weight(tensors, f"{prefix}.wkv.weight") @ x
    kv = norm(tensors, config, f"{prefix}.kv_norm.weight", kv)
    return rotate(config, kv, position)


def attend(
    tensors: Tensors,
    config: Config,
    prefix: str,
    x: torch.Tensor,
    position: int,
    keys: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Attention of one query over `keys`, [d].

    q_h is normed without a weight and rotated; the sink is a logit of its own that takes weight and gives nothing; the
    result is rotated back by the query's position; wo_a maps each group of heads, wo_b all groups.
    """
    H, D = config["num_attention_heads"], config["head_dim"]
    latent = weight(tensors, f"{prefix}.wq_a.weight") @ x
    latent = norm(tensors, config, f"{prefix}.q_norm.weight", latent)
    queries = (weight(tensors, f"{prefix}.wq_b.weight") @ latent).reshape(H, D)
    sinks = weight(tensors, f"{prefix}.attn_sink")
    kv = torch.stack(list(keys))
    heads = []
    for h in range(H):
        q = rotate(config, rms(config, queries[h]), position)
        logits = torch.cat((kv @ q / math.sqrt(D), sinks[h : h + 1]))
        w = torch.softmax(logits, dim=0)[:-1]
        heads.append(rotate(config, w @ kv, -position))

    groups, rank = config["o_groups"], config["o_lora_rank"]
    wo_a = weight(tensors, f"{prefix}.wo_a.weight")
    o, width = torch.cat(heads), H * D // groups
    parts = []
    for g in range(groups):
        part = o[g * width : (g + 1) * width]
        parts.append(wo_a[g * rank : (g + 1) * rank] @ part)
    return weight(tensors, f"{prefix}.wo_b.weight") @ torch.cat(parts)


def rotate(config: Config, vector: torch.Tensor, position: int) -> torch.Tensor:
    """Turn the pairs (0, 1), (2, 3), … of the last r values by position · θ^(−2i/r); the draft knows no YaRN."""
    r = config["qk_rope_head_dim"]
    turned = vector.clone()
    tail = len(vector) - r
    for i in range(r // 2):
        angle = position * config["rope_theta"] ** (-2 * i / r)
        cos, sin = math.cos(angle), math.sin(angle)
        a, b = vector[tail + 2 * i], vector[tail + 2 * i + 1]
        turned[tail + 2 * i] = a * cos - b * sin
        turned[tail + 2 * i + 1] = a * sin + b * cos
    return turned


def feed_forward(
    tensors: Tensors, config: Config, prefix: str, x: torch.Tensor
) -> torch.Tensor:
    """The shared expert plus the chosen ones.

    s = √softplus(gate · x); chosen are the k best of s + bias, among equals the lowest number; they weigh
    s_e / Σ_chosen s · routed_scaling_factor, without the bias.
    """
    logits = weight(tensors, f"{prefix}.gate.weight") @ x
    s = torch.logaddexp(logits, torch.zeros_like(logits)).sqrt()
    biased = (s + weight(tensors, f"{prefix}.gate.bias")).tolist()
    ranked = sorted(range(len(biased)), key=lambda e: (-biased[e], e))
    chosen = ranked[: config["num_experts_per_tok"]]
    total = sum(s[e] for e in chosen)
    y = swiglu(tensors, config, f"{prefix}.shared_experts", x)
    for e in chosen:
        share = s[e] / total * config["routed_scaling_factor"]
        y = y + share * swiglu(tensors, config, f"{prefix}.experts.{e}", x)
    return y


def swiglu(
    tensors: Tensors, config: Config, prefix: str, x: torch.Tensor
) -> torch.Tensor:
    """w2 · (silu(min(w1·x, limit)) ⊙ clamp(w3·x, ±limit))."""
    limit = config["swiglu_limit"]
    gate = (weight(tensors, f"{prefix}.w1.weight") @ x).clamp(max=limit)
    up = (weight(tensors, f"{prefix}.w3.weight") @ x).clamp(-limit, limit)
    return weight(tensors, f"{prefix}.w2.weight") @ (gate * torch.sigmoid(gate) * up)


def unembed(
    tensors: Tensors, config: Config, prefix: str, h: torch.Tensor
) -> torch.Tensor:
    """Logits [V] of a reduced h: the draft's norm, the target's head (its embedding where the two are tied)."""
    head = "embed.weight" if config.get("tie_word_embeddings") else "head.weight"
    return weight(tensors, head) @ norm(tensors, config, f"{prefix}.norm.weight", h)


def norm(tensors: Tensors, config: Config, name: str, x: torch.Tensor) -> torch.Tensor:
    """x / √(mean x² + ε) ⊙ weight."""
    return rms(config, x) * weight(tensors, name)


def rms(config: Config, x: torch.Tensor) -> torch.Tensor:
    """x / √(mean x² + ε)."""
    return x / torch.sqrt(x.square().mean() + config["rms_norm_eps"])


def weight(tensors: Tensors, name: str, row: int | None = None) -> torch.Tensor:
    """A tensor, or one row of it, in float64."""
    tensor = tensors[name]
    return (tensor if row is None else tensor[row]).double()
