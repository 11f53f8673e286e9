"""Several guesses at once: a tree of tokens, verified in one pass of the target.

Node 0 is the sequence's last token, whose keys are not cached yet; every other node is a guess of what follows its
parent. Node i stands at position base + depth(i) and attends to all that is cached, to its ancestors and to itself,
so that its logits are those of the one sequence that it ends. Siblings share a position and never see each other.
Source: Miao et al. 2023, "SpecInfer" (arXiv 2305.09781), section 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import as_wide_as_keys
from ..kv_cache import ContiguousCache, keys_and_values
from ..sampling import SampledToken, SamplingParams, SamplingState, sample


@dataclass
class TokenTree:
    """tokens[i] under parents[i], which comes before i; parents[0] is -1."""

    tokens: list[int]
    parents: list[int]

    def add(self, token: int, parent: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1

    def depths(self) -> list[int]:
        found: list[int] = []
        for parent in self.parents:
            found.append(0 if parent < 0 else found[parent] + 1)
        return found

    def path(self, node: int) -> list[int]:
        """Nodes from the root to this one."""
        found = [node]
        while self.parents[found[-1]] >= 0:
            found.append(self.parents[found[-1]])
        return found[::-1]

    def child(self, node: int, token: int) -> int | None:
        """The node that guesses this token after `node`."""
        both = zip(self.tokens, self.parents, strict=True)
        return next((i for i, pair in enumerate(both) if pair == (token, node)), None)


def tree_mask(parents: Sequence[int]) -> Tensor:
    """(N, N) booleans: may node i (row) see node j? Its ancestors and itself."""
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] = mask[parent]
        mask[node, node] = True
    return mask


class TreeView:
    """A contiguous cache as the nodes of a tree see it. Nodes may come in several passes, each after its parents.

    Their rows lie behind what is cached; `keep` moves those of the accepted path together and lets go of the others.
    """

    fresh = False

    def __init__(self, cache: ContiguousCache, tree: TokenTree) -> None:
        self.cache, self.tree, self.base, self.done = cache, tree, cache.length, 0
        self._layers = keys_and_values(cache.config, cache.storage)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, scale: float | None = None, keep=None):
        """As ContiguousCache.attend, for the next T nodes."""
        start = self.base + self.done
        end = start + q.shape[0]
        keys, values = self._layers[layer]
        keys[start:end] = k
        if v is not None:
            values[start:end] = v
        keys, values = keys[:end], values[:end]
        mask = self._mask(layer, q.shape[0], q.device)
        grouped = keys.shape[1] != q.shape[1]
        sides = (x.transpose(0, 1)[None] for x in (keys, as_wide_as_keys(values, keys)))  # (1, Hkv, S, D)
        queries = q.to(keys.dtype).transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(queries, *sides, attn_mask=mask, scale=scale, enable_gqa=grouped)
        return out[0].transpose(0, 1)[..., : values.shape[-1]].to(q.dtype)

    def _mask(self, layer: int, count: int, device) -> Tensor:
        """(T, base + nodes so far)."""
        window, sinks = self.cache.config.window(layer), self.cache.config.sinks(layer)
        end = self.done + count
        own = tree_mask(self.tree.parents[:end])[self.done :]
        mask = torch.cat([torch.ones(count, self.base, dtype=torch.bool), own], dim=1)
        if window is not None:
            depths = torch.tensor(self.tree.depths()[:end]) + self.base
            key = torch.cat([torch.arange(self.base), depths])
            mask &= (key > depths[self.done :, None] - window) | (key < sinks)
        return mask.to(device)

    def advance(self, count: int) -> None:
        self.done += count

    def keep(self, path: Sequence[int]) -> None:
        """The nodes of `path`, from the root on, are now the sequence."""
        rows = [self.base + node for node in path]
        self.cache.storage[:, :, self.base : self.base + len(rows)] = self.cache.storage[:, :, rows]
        self.cache.length = self.base + len(rows)


def verify_tree(
    logits: Tensor,
    tree: TokenTree,
    params: SamplingParams,
    state: SamplingState,
    vocab_size: int | None = None,
    eos_ids: Iterable[int] = (),
) -> tuple[list[SampledToken], list[int]]:
    """(tokens, path of the nodes whose keys now belong to the sequence). logits (N, V), a row for each node.

    At each node the target draws as in plain decoding, and the walk goes on while some child had guessed the draw: so
    every token is the one of the plain run, and several guesses of one token are several chances.
    """
    output, tokens, node = list(state.output_ids), [], 0
    while node is not None:
        here = SamplingState(state.prompt_ids, output, state.sequence)
        (token,) = sample(logits[node, None], [params], [here], vocab_size, eos_ids)
        tokens.append(token)
        output.append(token.id)
        path, node = tree.path(node), tree.child(node, token.id)
    return tokens, path
