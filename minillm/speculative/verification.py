"""Does the target agree? Drafts are kept or replaced so that what comes out is distributed as without them.

For one position, a draft x drawn from q, the target's own distribution p, and a random number u:

    keep x             if u · q(x) < p(x), that is with probability min(1, p(x) / q(x))
    else draw from     max(0, p - q), normalized: what the target wants more of than the draft gave

A draft is rejected with probability r = 1 - sum min(q, p), which is also what the residual is divided by; so token y
comes out with probability min(q(y), p(y)) + r · max(0, p(y) - q(y)) / r = p(y). The first rejection ends the chain, for
what follows was guessed after another token; if there is none, the last row of logits gives a bonus token. p is what
`sampling.probabilities` makes of a row: bias, min_tokens, penalties, temperature and cuts included, each position
seeing the tokens accepted before it.

A guess that was not drawn needs no second rule. Draw from p as if there were no draft, with the random number that
the plain run uses at this position, and go on while the draws agree with the guesses: every token is the one that the
plain run draws, whatever was guessed, at any temperature. With q one at x that is the rule above: x is kept with
probability p(x), and what replaces it is distributed as p without x.

Random numbers are functions of (seed, position, sequence, draw). Whatever was drafted for a position in a step that
never came to it is forgotten, and drafted again with the same number after other tokens; nothing that was accepted
depended on it, so that does no harm.
Sources: Leviathan et al. 2023 (arXiv 2211.17192), section 2.3 and appendix A.1; Chen et al. 2023 (arXiv 2302.01318),
theorem 1.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..sampling import (
    SampledToken,
    SamplingParams,
    SamplingState,
    inverse_cdf,
    probabilities,
    sample,
    uniform,
    with_logprobs,
)
from .proposal import Proposal

PLAIN, DRAFT, ACCEPT = 0, 1, 2  # `draw` of sampling.uniform: one number each for a position


def accept(p: Tensor, q: Tensor, draft: Tensor, u: Tensor | float) -> Tensor:
    """p, q (..., V), draft and u (...) -> booleans (...): is the draft kept?"""
    at = draft[..., None]
    return u * q.gather(-1, at).squeeze(-1) < p.gather(-1, at).squeeze(-1)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """p, q (..., V) -> (..., V): the distribution of what replaces a rejected draft.

    Where p and q are equal nothing is ever rejected but by rounding; p itself is right then.
    """
    left = (p - q).clamp(min=0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, p)


def verify(
    logits: Tensor,
    proposal: Proposal,
    params: SamplingParams,
    state: SamplingState,
    vocab_size: int | None = None,
    eos_ids: Iterable[int] = (),
) -> list[SampledToken]:
    """The step's tokens: drafts that were kept, and one more, which replaces the first rejected or follows the last.

    logits (k + 1, V): row i is the target's after i drafts. `state` is the sequence before them. Log-probabilities are
    those of the row that the token stands in, as without speculation.
    """
    output, tokens = list(state.output_ids), []
    drawn = proposal.probs is not None and not params.is_greedy
    for i, draft in enumerate([*proposal.tokens, None]):
        here = SamplingState(state.prompt_ids, output, state.sequence)
        if drawn and draft is not None:
            token = _keep_or_replace(logits[i, :vocab_size], draft, proposal.probs[i], params, here, eos_ids)
        else:
            (token,) = sample(logits[i : i + 1], [params], [here], vocab_size, eos_ids)
        tokens.append(token)
        output.append(token.id)
        if token.id != draft:
            break
    return tokens


def _keep_or_replace(
    logits: Tensor, draft: int, q: Tensor, params: SamplingParams, state: SamplingState, eos_ids: Iterable[int]
) -> SampledToken:
    """A replacement is never the draft itself, where p - q is negative or zero: who is replaced can be told."""
    p = probabilities(logits, params, state.prompt_ids, state.output_ids, eos_ids)
    position = len(state.prompt_ids) + len(state.output_ids)
    u = uniform(params.seed, position, state.sequence, ACCEPT)
    token = draft
    if not accept(p, q, torch.tensor(draft, device=p.device), u):
        token = inverse_cdf(residual(p, q), uniform(params.seed, position, state.sequence, PLAIN))
    return with_logprobs(logits, token, params.logprobs)
