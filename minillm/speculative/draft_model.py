"""A small model guesses: it reads what the target reads, one step for each draft, with caches of its own.

The draft may be any model with the target's vocabulary, or the target's own first layers under its own head (early
exit): no further weights, and a draft that costs their share of a step.
Sources: Leviathan et al. 2023 (arXiv 2211.17192); Zhang et al. 2023, "Draft & Verify" (arXiv 2309.08168) and Elhoushi
et al. 2024, "LayerSkip" (arXiv 2404.16710) for early exit. A model that was not trained for it exits badly.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..backend import attention
from ..errors import EngineError
from ..kv_cache import ContiguousCache
from ..transformer import Transformer
from .chains import FIRST, Chain, ChainProposer, side_by_side, with_room
from .proposal import Context
from .tree import TokenTree, TreeView


@dataclass
class _Held:
    """What the draft has read of one sequence. `fed` are the tokens in its cache, of which `sure` were no guesses."""

    cache: ContiguousCache
    fed: list[int] = field(default_factory=list)
    sure: int = 0

    def resume(self, tokens: Sequence[int]) -> None:
        """Forgets guesses that were not accepted, and at least the last token, whose output is wanted."""
        agree, end = min(self.sure, len(tokens) - 1), min(len(self.fed), len(tokens) - 1)
        while agree < end and self.fed[agree] == tokens[agree]:
            agree += 1
        self.sure = agree
        self.truncate(agree)

    def truncate(self, length: int) -> None:
        self.cache.truncate(length)
        del self.fed[length:]

    def make_room(self, tokens: int) -> None:
        self.cache = with_room(self.cache, tokens)


class DraftModel(ChainProposer):
    """Drafts of a model, read from caches that grow with their sequences."""

    def __init__(self, model: Transformer, vocab_size: int, eos_ids: Iterable[int] = (), sampled: bool = True) -> None:
        super().__init__(vocab_size, eos_ids, sampled)
        self.model = model
        self._held: dict[Hashable, _Held] = {}

    @torch.inference_mode()
    def propose_tree(self, context: Context, widths: Sequence[int]) -> TokenTree:
        """The likeliest `widths[0]` tokens, after each of them the likeliest `widths[1]`, and so on."""
        chain = self._begin(context)
        held, tree = chain.held, TokenTree([chain.known[-1]], [-1])
        nodes, level = 1, 1
        for width in widths:
            level *= width
            nodes += level
        held.make_room(len(chain.known) + nodes)
        if unread := chain.known[len(held.fed) : -1]:
            self._run(unread, range(len(held.fed), len(chain.known) - 1), held.cache)
            held.fed += unread
        held.sure = len(held.fed)
        view, leaves = TreeView(held.cache, tree), [0]
        for width in widths:
            depths = tree.depths()
            positions = [view.base + depths[leaf] for leaf in leaves]
            logits = self.model.logits(self._run([tree.tokens[leaf] for leaf in leaves], positions, view))
            best = logits[:, : self.vocab_size].topk(width).indices.tolist()
            leaves = [tree.add(token, leaf) for leaf, row in zip(leaves, best, strict=True) for token in row]
        return tree

    def forget(self, key: Hashable) -> None:
        self._held.pop(key, None)

    def _run(self, tokens: Sequence[int], positions: Iterable[int], cache) -> Tensor:
        device = self.model.device
        return self.model(torch.tensor(tokens, device=device), torch.tensor(list(positions), device=device), cache)

    def _begin(self, context: Context) -> Chain:
        held = self._held.get(context.key)
        if held is None:
            m = self.model
            held = _Held(ContiguousCache(m.config, FIRST, m.dtype, m.device, attention(m)))
            self._held[context.key] = held
        known = context.token_ids
        held.resume(known)
        most = min(context.count, self.model.config.max_position_embeddings - len(known))  # its own context's end
        return Chain(context, held, known, most)

    def _end(self, chain: Chain) -> None:
        chain.held.sure = min(len(chain.held.fed), len(chain.known))

    def _logits(self, chains: Sequence[Chain]) -> Tensor:
        """(B, V): the draft's, after all that each chain holds. Reads whatever it has not read yet."""
        tokens, positions, last = [], [], []
        for chain in chains:
            held = chain.held
            new = [*chain.known, *chain.tokens][len(held.fed) :]
            positions += range(len(held.fed), len(held.fed) + len(new))
            tokens += new
            last.append(len(tokens) - 1)
            held.make_room(len(held.fed) + len(new))
            held.fed += new
        counts = [end - start for start, end in zip([-1, *last], last, strict=False)]
        cache = side_by_side([chain.held.cache for chain in chains], counts)
        return self.model.logits(self._run(tokens, positions, cache)[last])[:, : self.vocab_size]


def first_layers(model: Transformer, layers: int) -> Transformer:
    """The model's first layers under its own final norm and head; every weight is shared. Raises EngineError."""
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers < len(model.blocks):
        raise EngineError(f"layers is {layers!r}; early exit needs 1 to {len(model.blocks) - 1} of the model's layers")
    config = replace(model.config, num_hidden_layers=layers, layer_types=model.config.layer_types[:layers])
    short = Transformer(config, model.embedding, list(model.blocks[:layers]), model.final_norm, model.lm_head).eval()
    short.rotary, short.layout, short.backend = model.rotary, model.layout, model.backend
    return short
