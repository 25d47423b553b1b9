"""Pearson's chi-square test of draws against probabilities."""

import torch


def p_value(draws: torch.Tensor, probabilities: torch.Tensor) -> float:
    """How likely draws [n] fit probabilities [V] no better than these do.

    The statistic Σ (observed − expected)² / expected is chi-square distributed with
    V − 1 degrees of freedom; its upper tail is the regularised Γ(k/2, x/2).
    """
    observed = draws.bincount(minlength=len(probabilities)).double()
    expected = probabilities.double() / probabilities.double().sum() * len(draws)
    assert expected.min() >= 5, "too few draws for the approximation"
    statistic = ((observed - expected) ** 2 / expected).sum()
    half_freedom = torch.tensor((len(probabilities) - 1) / 2).double()
    return float(torch.special.gammaincc(half_freedom, statistic / 2))
