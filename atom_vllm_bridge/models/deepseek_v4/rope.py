"""Rotary frequencies: plain for sliding layers, a larger base with YaRN for compressed ones.

θᵢ = base^(−2i/d).  YaRN keeps the fast frequencies, divides the slow ones by `factor`, and blends in between:
θᵢ' = θᵢ/factor · (1 − sᵢ) + θᵢ · sᵢ,  s falling from 1 to 0 between the dims that turn β_fast and β_slow times over the
trained length. DeepSeek-V4 scales neither cos nor sin.
"""

import math

import torch

from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config, Yarn


def frequencies(config: DeepseekV4Config, *, compressed: bool) -> torch.Tensor:
    """[qk_rope_head_dim / 2] float32, radians a token, on the CPU.

    Args:
        config: the model's.
        compressed: those of CSA and HCA layers, their compressors and the indexer; else those of sliding layers.
    """
    dim = config.qk_rope_head_dim
    base = config.compress_rope_theta if compressed else config.rope_theta
    theta = 1.0 / base ** (
        torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    )
    if not compressed or config.yarn is None:
        return theta
    kept = _kept(config.yarn, base, dim)
    return theta / config.yarn.factor * (1 - kept) + theta * kept


def _kept(yarn: Yarn, base: float, dim: int) -> torch.Tensor:
    """sᵢ: 1 where a frequency is kept, 0 where it is divided."""

    def dim_of(turns: float) -> float:
        length = yarn.original_max_position_embeddings
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dim_of(yarn.beta_fast)), 0)
    high = min(math.ceil(dim_of(yarn.beta_slow)), dim - 1)
    index = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    return 1 - ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
