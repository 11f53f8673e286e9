"""From a row of logits to a token.

The order is fixed, and each step sees the result of the one before it:

    raw logits, padding columns cut off
      -> log-probabilities are taken HERE: before bias, penalties, temperature and every cut
      -> logit_bias; until min_tokens are out, end and stop ids are masked
      -> repetition penalty (prompt and output), presence and frequency penalties (output alone)
      -> temperature -> min_p -> top_k -> top_p -> one draw

Rules that decide the corner cases:

* Ties go to the lower token id, in argmax, at the edge of top-k and at the edge of top-p. Top-k keeps exactly k.
* A temperature below GREEDY_BELOW is argmax. At 1e-3 a gap of 0.02 between logits is already a factor of 5e8, so
  nothing is lost, and neither a division by zero nor a coin flip between equal logits remains.
* One token always survives: each cut keeps the most probable token that reached it.
* A row is computed on its own, in float64, so its batch-mates cannot change its result.
* The draw is stateless: its random number is a function of (seed, position, sequence), never of a generator's history.

The draw inverts the cumulative distribution. That takes one random number a token, where the Gumbel-max trick takes
one a vocabulary entry; the price, a running sum over the row, is small beside the softmax that precedes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import RequestError
from .sampling_params import GREEDY_BELOW, SamplingParams

NEVER = float("-inf")
_WORD = 0xFFFFFFFF  # the 32-bit words of Philox


class SamplingError(RequestError):
    """Logits that no token can be drawn from. `row` is the batch row at fault, so that the others can go on."""

    def __init__(self, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.row = row


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four 32-bit random words, a pure function of a 128-bit counter and a 64-bit key.

    Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC11), section 3.3. Integer arithmetic
    alone, so every process and every device gets the same words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & _WORD, (left >> 32) ^ c3 ^ k1, left & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, position: int, sequence: int = 0, draw: int = 0) -> float:
    """The random number of one token, in [0, 1) with 53 bits.

    `position` is the index the token will have in its sequence (prompt tokens + output tokens so far), `sequence`
    tells the n sequences of a request apart, and `draw` the numbers that one position needs (verifying a draft
    needs two). The seed is Philox's key, the rest its counter.
    """
    words = philox((position & _WORD, position >> 32, sequence, draw), (seed & _WORD, (seed >> 32) & _WORD))
    return ((words[0] << 21) | (words[1] >> 11)) * 2.0**-53


def _peak(scores: Tensor) -> float:
    """The largest score of (V,). Raises SamplingError where there is no sound one."""
    return _sound(scores.amax().item())


def _sound(peak: float) -> float:
    if math.isfinite(peak):
        return peak
    if peak == NEVER:
        raise SamplingError(
            "every logit is -inf, so no token is left; check the model, or stop_token_ids under min_tokens"
        )
    found = "NaN" if math.isnan(peak) else "+inf"
    raise SamplingError(f"logits hold {found}; the model's numbers overflowed, run it in float32 or check its weights")


def rank(scores: Tensor, count: int) -> Tensor:
    """Ids (<= count,) of the highest of (V,) scores, best first, ties to the lower id; masked ones left out.

    The cut at the count-th value comes first, so that only what can be in the answer is sorted.
    """
    floor = torch.finfo(scores.dtype).min
    if count < len(scores):
        floor = scores.topk(count).values[-1].clamp(min=floor)
    candidates = (scores >= floor).nonzero().squeeze(-1)  # ascending ids, which a stable sort keeps among equals
    return candidates[scores[candidates].argsort(descending=True, stable=True)][:count]


def apply_penalties(
    logits: Tensor, params: SamplingParams, prompt_ids: Sequence[int] = (), output_ids: Sequence[int] = ()
) -> Tensor:
    """New logits (V,) with the three penalties.

    Repetition (Keskar et al., "CTRL", 2019, section 4.1) divides a positive logit and multiplies a negative one, once
    for each token seen in prompt or output. Presence and frequency subtract from tokens of the output: once, and
    once for each time it occurred.
    """
    scores = logits.clone()
    if params.repetition_penalty != 1:
        seen = _index({*prompt_ids, *output_ids}, scores)
        old = scores[seen]
        new = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
        largest = torch.finfo(scores.dtype).max  # an extreme penalty must neither overflow nor mask
        scores[seen] = torch.where(old == NEVER, old, new.clamp(-largest, largest))
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = _index(output_ids, scores).unique(return_counts=True)
        scores[ids] -= params.presence_penalty + params.frequency_penalty * counts.to(scores.dtype)
    return scores


def _index(ids: Iterable[int], scores: Tensor) -> Tensor:
    ids = list(ids)
    if outside := [i for i in ids if not 0 <= i < len(scores)]:
        raise RequestError(
            f"token id {outside[0]} is outside the vocabulary of {len(scores)}; encode with this model's own"
        )
    return torch.tensor(ids, dtype=torch.long, device=scores.device)


def adjust(
    logits: Tensor,
    params: SamplingParams,
    prompt_ids: Sequence[int] = (),
    output_ids: Sequence[int] = (),
    eos_ids: Iterable[int] = (),
) -> Tensor:
    """Logits (V,) -> scores (V,) in float64 after bias, min_tokens and penalties: what greedy takes the argmax of."""
    scores = logits.to(torch.float64, copy=True)
    if params.logit_bias:
        ids, values = zip(*params.logit_bias, strict=True)
        scores[_index(ids, scores)] += torch.tensor(values, dtype=scores.dtype, device=scores.device)
    if len(output_ids) < params.min_tokens:
        ends = () if params.ignore_eos else eos_ids
        scores[_index({*params.stop_token_ids, *ends}, scores)] = NEVER
    return apply_penalties(scores, params, prompt_ids, output_ids) if params.has_penalties else scores


def apply_temperature(scores: Tensor, temperature: float) -> Tensor:
    """Scores (V,), largest first moved to 0, over the temperature; below GREEDY_BELOW the limit: 0 at the argmax.

    Moved first, no score is positive and a small temperature can only drive it to -inf: NaN cannot arise.
    """
    peak = _peak(scores)
    if temperature < GREEDY_BELOW:
        only = torch.full_like(scores, NEVER)
        only[scores.max(dim=-1).indices] = 0
        return only
    return (scores - peak) / temperature


def min_p_mask(scores: Tensor, min_p: float) -> Tensor:
    """Which of (V,) to keep: probability at least min_p times the largest (Nguyen et al., 2024). 0 keeps all."""
    if min_p == 0:
        return torch.ones_like(scores, dtype=torch.bool)
    return scores >= _peak(scores) + math.log(min_p)


def top_k_mask(scores: Tensor, top_k: int) -> Tensor:
    """Which of (V,) to keep: exactly the k highest (fewer if fewer are unmasked), ties to the lower id. <= 0: all."""
    if top_k <= 0:
        return torch.ones_like(scores, dtype=torch.bool)
    keep = torch.zeros_like(scores, dtype=torch.bool)
    keep[rank(scores, top_k)] = True
    return keep


def top_p_mask(scores: Tensor, top_p: float) -> Tensor:
    """Which of (V,) to keep: the shortest run of most probable tokens whose mass reaches p (Holtzman et al., 2019).

    The token that crosses p is kept, so one always is. Probabilities are those of the tokens still unmasked. The
    run is usually short: a few hundred are ranked, and more only if their mass falls short.
    """
    if top_p >= 1:  # off, and no rounding of the sum may drop a token
        return torch.ones_like(scores, dtype=torch.bool)
    _peak(scores)
    probs, count = scores.softmax(-1), 256
    while True:
        order = rank(scores, count)
        mass = probs[order].cumsum(-1)
        if mass[-1] >= top_p or len(order) < count:
            break
        count *= 8
    keep = torch.zeros_like(scores, dtype=torch.bool)
    keep[order[: 1 + int((mass[:-1] < top_p).sum())]] = True
    return keep


def probabilities(
    logits: Tensor,
    params: SamplingParams,
    prompt_ids: Sequence[int] = (),
    output_ids: Sequence[int] = (),
    eos_ids: Iterable[int] = (),
) -> Tensor:
    """The distribution (V,), float64, that the next token is drawn from. Greedy is a one at the argmax.

    Raises SamplingError for logits with NaN or +inf, or if nothing is left unmasked.
    """
    scores = apply_temperature(adjust(logits, params, prompt_ids, output_ids, eos_ids), params.temperature)
    if params.min_p > 0:
        scores = scores.masked_fill(~min_p_mask(scores, params.min_p), NEVER)
    if params.top_k > 0:
        scores = scores.masked_fill(~top_k_mask(scores, params.top_k), NEVER)
    if params.top_p < 1:
        scores = scores.masked_fill(~top_p_mask(scores, params.top_p), NEVER)
    return scores.softmax(-1)


def inverse_cdf(weights: Tensor, u: float) -> int:
    """The id whose share of (V,) weights holds the fraction u in [0, 1); weights need not sum to one.

    An id of weight 0 is never returned, at u = 0 or where u times the total rounds up to the total.
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[-1]
    found = torch.searchsorted(cumulative, u * total, right=True)
    last = torch.searchsorted(cumulative, total)  # where the sum first reaches its end: the last id with weight
    return int(torch.minimum(found, last))


class SamplingState(NamedTuple):
    """What a row's draw depends on beside its logits and parameters. The id lists are read, never kept."""

    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    sequence: int = 0  # which of the request's n sequences


class SampledToken(NamedTuple):
    """A token; with `logprobs` asked for, its raw log-probability and the (id, log-probability) of the likeliest."""

    id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    states: Sequence[SamplingState] | None = None,
    vocab_size: int | None = None,
    eos_ids: Iterable[int] = (),
) -> list[SampledToken]:
    """One token for each row of logits (B, V).

    Columns from `vocab_size` on are padding of the model's matrix and are cut off. Each row's result is the one it
    has alone. Raises SamplingError with the row; RequestError if a row is random but has no seed (`seeded()`).
    """
    states = [SamplingState()] * len(params) if states is None else states
    if logits.dim() != 2 or not len(logits) == len(params) == len(states):
        raise RequestError(f"logits of shape {tuple(logits.shape)} need {len(params)} rows, one for each request")
    logits, eos_ids = logits[:, :vocab_size], tuple(eos_ids)
    peaks, best = (column.tolist() for column in logits.max(dim=-1))  # NaN wins a maximum, so this checks as well
    tokens = []
    for row, (p, state) in enumerate(zip(params, states, strict=True)):
        try:
            _sound(peaks[row])
            plain = p.is_greedy and not (p.logit_bias or p.has_penalties or len(state.output_ids) < p.min_tokens)
            token = best[row] if plain else _draw(logits[row], p, state, eos_ids)
        except SamplingError as error:
            raise SamplingError(f"row {row}: {error}", row) from None
        tokens.append(with_logprobs(logits[row], token, p.logprobs))
    return tokens


def _draw(logits: Tensor, params: SamplingParams, state: SamplingState, eos_ids: tuple[int, ...]) -> int:
    if params.seed is None and not params.is_greedy:
        raise RequestError("seed is None; call params.seeded() once a request, so that its draws can be repeated")
    probs = probabilities(logits, params, state.prompt_ids, state.output_ids, eos_ids)
    if params.is_greedy:
        return int(probs.max(dim=-1).indices)
    position = len(state.prompt_ids) + len(state.output_ids)
    return inverse_cdf(probs, uniform(params.seed, position, state.sequence))


def with_logprobs(logits: Tensor, token: int, count: int | None) -> SampledToken:
    """The token with its log-probability under raw logits (V,) and the `count` likeliest; None: without."""
    if count is None:
        return SampledToken(token)
    logits = logits.to(torch.float64)
    ids = [token, *(rank(logits, count).tolist() if count else [])]
    values = (logits[ids] - logits.logsumexp(-1)).tolist()
    return SampledToken(token, values[0], tuple(zip(ids[1:], values[1:], strict=True)))
