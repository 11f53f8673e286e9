"""Prefill and decode for one sequence, one token at a time: what every later engine must agree with."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral

import numpy as np
import torch

from .backend import attention
from .errors import RequestError
from .kv_cache import ContiguousCache
from .sampling import SampledToken, SamplingParams, SamplingState, sample
from .stopping import Emission, StopChecker
from .tokenizer import StreamDecoder, Tokenizer
from .transformer import Transformer

GREEDY = SamplingParams(temperature=0, max_tokens=64)


@dataclass(frozen=True)
class Chunk:
    """What one step gave: a token, the text that is now certain (it may be empty), and at the end the reason."""

    text: str
    token: SampledToken
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class Completion:
    """A finished sequence. `token_ids` holds every token drawn, a stop or end token too; `text` leaves it out.

    Times are seconds since the request began, one for each token, so that every latency follows from them.
    """

    prompt_token_ids: list[int]
    text: str = ""
    tokens: list[SampledToken] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def ttft_s(self) -> float:
        """Time to first token: everything from the request to the first token drawn, tokenizing included."""
        return self.token_times[0]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: (last - first) / (n - 1); None for a single token."""
        n = len(self.token_times)
        return (self.token_times[-1] - self.token_times[0]) / (n - 1) if n > 1 else None


def encode_prompt(model: Transformer, tokenizer: Tokenizer, prompt: str | Sequence[int]) -> list[int]:
    """Token ids of a text, or the ids given, checked. Raises RequestError for what the model cannot take."""
    if not isinstance(prompt, str | Sequence | np.ndarray):
        raise RequestError(f"the prompt is {type(prompt).__name__}; give a text or a list of token ids")
    ids = tokenizer.encode(prompt, add_special=True) if isinstance(prompt, str) else list(prompt)
    if not ids:
        raise RequestError("the prompt is empty; give at least one token for the model to continue")
    limit = min(model.config.vocab_size, tokenizer.vocab_size)
    if bad := [i for i in ids if isinstance(i, bool) or not isinstance(i, Integral) or not 0 <= i < limit]:
        raise RequestError(f"prompt token {bad[0]!r} is not an id of this vocabulary, 0 to {limit - 1}")
    if len(ids) >= model.config.max_position_embeddings:
        raise RequestError(
            f"the prompt has {len(ids)} tokens and the model's context is {model.config.max_position_embeddings}, "
            "which must hold at least one token of answer too; shorten the prompt"
        )
    return [int(i) for i in ids]


@torch.inference_mode()
def next_logits(model: Transformer, ids: Sequence[int], cache, chunk: int | None = None) -> torch.Tensor:
    """Logits (V,) of the token after `ids`, computing only what `cache` does not hold yet.

    With an empty cache that is prefill, with all but the last token cached it is a decode step, and a cache that
    never holds anything computes the whole sequence every time. `chunk` bounds the tokens of one forward pass.
    """
    while True:
        start = cache.length
        end = len(ids) if chunk is None else min(len(ids), start + chunk)
        tokens = torch.tensor(ids[start:end], device=model.device)
        hidden = model(tokens, torch.arange(start, end, device=model.device), cache)
        if end == len(ids):
            return model.logits(hidden[-1:])[0]
        if cache.length != end:
            raise RequestError("a cache that keeps nothing cannot take a prompt in chunks; leave out chunk")


def stream(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    params: SamplingParams = GREEDY,
    cache=None,
    chunk: int | None = None,
    sequence: int = 0,
    speculative=None,
) -> Iterator[Chunk]:
    """Yields a Chunk for each token as it is drawn; the joined texts are the answer.

    prompt is text (special tokens in it are plain text) or token ids. `cache` may already hold a proper prefix of the
    prompt; by default one of the right size is made, and one that fills up ends the answer with "length". `sequence`
    tells apart the n answers of one request. `speculative` is a SpeculativeConfig, or a Speculator, whose counts say
    afterwards what became of the drafts.
    Raises RequestError before the first step for a prompt or parameters that cannot be served.
    """
    ids = encode_prompt(model, tokenizer, prompt)
    params = params.seeded()
    params.validate(min(model.config.vocab_size, tokenizer.vocab_size))
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise RequestError(f"chunk is {chunk!r}; it must be a whole number of at least 1, or None for the whole prompt")
    if cache is None:
        room = model.config.max_position_embeddings
        wanted = room if params.max_tokens is None else len(ids) + params.max_tokens
        cache = ContiguousCache(model.config, min(room, wanted), model.dtype, model.device, attention(model))
    if cache.length >= len(ids):
        raise RequestError(f"the cache holds {cache.length} tokens, the prompt has {len(ids)}; reset the cache")
    if len(ids) > _room(model, cache):
        raise RequestError(f"the prompt has {len(ids)} tokens, the cache room for {cache.max_tokens}; make it larger")
    if speculative is not None:
        return _speculative_steps(model, tokenizer, ids, params, cache, chunk, sequence, speculative)
    return _steps(model, tokenizer, ids, params, cache, chunk, sequence)


def _room(model: Transformer, cache) -> int:
    """Tokens that a sequence can have in the cache; the last token drawn never enters it."""
    return min(model.config.max_position_embeddings, getattr(cache, "max_tokens", model.config.max_position_embeddings))


def take_token(checker: StopChecker, decoder: StreamDecoder, token_id: int) -> Emission:
    """One drawn token through detokenizer and stop rules; the last one brings along whatever text was held back.

    The text of a stop or end token never enters the decoder, unless the request wants to see it.
    """
    silent = checker.stops_at(token_id) and not checker.params.include_stop_str_in_output
    emission = checker.push(token_id, "" if silent else decoder.push(token_id))
    if emission.finish_reason is None:
        return emission
    rest = checker.flush(decoder.flush())
    return rest._replace(text=emission.text + rest.text)


def _longest(model: Transformer, cache) -> int:
    """Prompt and answer together: the last token needs no room in the cache."""
    return min(model.config.max_position_embeddings, _room(model, cache) + 1)


def _speculative_steps(model, tokenizer, ids, params, cache, chunk, sequence, speculative) -> Iterator[Chunk]:
    from .speculative.decoding import SpeculativeDecoder, speculative_steps  # stands above this module
    from .speculative.speculator import make_speculator

    speculator = make_speculator(speculative, model, tokenizer)
    decoder = SpeculativeDecoder(model, tokenizer, ids, params, cache, speculator, chunk, sequence)
    return speculative_steps(decoder, tokenizer, _longest(model, cache))


def _steps(model, tokenizer, ids: list[int], params: SamplingParams, cache, chunk, sequence: int) -> Iterator[Chunk]:
    prompt_length, ids = len(ids), list(ids)
    decoder = StreamDecoder(tokenizer, skip_special=True)
    longest = _longest(model, cache)
    checker = StopChecker(params, tokenizer.eos_ids, longest, prompt_length)
    vocab_size = min(model.config.vocab_size, tokenizer.vocab_size)
    while True:
        logits = next_logits(model, ids, cache, chunk)
        state = SamplingState(ids[:prompt_length], ids[prompt_length:], sequence)
        (token,) = sample(logits[None], [params], [state], vocab_size, tokenizer.eos_ids)
        ids.append(token.id)
        step = take_token(checker, decoder, token.id)
        yield Chunk(step.text, token, step.finish_reason, step.stop_reason)
        if step.finish_reason is not None:
            return


def generate(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    params: SamplingParams = GREEDY,
    cache=None,
    chunk: int | None = None,
    sequence: int = 0,
    speculative=None,
) -> Completion:
    """The whole answer with its timings; arguments as in `stream`."""
    started = time.perf_counter()
    prompt = encode_prompt(model, tokenizer, prompt)
    done = Completion(prompt)
    for step in stream(model, tokenizer, prompt, params, cache, chunk, sequence, speculative):
        done.token_times.append(time.perf_counter() - started)
        done.tokens.append(step.token)
        done.text += step.text
    done.finish_reason, done.stop_reason = step.finish_reason, step.stop_reason
    return done


def generate_n(
    model: Transformer, tokenizer: Tokenizer, prompt, params: SamplingParams, speculative=None, new_cache=lambda: None
) -> list[Completion]:
    """The params.n answers of one request, one after another, each from its own stream of the one seed, and each from a
    cache of its own: `new_cache()`, by default generate's."""
    params = params.seeded()
    return [
        generate(model, tokenizer, prompt, replace(params, n=1), new_cache(), sequence=i, speculative=speculative)
        for i in range(params.n)
    ]
