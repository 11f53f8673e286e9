"""First stage: the target writes, through the engine, and says of every position what it might have written.

A round is one batch of requests and one file. A file that is there is not made again, so an interrupted run goes on
where it stopped. Seeds come from the recipe and the round, and the engine draws each request from its own seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

from ..errors import CheckpointError, short
from ..kv_cache import NoCache
from ..llm import LLM
from ..sampling_params import SamplingParams
from ..storage import write_atomically
from ..tokenizer import Tokenizer
from ..transformer import Transformer
from .prompts import HELD_OUT, TRAIN, Prompt, PromptMaker
from .recipe import SamplingRecipe, check_fingerprint, fingerprint

BATCH = 128  # sequences that decode together
LONGEST = 1024


class Texts(NamedTuple):
    """Texts of one round laid end to end: R texts, N tokens, k candidates.

    tokens (N,) int32; lengths (R,) int32; starts (R,) int32, tokens of each before the answer; temperature (R,)
    float32 of the answer; top_ids (N, k) int32 and top_logprobs (N, k) float16: the target's likeliest next tokens
    after each position, likeliest first.
    """

    tokens: Tensor
    lengths: Tensor
    starts: Tensor
    temperature: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


class Sampler:
    """The target as a writer. `round(i)` is a pure function of the recipe and i, for one number of threads."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, recipe: SamplingRecipe) -> None:
        self.model, self.recipe = model, recipe
        self.end = tokenizer.eos_ids[0]
        self.separator = tokenizer.special_tokens.get("<|endoftext|>", self.end)
        self.prompts = PromptMaker(tokenizer, HELD_OUT if recipe.held_out else TRAIN, self.separator)
        longest = min(LONGEST, model.config.max_position_embeddings)
        self.llm = LLM(model, tokenizer, max_num_seqs=BATCH, max_model_len=longest)

    def round(self, index: int) -> Texts:
        recipe, count = self.recipe, self.recipe.requests
        self.llm.reset_prefix_cache()  # what an earlier round left must not change how this one rounds
        generator = random.Random(f"{recipe.seed} {recipe.held_out} {index}")
        kinds, temperatures = (
            generator.choices(*zip(*shares, strict=True), k=count) for shares in (recipe.kinds, recipe.temperatures)
        )
        prompts = [self.prompts.draw(kind, generator) for kind in kinds]
        seeds = [generator.getrandbits(62) for _ in range(count)]
        starts = self._questions(prompts, seeds)
        params = [self._params(t, recipe.answer_tokens, s + 1) for t, s in zip(temperatures, seeds, strict=True)]
        answers = self.llm.generate(starts, params)
        texts = [start + out.outputs[0].token_ids for start, out in zip(starts, answers, strict=True)]
        return self._scored(texts, list(map(len, starts)), temperatures)

    def _params(self, temperature: float, tokens: int, seed: int) -> SamplingParams:
        ends = [self.end, self.separator]
        return SamplingParams(temperature=temperature, max_tokens=tokens, seed=seed, stop_token_ids=ends)

    def _questions(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[list[int]]:
        """Where each answer starts: after a prompt that asks for it, the model has first written a question."""
        recipe, starts = self.recipe, [prompt.ids for prompt in prompts]
        asking = [i for i, prompt in enumerate(prompts) if prompt.asks]
        if not asking:
            return starts
        params = [self._params(recipe.question_temperature, recipe.question_tokens, seeds[i]) for i in asking]
        for i, out in zip(asking, self.llm.generate([starts[i] for i in asking], params), strict=True):
            question = [t for t in out.outputs[0].token_ids if t not in (self.end, self.separator)]
            starts[i] = starts[i] + question + self.prompts.after
        return starts

    @torch.inference_mode()
    def _scored(self, texts: Sequence[list[int]], starts: Sequence[int], temperatures: Sequence[float]) -> Texts:
        ids, logprobs = zip(*(self._candidates(torch.tensor(text)) for text in texts), strict=True)
        tokens = torch.tensor([t for text in texts for t in text], dtype=torch.int32)
        lengths = torch.tensor([len(text) for text in texts], dtype=torch.int32)
        starts = torch.tensor(starts, dtype=torch.int32)
        return Texts(tokens, lengths, starts, torch.tensor(temperatures), torch.cat(ids), torch.cat(logprobs))

    def _candidates(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens (T,) -> ids (T, k) int32 and log-probabilities (T, k) float16 of what may follow each."""
        hidden = self.model(tokens, torch.arange(len(tokens)), NoCache(self.model.config))
        logits = self.model.logits(hidden)[:, : self.llm.engine.vocab_size]  # padding is never drawn
        values, ids = logits.topk(min(self.recipe.top_k, logits.shape[-1]))
        return ids.to(torch.int32), (values - logits.logsumexp(-1, keepdim=True)).to(torch.float16)


def shard_path(folder: Path, recipe: SamplingRecipe, index: int) -> Path:
    return folder / f"{'held-out' if recipe.held_out else 'text'}-{index:04d}.safetensors"


def write_shard(path: Path, texts: Texts, recipe: SamplingRecipe) -> None:
    data = save(texts._asdict(), {"recipe": fingerprint(recipe)})
    write_atomically(path, lambda file: file.write(data))


def read_shard(path: Path, recipe: SamplingRecipe) -> Texts:
    """Raises CheckpointError for a damaged file, RequestError for one of another recipe."""
    try:
        with safe_open(path, framework="pt") as file:
            check_fingerprint((file.metadata() or {}).get("recipe"), recipe, path)
            return Texts(*(file.get_tensor(name) for name in Texts._fields))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a whole file of texts ({short(error, 120)}); remove it") from None


def sample_texts(sampler: Sampler, folder: Path, tokens: int, progress: bool = True) -> Iterator[Texts]:
    """Rounds until they hold `tokens` tokens, each made or, if its file is there, read. Raises OSError on a full disk,
    CheckpointError or RequestError for a file that is not this recipe's."""
    recipe, done, index = sampler.recipe, 0, 0
    name = "held-out text" if recipe.held_out else "text"
    with tqdm(total=tokens, unit="tok", desc=name, disable=not progress, smoothing=0.1) as bar:
        while done < tokens:
            path = shard_path(folder, recipe, index)
            if not path.exists():
                write_shard(path, sampler.round(index), recipe)
            texts = read_shard(path, recipe)
            done, index = done + len(texts.tokens), index + 1
            bar.update(min(len(texts.tokens), tokens - bar.n))
            bar.refresh()  # rounds found on disk come too fast for the bar to show them by itself
            yield texts
