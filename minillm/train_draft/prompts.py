"""What the target is asked to write about. Training and held-out prompts share neither a template nor a topic.

Four kinds: `chat` fills a template, `self` lets the model write the question too, `text` begins a document that the
model goes on with, `free` gives it nothing but the token that separates documents.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from ..tokenizer import Tokenizer

_MARK = "\x00"


class Words(NamedTuple):
    """What prompts are made of."""

    questions: tuple[str, ...]
    openings: tuple[str, ...]
    topics: tuple[str, ...]


TRAIN = Words(
    questions=(
        "Explain {} to a beginner.",
        "What is {}?",
        "Write a short story about {}.",
        "Give me five tips about {}.",
        "Why does {} matter?",
        "Summarize what you know about {} in two sentences.",
        "Write a poem about {}.",
        "How would you teach {} to a child?",
        "List the advantages and disadvantages of {}.",
        "What are common mistakes with {}?",
        "Write an email to a colleague about {}.",
        "Compare {} and {}.",
        "Write a Python function about {}.",
        "What is the history of {}?",
        "Make a table of facts about {}.",
        "I want to learn {}. Where do I start?",
        "Tell me a joke about {}.",
        "How does {} work, step by step?",
        "Answer with yes or no, then say why: is {} difficult?",
        "Translate to French: I like {}.",
        "Write a product description for {}.",
        "Which books about {} do you know?",
        "Give three examples of {}.",
        "Repeat the word {} ten times.",
        "Count from 1 to 20, and after each number name something to do with {}.",
        "Write a JSON object that describes {}.",
        "Rewrite this politely: stop talking about {}.",
        "What questions should I ask an expert on {}?",
        "Explain the difference between {} and {}.",
        "Plan a week of work on {}.",
    ),
    openings=(
        "The history of {}",
        "{} is",
        "In the study of {}, it is",
        "# {}\n\n",
        "The most important thing about {} is",
        "Once upon a time there was",
        "def ",
        "import ",
        "class ",
        "Q: What is {}?\nA:",
        "Chapter 1\n\n",
        "Abstract\n\nWe study {}",
        "Today I",
        "There are many ways to think about {}.",
        "1. {}\n2.",
        "People often ask about {}.",
        "The capital of",
        "Dear",
        "To begin with {}, you need",
        "According to",
    ),
    topics=(
        "machine learning", "photosynthesis", "the Roman Empire", "baking bread", "chess", "black holes", "gardening",
        "binary search", "the water cycle", "jazz", "electric cars", "democracy", "sorting a list", "volcanoes",
        "the human heart", "public speaking", "recursion", "climate change", "dinosaurs", "meditation", "vaccines",
        "the stock market", "prime numbers", "a lost cat", "supply and demand", "solar panels", "knitting", "gravity",
        "the French Revolution", "databases", "coffee", "whales", "time management", "probability", "a brave robot",
        "the moon", "healthy breakfast", "poetry", "software testing", "friendship", "bridges", "bacteria", "football",
        "the Renaissance", "text files", "dreams", "earthquakes", "budgeting", "fractions", "the immune system",
        "a rainy day", "networks", "evolution", "cheese", "job interviews", "a dragon", "rivers", "encryption",
        "linear equations", "sleep", "recycling", "the violin", "matrices", "bees", "ancient Egypt", "running",
        "a haunted house", "string formatting", "light", "inflation", "tea", "trains", "teamwork", "genes", "mountains",
        "web servers", "painting", "statistics", "a long journey", "atoms", "cooking rice", "stars", "language",
        "dates and times", "storms", "negotiation", "calculus", "penguins", "loops", "architecture", "honesty",
        "oceans", "a small village", "version control", "nutrition", "magnets", "theatre", "queues", "the brain",
        "winter",
    ),
)  # fmt: skip

HELD_OUT = Words(
    questions=(
        "Describe {} in your own words.",
        "What should everybody know about {}?",
        "Write a dialogue between two friends who disagree about {}.",
        "How has {} changed over the last century?",
        "Write a short program that has to do with {}, and explain it.",
        "Give a recipe, a rule or a plan for {}.",
    ),
    openings=(
        "Few subjects are as rich as {}.",
        "A guide to {}:\n\n",
        "When the teacher came to {},",
        '"""Tools for {}."""\n\n',
    ),
    topics=(
        "lighthouses", "compilers", "the Silk Road", "tomatoes", "comets", "insurance", "origami", "hash tables",
        "glaciers", "opera", "bicycles", "the printing press", "geometry", "owls", "kindness", "antibiotics", "deserts",
        "a clever thief", "regular expressions", "sailing",
    ),
)  # fmt: skip


class Prompt(NamedTuple):
    """ids that the target goes on from; `asks` if it first writes the question as well."""

    ids: list[int]
    asks: bool = False


class PromptMaker:
    """Draws prompts of each kind for one target."""

    def __init__(self, tokenizer: Tokenizer, words: Words, separator: int) -> None:
        self.tokenizer, self.words, self.separator = tokenizer, words, separator

    @cached_property
    def _frame(self) -> tuple[list[int], list[int]]:
        """What the chat template puts before and after a question."""
        marked = self.tokenizer.apply_chat_template([{"role": "user", "content": _MARK}])
        before, after = (self.tokenizer.encode(part, allow_special=True) for part in marked.split(_MARK))
        return before, after

    @property
    def after(self) -> list[int]:
        return self._frame[1]

    def draw(self, kind: str, generator: random.Random) -> Prompt:
        if kind == "self":
            return Prompt(self._frame[0], asks=True)
        if kind == "free":
            return Prompt([self.separator])
        text = self._fill(self.words.questions if kind == "chat" else self.words.openings, generator)
        ids = self.tokenizer.encode(text)
        return Prompt([*self._frame[0], *ids, *self._frame[1]] if kind == "chat" else ids)

    def _fill(self, templates: Sequence[str], generator: random.Random) -> str:
        return generator.choice(templates).format(*generator.sample(self.words.topics, 2))
