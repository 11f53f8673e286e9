"""A proposer with the lengths it is asked for and the counts of what became of its drafts: what an engine holds."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from pathlib import Path

from .. import checkpoint
from ..errors import EngineError
from ..sampling import SamplingError
from ..tokenizer import Tokenizer
from ..transformer import Transformer
from .draft_model import DraftModel, first_layers
from .eagle import EagleHead, EagleProposer
from .length import Price, Trust, choose
from .ngram import NGram
from .proposal import NOTHING, Context, Proposal, Proposer
from .settings import SpeculativeConfig
from .stats import SpeculationStats
from .tree import TokenTree

BUILT_IN = "smollm2-draft"  # the draft that comes with minillm, for SmolLM2


class Speculator:
    """`length` says how many drafts to ask for, `propose` asks, `record` learns what was accepted."""

    def __init__(self, config: SpeculativeConfig, proposer: Proposer) -> None:
        self.config, self.proposer = config, proposer
        self.stats, self.price = SpeculationStats(), Price()
        self._trust: dict[Hashable, Trust] = {}

    def length(self, key: Hashable, most: int, sequences: int = 1) -> int:
        """Drafts worth asking for, of at most `most`, in a step that `sequences` share."""
        most = min(most, self.config.num_tokens)
        if most < 1 or not self.config.adaptive:
            return max(0, most)
        return choose(self._trust.setdefault(key, Trust()), self.price, most, sequences)

    def propose(self, contexts: Sequence[Context]) -> list[Proposal]:
        asked = [context for context in contexts if context.count > 0]
        if not asked:
            return [NOTHING] * len(contexts)
        started = time.perf_counter()
        try:
            found = iter(self.proposer.propose(asked))
        except SamplingError as error:
            raise EngineError(f"the draft cannot be sampled from: {error}; or speculate without it") from None
        proposals = [next(found) if context.count > 0 else NOTHING for context in contexts]
        self.price.observe_drafts(time.perf_counter() - started, sum(len(p.tokens) for p in proposals))
        return proposals

    def propose_tree(self, context: Context) -> TokenTree:
        return self.proposer.propose_tree(context, self.config.tree)

    def record(self, key: Hashable, drafted: int, accepted: int) -> None:
        self.stats.record(drafted, accepted)
        self._trust.setdefault(key, Trust()).observe(drafted, accepted)

    def forget(self, key: Hashable) -> None:
        self._trust.pop(key, None)
        self.proposer.forget(key)


def make_speculator(
    config: SpeculativeConfig | Speculator, model: Transformer, tokenizer: Tokenizer, engine: bool = False
) -> Speculator:
    """For this target. Raises EngineError for a target or a draft with which it cannot work, before anything runs."""
    made = config if isinstance(config, Speculator) else None
    config = config if made is None else made.config
    if not isinstance(config, SpeculativeConfig):
        raise EngineError(f"speculative is a {type(config).__name__}; give a SpeculativeConfig")
    refuse_states(model, "the target")
    if engine and config.tree:
        raise EngineError(
            "trees go with generate: in the engine's attention a row sees all rows of its sequence before it, and the "
            "branches of a tree must not see each other; leave tree out"
        )
    if made is None:
        return Speculator(config, _proposer(config, model, tokenizer))
    _check_target(made.proposer, model, tokenizer)
    return made


def _check_target(proposer: Proposer, model: Transformer, tokenizer: Tokenizer) -> None:
    """That a proposer, made before, was made for this target, or for one of its vocabulary."""
    if isinstance(proposer, EagleProposer):
        _eagle(proposer.head, model)
    vocab_size = min(model.config.vocab_size, tokenizer.vocab_size)
    if isinstance(proposer, DraftModel | EagleProposer) and proposer.vocab_size != vocab_size:
        raise EngineError(
            f"the speculator is for a vocabulary of {proposer.vocab_size} tokens and the target has {vocab_size}; "
            "make one for this target"
        )


def refuse_states(model: Transformer, who: str) -> None:
    if model.config.linear_layers:
        raise EngineError(
            f"{who} has {len(model.config.linear_layers)} linear layers, whose state cannot forget rejected drafts; "
            "run it without speculation"
        )


def _proposer(config: SpeculativeConfig, model: Transformer, tokenizer: Tokenizer) -> Proposer:
    if config.method == "ngram":
        return NGram(config.ngram_max, config.ngram_min)
    vocab_size = min(model.config.vocab_size, tokenizer.vocab_size)
    if config.method == "eagle":
        return EagleProposer(_eagle(config.draft, model), vocab_size, tokenizer.eos_ids, config.sampled)
    if config.method == "early_exit":
        draft = first_layers(model, config.layers)
    else:
        draft = _draft(config.draft, model, tokenizer)
    return DraftModel(draft, vocab_size, tokenizer.eos_ids, config.sampled)


def _draft(draft, model: Transformer, tokenizer: Tokenizer) -> Transformer:
    device = str(model.device)
    draft = BUILT_IN if draft is None else draft
    if isinstance(draft, str | Path):
        draft, own = checkpoint.load(draft, device=device)
        _same_vocabulary(own, tokenizer)
    if not isinstance(draft, Transformer):
        raise EngineError(f"the draft is a {type(draft).__name__}; give a loaded Transformer, a path or a hub name")
    refuse_states(draft, "the draft")
    if draft.config.vocab_size != model.config.vocab_size:
        raise EngineError(
            f"the draft has a vocabulary of {draft.config.vocab_size} tokens and the target one of "
            f"{model.config.vocab_size}; a draft must have the target's own"
        )
    return draft


def _same_vocabulary(draft: Tokenizer, target: Tokenizer) -> None:
    """Sizes may agree by chance; then each id must still stand for the same bytes."""
    ours, theirs = target.vocabulary.tokens, draft.vocabulary.tokens
    if ours == theirs:
        return
    other = next(i for i in sorted({*ours, *theirs}) if ours.get(i) != theirs.get(i))
    raise EngineError(
        f"token {other} is {theirs.get(other)!r} for the draft and {ours.get(other)!r} for the target; a draft must "
        "have the target's vocabulary"
    )


def _eagle(head: EagleHead | str | Path, model: Transformer) -> EagleHead:
    if isinstance(head, str | Path):
        return EagleHead.load(head, model)
    if not isinstance(head, EagleHead):
        raise EngineError(f"the draft is a {type(head).__name__}; method eagle needs an EagleHead or its folder")
    same = head.target.embedding is model.embedding and len(head.target.blocks) == len(model.blocks)
    if not same:  # on another backend or compiled it is another object, of the same weights
        raise EngineError("this EagleHead reads the hidden states of another model; train one for this target")
    return head
