"""Speculative decoding: guess several tokens cheaply, check them in one pass of the target, change nothing.

verification   keep a draft, or draw what replaces it: the one part that the output depends on
proposal       what a proposer is given and gives; ngram, chains of a draft_model (and early exit) or of eagle, tree
eagle_file     a trained head on disk
length         how many drafts are worth it, from acceptance and measured costs
speculator     these together; decoding for one sequence, batch for the engine
"""

from .draft_model import DraftModel, first_layers
from .eagle import EagleHead, EagleProposer, train_eagle
from .ngram import NGram
from .proposal import Context, Proposal, Proposer
from .settings import METHODS, SpeculativeConfig, parse
from .speculator import Speculator, make_speculator
from .stats import SpeculationStats
from .tree import TokenTree, TreeView, tree_mask, verify_tree
from .verification import accept, residual, verify

__all__ = [
    "METHODS", "Context", "DraftModel", "EagleHead", "EagleProposer", "NGram", "Proposal", "Proposer",
    "SpeculationStats", "SpeculativeConfig", "Speculator", "TokenTree", "TreeView", "accept", "first_layers",
    "make_speculator", "parse", "residual", "train_eagle", "tree_mask", "verify", "verify_tree",
]  # fmt: skip
