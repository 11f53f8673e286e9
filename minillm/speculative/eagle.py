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
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import Attention
from ..backend import with_backend
from ..errors import EngineError
from ..kv_cache import ContiguousCache, NoCache
from ..layers import Linear, RMSNorm, SwiGLU
from ..transformer import Block, Transformer
from . import eagle_file
from .chains import FIRST, Chain, ChainProposer, copied, side_by_side, with_room
from .proposal import Context

_FEATURE_WEIGHT, _TOKEN_WEIGHT = 1.0, 0.1  # the paper's
_HELD = 64  # certain features of a sequence that wait to be read; a prompt's would weigh more than what is made of them


class EagleHead(nn.Module):
    """One block of the target's shape; embedding, norm and head are the target's and stay as they are."""

    def __init__(self, target: Transformer, seed: int = 0) -> None:
        super().__init__()
        if target.config.is_mla or target.config.is_hybrid or target.config.is_moe:
            raise EngineError(
                f"an EAGLE head has a plain block; {target.config.model_type} has another kind; speculate with ngram, "
                "draft or early_exit"
            )
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
        self.to(target.device)

    @property
    def target(self) -> Transformer:
        return self._target[0]

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, cache) -> Tensor:
        """tokens (T,), each with the feature (T, d) of the token before it -> (T, d): their own, guessed."""
        x = self.join(torch.cat([F.embedding(tokens, self.target.embedding).float(), features], dim=-1))
        x = self.block(x, self.target.rotary(positions), cache)
        cache.advance(len(tokens))
        return x

    def tensors(self) -> dict[str, Tensor]:
        """Views of its weights by the names of published heads (eagle_file.py)."""
        queries, keys = (n * self.config.head_dim for n in (self.block.attention.heads, self.block.attention.kv_heads))
        q, k, v = self.block.attention.qkv_proj.weight.detach().split([queries, keys, keys])
        gate, up = self.block.mlp.gate_up_proj.weight.detach().chunk(2)
        parts = {
            "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
            "self_attn.o_proj": self.block.attention.o_proj.weight, "mlp.gate_proj": gate, "mlp.up_proj": up,
            "mlp.down_proj": self.block.mlp.down_proj.weight, "input_layernorm": self.block.attn_norm.weight,
            "post_attention_layernorm": self.block.ffn_norm.weight,
        }  # fmt: skip
        layer = {f"layers.0.{name}.weight": weight.detach() for name, weight in parts.items()}
        return {"fc.weight": self.join.weight.detach(), **layer}

    def save(self, folder: str | Path, target_name: str | None = None) -> int:
        """Writes it to a folder, new or empty, whole or not at all; returns the bytes of its weights. Reloaded it is
        equal bit for bit. `target_name` is for people: an error about another target shows it.

        Raises RequestError for a folder that holds something, CheckpointError for weights that are not finite.
        """
        return eagle_file.write(folder, self.tensors(), self.config, self.target, target_name)

    @classmethod
    def load(cls, folder: str | Path, target: Transformer) -> EagleHead:
        """A head that `save` wrote, for the target that it was trained for, in whatever layout that is now.

        Raises EngineError for another target or one that can have no head, CheckpointError for a damaged file.
        """
        head = cls(target)
        own = head.tensors()
        found = eagle_file.read(folder, {name: tuple(part.shape) for name, part in own.items()}, target)
        for name, part in own.items():
            part.copy_(found[name])
        eps = head.config.rms_norm_eps  # a norm folds its weight into a constant when it is made
        head.block.attn_norm, head.block.ffn_norm = (
            RMSNorm(found[f"layers.0.{name}.weight"], eps) for name in ("input_layernorm", "post_attention_layernorm")
        )
        return head.to(target.device).eval()


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
    generator, logits = torch.Generator().manual_seed(seed), _differentiable(head.target)
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], learning_rate, weight_decay=0.01)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * (1 - step / steps)
        at = int(torch.randint(len(texts), (1,), generator=generator))
        optimizer.zero_grad()
        loss = _loss(head, logits, torch.tensor(texts[at], device=head.target.device), hidden[at])
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        on_step(step, losses[-1])
    return losses


def _loss(head: EagleHead, logits: Callable[[Tensor], Tensor], tokens: Tensor, hidden: Tensor) -> Tensor:
    """Features f(0 … T-2) and tokens 1 … T-1 predict features f(1 … T-1)."""
    positions = torch.arange(len(tokens) - 1, device=tokens.device)
    guessed, wanted = head(tokens[1:], hidden[:-1], positions, NoCache(head.config)), hidden[1:]
    scale = wanted.pow(2).mean().sqrt()  # the residual stream of some models is in the hundreds
    feature = F.smooth_l1_loss(guessed / scale, wanted / scale)
    with torch.no_grad():
        aim = logits(wanted).softmax(-1)
    token = F.cross_entropy(logits(guessed), aim)
    return _FEATURE_WEIGHT * feature + _TOKEN_WEIGHT * token


def _differentiable(target: Transformer) -> Callable[[Tensor], Tensor]:
    """The target's own norm and head, hidden (T, d) -> logits (T, V) float32, with a gradient. A packed or rounded
    matrix has none or a wrong one, so what it makes of the unit vectors, which is the matrix, takes its place."""
    target = with_backend(target, "torch")
    norm, matrix = target.final_norm, target.lm_head
    if type(matrix) is Linear:
        return lambda hidden: matrix(norm(hidden.to(target.dtype))).float()
    with torch.no_grad():
        unit = torch.eye(target.config.hidden_size, dtype=target.dtype, device=target.device)
        columns = matrix(unit).float()  # (d, V)
    return lambda hidden: norm(hidden.to(target.dtype)).float() @ columns


@dataclass
class _Thread:
    """What the head knows of one sequence, from the token at `base` on: ids and features that are certain, and a cache
    of the pairs that it has read. Pair i is feature i and token i + 1; rows of guesses may lie behind the first `read`.
    """

    cache: ContiguousCache
    base: int
    tokens: list[int] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)  # of the tokens from `read` on
    read: int = 0
    guess: Tensor | None = None  # (1, d), while a chain is drafted

    @property
    def end(self) -> int:
        return self.base + len(self.tokens)

    def unread(self, *following: int) -> tuple[list[int], Tensor]:
        """Tokens of the pairs not read yet, and their features; `following` is the token after those observed."""
        tokens = [*self.tokens[self.read + 1 :], *following]
        return tokens, torch.cat(self.features)[: len(tokens)]

    def settle(self) -> None:
        """All pairs were read. The newest feature stays, and its pair is read again: the token after it may not be
        known yet, and a step that was drafted for may be put off."""
        newest = self.features[-1][-1:].clone()
        self.features, self.read = [newest], len(self.tokens) - 1
        self.cache.truncate(self.read)
        self.guess = None


class EagleProposer(ChainProposer):
    """Chains drafted by the head. The caller must `observe` the target's hidden states as they become certain.

    Positions are the sequence's own wherever its observation begins; what lies before, the head does without.
    """

    needs_hidden = True

    def __init__(self, head: EagleHead, vocab_size: int, eos_ids: Iterable[int] = (), sampled: bool = True) -> None:
        super().__init__(vocab_size, eos_ids, sampled)
        self.head = head.to(head.target.device).eval()
        self._threads: dict[Hashable, _Thread] = {}

    @torch.inference_mode()
    def observe(self, key: Hashable, start: int, tokens: Sequence[int], hidden: Tensor) -> None:
        thread = self._threads.get(key)
        if thread is None or start > thread.end:
            cache = ContiguousCache(self.head.config, FIRST, device=self.head.target.device)
            thread = self._threads[key] = _Thread(cache, start)
        seen = thread.end - start
        if seen >= len(tokens):
            return
        thread.tokens += tokens[seen:]
        thread.features.append(hidden[seen:].to(torch.float32, copy=True))  # a view would keep the whole step's
        if len(thread.tokens) - thread.read > _HELD:
            self._run([(thread, *thread.unread())])
            thread.settle()

    @torch.inference_mode()
    def fork(self, key: Hashable, child: Hashable) -> None:
        if (thread := self._threads.get(key)) is not None:
            own = copied(thread.cache, thread.cache.max_tokens)
            self._threads[child] = replace(
                thread, cache=own, tokens=list(thread.tokens), features=list(thread.features)
            )

    def forget(self, key: Hashable) -> None:
        self._threads.pop(key, None)

    def _begin(self, context: Context) -> Chain | None:
        thread, known = self._threads.get(context.key), context.token_ids
        if thread is None or thread.end != len(known) - 1:
            return None  # the feature that the last token joins was not observed
        most = min(context.count, self.head.config.max_position_embeddings - len(known))
        return Chain(context, thread, known, most)

    def _logits(self, chains: Sequence[Chain]) -> Tensor:
        parts = []
        for chain in chains:
            thread = chain.held
            new = thread.unread(chain.known[-1]) if thread.guess is None else (chain.tokens[-1:], thread.guess)
            parts.append((thread, *new))
        guessed = self._run(parts)
        for i, chain in enumerate(chains):
            chain.held.guess = guessed[i : i + 1]
        target = self.head.target  # its final norm and head compute in its own precision
        return target.logits(guessed.to(target.dtype))[:, : self.vocab_size]

    def _end(self, chain: Chain) -> None:
        if chain.held.guess is not None:
            chain.held.settle()

    def _run(self, parts: Sequence[tuple[_Thread, Sequence[int], Tensor]]) -> Tensor:
        """(B, d): the last feature guessed for each, after it has read these tokens, each with the feature before."""
        tokens, positions, last = [], [], []
        for thread, new, _ in parts:
            length = thread.cache.length
            thread.cache = with_room(thread.cache, length + len(new))
            positions += range(thread.base + length, thread.base + length + len(new))
            tokens += new
            last.append(len(tokens) - 1)
        cache = side_by_side([thread.cache for thread, *_ in parts], [len(new) for _, new, _ in parts])
        device, rows = self.head.target.device, torch.cat([rows for *_, rows in parts])
        return self.head(torch.tensor(tokens, device=device), rows, torch.tensor(positions, device=device), cache)[last]
