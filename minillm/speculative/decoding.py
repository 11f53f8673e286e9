"""One sequence, several tokens a step: propose, verify in one pass, forget what was rejected."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..errors import RequestError
from ..generate import Chunk, take_token
from ..kv_cache import ContiguousCache
from ..sampling import SampledToken, SamplingParams, SamplingState
from ..stopping import StopChecker
from ..tokenizer import StreamDecoder, Tokenizer
from ..transformer import Transformer
from .proposal import NOTHING, Context, Proposal
from .speculator import Speculator
from .tree import TokenTree, TreeView, verify_tree
from .verification import verify


class SpeculativeDecoder:
    """The target's side of it. `step` gives the next tokens, at least one."""

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, ids: Sequence[int], params: SamplingParams,
        cache: ContiguousCache, speculator: Speculator, chunk: int | None = None, sequence: int = 0,
    ) -> None:  # fmt: skip
        if not isinstance(cache, ContiguousCache):
            raise RequestError(
                f"a {type(cache).__name__} cannot forget rejected drafts; speculate with ContiguousCache"
            )
        if speculator.config.tree and not hasattr(cache, "storage"):
            raise RequestError("a tree of drafts needs a cache that is not quantized; draft chains, or use float32")
        self.model, self.params, self.cache, self.chunk, self.sequence = model, params, cache, chunk, sequence
        self.prompt, self.output, self.speculator = list(ids), [], speculator
        self.vocab_size, self.eos_ids = min(model.config.vocab_size, tokenizer.vocab_size), tokenizer.eos_ids

    @torch.inference_mode()
    def step(self) -> list[SampledToken]:
        """Drafts that the target keeps and its own next token; their keys are cached, all but the last one's."""
        tree = self.speculator.config.tree
        branches = tree and self._room() >= len(tree)
        self._prefill(1 if branches else self.chunk)
        started = time.perf_counter()
        tokens, drafted, rows = self._tree_step() if branches else self._chain_step()
        self.output += [token.id for token in tokens]
        self.speculator.record(self, drafted, len(tokens) - 1)
        if rows == drafted + 1:  # nothing of the prompt in it
            self.speculator.price.observe(time.perf_counter() - started - self._drafting, rows)
        return tokens

    def _ids(self) -> list[int]:
        return [*self.prompt, *self.output]

    def _prefill(self, left: int | None) -> None:
        """Computes known tokens, in chunks, until no more than `left` have to come with the step itself."""
        ids = self._ids()
        until = 0 if left is None else len(ids) - left
        while (start := self.cache.length) < until:
            end = min(until, start + (self.chunk or until))
            self._observe(start, ids[start:end], self._run(ids[start:end], range(start, end), self.cache))

    def _run(self, tokens: Sequence[int], positions: Sequence[int], cache) -> Tensor:
        device = self.model.device
        return self.model(torch.tensor(tokens, device=device), torch.tensor(positions, device=device), cache)

    def _observe(self, start: int, tokens: Sequence[int], hidden: Tensor) -> None:
        if self.speculator.proposer.needs_hidden:
            self.speculator.proposer.observe(self, start, tokens, hidden)

    def _room(self) -> int:
        """Drafts that fit into the cache and that the answer can still use, beside the token that comes anyway."""
        known = len(self.prompt) + len(self.output)
        limit = min(self.model.config.max_position_embeddings, self.cache.max_tokens)
        left = limit if self.params.max_tokens is None else self.params.max_tokens - len(self.output) - 1
        return max(0, min(limit - known, left, self.cache.most_drafts))

    def _context(self, count: int) -> Context:
        return Context(self, self.prompt, self.output, self.params, count, self.sequence)

    def _state(self) -> SamplingState:
        return SamplingState(self.prompt, self.output, self.sequence)

    def _chain_step(self) -> tuple[list[SampledToken], int, int]:
        """(tokens, drafts, rows)."""
        started = time.perf_counter()
        proposal = self._propose()
        self._drafting = time.perf_counter() - started
        start, known = self.cache.length, len(self.prompt) + len(self.output)
        rows = [*self._ids()[start:], *proposal.tokens]
        hidden = self._run(rows, range(start, start + len(rows)), self.cache)
        logits = self.model.logits(hidden[known - 1 - start :])
        tokens = verify(logits, proposal, self.params, self._state(), self.vocab_size, self.eos_ids)
        self.cache.truncate(known + len(tokens) - 1)
        certain = self.cache.length - start
        self._observe(start, rows[:certain], hidden[:certain])
        return tokens, len(proposal.tokens), len(rows)

    def _propose(self) -> Proposal:
        if self.speculator.config.tree:
            return NOTHING  # at the end of an answer, where a tree has no room
        count = self.speculator.length(self, self._room())
        return self.speculator.propose([self._context(count)])[0] if count else NOTHING

    def _tree_step(self) -> tuple[list[SampledToken], int, int]:
        started = time.perf_counter()
        tree = self._cut(self.speculator.propose_tree(self._context(len(self.speculator.config.tree))))
        self._drafting = time.perf_counter() - started
        view = TreeView(self.cache, tree)
        positions = [view.base + depth for depth in tree.depths()]
        logits = self.model.logits(self._run(tree.tokens, positions, view))
        tokens, path = verify_tree(logits, tree, self.params, self._state(), self.vocab_size, self.eos_ids)
        view.keep(path)
        return tokens, len(self.speculator.config.tree), len(tree.tokens)

    def _cut(self, tree: TokenTree) -> TokenTree:
        """The nodes that the cache has room for; parents come first, so what is left is a tree."""
        room = self.cache.max_tokens - self.cache.length
        return TokenTree(tree.tokens[:room], tree.parents[:room])


def speculative_steps(decoder: SpeculativeDecoder, tokenizer: Tokenizer, longest: int) -> Iterator[Chunk]:
    """As generate's own loop: a Chunk for each token; what was accepted beyond the end is dropped."""
    text = StreamDecoder(tokenizer, skip_special=True)
    checker = StopChecker(decoder.params, tokenizer.eos_ids, longest, len(decoder.prompt))
    try:
        while True:
            for token in decoder.step():
                step = take_token(checker, text, token.id)
                yield Chunk(step.text, token, step.finish_reason, step.stop_reason)
                if step.finish_reason is not None:
                    return
    finally:
        decoder.speculator.forget(decoder)
