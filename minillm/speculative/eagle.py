"""A head that guesses from the target's own thoughts: one layer that continues the target's hidden states.

The hidden state f(t) of the target knows more of the next token than the token t does; what it does not know is which
token was drawn after it. So the head reads both, and predicts the next hidden state:

    g(t+1) = block(W [embedding(x(t+1)); f(t)])          logits(t+1) = target's own norm and head of g(t+1)

and drafts on with its g in place of f. Trained to match f by smooth L1, and the target's distribution by cross-entropy.
Source: Li et al. 2024, "EAGLE" (arXiv 2401.15077), section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import Attention
from ..errors import EngineError
from ..kv_cache import ContiguousCache, NoCache
from ..layers import RMSNorm, SwiGLU
from ..sampling import inverse_cdf, probabilities, uniform
from ..transformer import Block, Transformer
from .proposal import NOTHING, Context, Proposal, Proposer
from .verification import DRAFT

_FEATURE_WEIGHT, _TOKEN_WEIGHT = 1.0, 0.1  # the paper's


class EagleHead(nn.Module):
    """One block of the target's shape; embedding, norm and head are the target's and stay as they are."""

    def __init__(self, target: Transformer, seed: int = 0) -> None:
        super().__init__()
        if target.config.is_mla or target.config.is_hybrid or target.config.is_moe:
            raise EngineError(f"an EAGLE head has a plain block; {target.config.model_type} has another kind")
        c = target.config
        self._target = [target]  # in a list: its weights are not the head's
        self.config = replace(c, num_hidden_layers=1, layer_types=c.layer_types[:1], qk_norm=False)
        d, width, rows = (
            c.hidden_size,
            c.num_attention_heads * c.head_dim,
            c.num_attention_heads + 2 * c.num_key_value_heads,
        )
        generator = torch.Generator().manual_seed(seed)
        self.join = _linear(2 * d, d, generator)
        attention = Attention(self.config, 0, _linear(d, rows * c.head_dim, generator), _linear(width, d, generator))
        mlp = SwiGLU(_linear(d, 2 * c.intermediate_size, generator), _linear(c.intermediate_size, d, generator))
        self.block = Block(
            RMSNorm(torch.ones(d), c.rms_norm_eps), attention, RMSNorm(torch.ones(d), c.rms_norm_eps), mlp
        )
        with torch.no_grad():  # begins as "the hidden state stays as it is"
            self.join.weight[:, d:] = torch.eye(d)

    @property
    def target(self) -> Transformer:
        return self._target[0]

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, cache) -> Tensor:
        """tokens (T,), each with the feature (T, d) of the token before it -> (T, d): their own, guessed."""
        x = self.join(torch.cat([F.embedding(tokens, self.target.embedding).float(), features], dim=-1))
        x = self.block(x, self.target.rotary(positions), cache)
        cache.advance(len(tokens))
        return x


def _linear(columns: int, rows: int, generator: torch.Generator) -> nn.Linear:
    layer = nn.Linear(columns, rows, bias=False)
    with torch.no_grad():
        layer.weight.normal_(0, 0.5 * columns**-0.5, generator=generator)
    return layer


@torch.inference_mode()
def features(target: Transformer, tokens: Sequence[int]) -> Tensor:
    """(T, d) float32: the target's hidden states over a text."""
    positions = torch.arange(len(tokens), device=target.device)
    return target(torch.tensor(tokens, device=target.device), positions, NoCache(target.config)).float()


def train_eagle(
    head: EagleHead,
    texts: Sequence[Sequence[int]],
    steps: int = 200,
    learning_rate: float = 1e-3,
    seed: int = 0,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """Trains on token sequences, one a step, and returns the losses. A few thousand tokens make a head that helps on
    text like them; they should be the target's own answers."""
    texts = [list(text) for text in texts if len(text) > 2]
    if not texts:
        raise EngineError("no text has three tokens or more, and the head learns from what follows; give longer ones")
    if wrong := [i for text in texts for i in text if not 0 <= i < len(head.target.embedding)]:
        raise EngineError(f"token {wrong[0]} is outside the target's vocabulary; encode with its own tokenizer")
    hidden = [features(head.target, text).clone() for text in texts]
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], learning_rate, weight_decay=0.01)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * (1 - step / steps)
        at = int(torch.randint(len(texts), (1,), generator=generator))
        optimizer.zero_grad()
        loss = _loss(head, torch.tensor(texts[at], device=head.target.device), hidden[at])
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        on_step(step, losses[-1])
    return losses


def _loss(head: EagleHead, tokens: Tensor, hidden: Tensor) -> Tensor:
    """Features f(0 … T-2) and tokens 1 … T-1 predict features f(1 … T-1)."""
    positions = torch.arange(len(tokens) - 1, device=tokens.device)
    guessed, wanted = head(tokens[1:], hidden[:-1], positions, NoCache(head.config)), hidden[1:]
    scale = wanted.pow(2).mean().sqrt()  # the residual stream of some models is in the hundreds
    feature = F.smooth_l1_loss(guessed / scale, wanted / scale)
    with torch.no_grad():
        aim = _logits(head.target, wanted).softmax(-1)
    token = F.cross_entropy(_logits(head.target, guessed), aim)
    return _FEATURE_WEIGHT * feature + _TOKEN_WEIGHT * token


def _logits(target: Transformer, hidden: Tensor) -> Tensor:
    """As target.logits, and differentiable in `hidden` if the head's layout is plain."""
    return target.lm_head(target.final_norm(hidden)).float()


@dataclass
class _Thread:
    """Of one sequence: the head's cache, and certain features that no certain token has joined yet."""

    cache: ContiguousCache
    pending: list[Tensor] = field(default_factory=list)
    read: int = 0  # certain pairs in the cache


class EagleProposer(Proposer):
    """Chains drafted by the head. The caller must `observe` the target's hidden states as they become certain."""

    needs_hidden = True

    def __init__(self, head: EagleHead, vocab_size: int, eos_ids: Iterable[int] = (), sampled: bool = True) -> None:
        self.head, self.vocab_size, self.eos_ids, self.sampled = head.eval(), vocab_size, tuple(eos_ids), sampled
        self._threads: dict[Hashable, _Thread] = {}

    def observe(self, key: Hashable, tokens: Sequence[int], hidden: Tensor) -> None:
        thread = self._threads.get(key)
        if thread is None:
            longest = self.head.config.max_position_embeddings
            thread = self._threads[key] = _Thread(ContiguousCache(self.head.config, longest))
        thread.pending.append(hidden.float())

    def forget(self, key: Hashable) -> None:
        self._threads.pop(key, None)

    def propose(self, contexts: Sequence[Context]) -> list[Proposal]:
        return [self._propose(context) for context in contexts]

    @torch.inference_mode()
    def _propose(self, context: Context) -> Proposal:
        thread = self._threads.get(context.key)
        known = context.token_ids
        if thread is None or thread.read + sum(map(len, thread.pending)) != len(known) - 1:
            return NOTHING  # it was not shown every token, as where a prefix came from a cache
        new, seen = torch.cat(thread.pending), thread.read
        thread.pending, thread.cache.length = [], seen
        feature = self._step(known[seen + 1 :], new, seen, thread.cache)
        thread.read = len(known) - 1
        tokens, probs = [], []
        while True:
            self._draw(context, tokens, probs, self.head.target.logits(feature)[0, : self.vocab_size])
            if len(tokens) >= min(context.count, thread.cache.max_tokens - len(known)):
                break
            feature = self._step(tokens[-1:], feature, len(known) - 2 + len(tokens), thread.cache)
        return Proposal(tokens, torch.stack(probs) if probs else None)

    def _step(self, tokens: Sequence[int], feature: Tensor, start: int, cache: ContiguousCache) -> Tensor:
        """The last guessed feature (1, d) after reading pairs from `start` on."""
        device = self.head.target.device
        positions = torch.arange(start, start + len(tokens), device=device)
        return self.head(torch.tensor(tokens, device=device), feature, positions, cache)[-1:]

    def _draw(self, context: Context, tokens: list[int], probs: list[Tensor], logits: Tensor) -> None:
        if context.params.is_greedy or not self.sampled:
            tokens.append(int(logits.argmax()))
            return
        output = [*context.output_ids, *tokens]
        probs.append(probabilities(logits, context.params, context.prompt_ids, output, self.eos_ids))
        u = uniform(context.params.seed, len(context.prompt_ids) + len(output), context.sequence, DRAFT)
        tokens.append(inverse_cdf(probs[-1], u))
