"""Speculative decoding on paper: tokens a step, speed-up, and the length that is best.

α   chance that a draft is accepted, given that all before it were; taken as the same everywhere
γ   drafts a step
c   one draft's time over one target step's
Source: Leviathan et al. 2023 (arXiv 2211.17192), equation 1 and theorem 3.8.
"""

from __future__ import annotations


def expected_tokens(alpha: float, gamma: int) -> float:
    """(1 - α^(γ+1)) / (1 - α) = 1 + α + … + α^γ: accepted drafts and the one token more that every step gives."""
    if not 0 <= alpha <= 1 or gamma < 0:
        raise ValueError(f"alpha {alpha} must be from 0 to 1 and gamma {gamma} at least 0")
    return gamma + 1.0 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def speculative_speedup(alpha: float, gamma: int, cost: float, verify: float = 1.0) -> float:
    """Expected tokens over (γ c + verify): against plain decoding, in which a step costs 1.

    `verify` is the time of a step of γ + 1 rows over one of 1 row; the paper takes 1, which holds while a step is bound
    by reading weights.
    """
    return expected_tokens(alpha, gamma) / (gamma * cost + verify)


def best_gamma(alpha: float, cost: float, most: int = 16, row: float = 0.0) -> tuple[int, float]:
    """The γ up to `most` of the highest speed-up, and that. 0 and 1.0 where drafting does not pay.

    `row`: the time of one row more over one step.
    """
    found = [(gamma, speculative_speedup(alpha, gamma, cost, 1 + row * gamma)) for gamma in range(most + 1)]
    return max(found, key=lambda pair: pair[1])


def coupling(p, q) -> float:
    """sum min(p, q) = 1 - total variation distance: α at one position, for a draft drawn from q."""
    return float(sum(min(a, b) for a, b in zip(p, q, strict=True)))
