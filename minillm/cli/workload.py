"""Many requests to measure with: drawn here, or read from a file."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import RequestError, short
from ..tokenizer import Tokenizer
from .bench import FORM
from .measure import text_ids

REQUESTS, PROMPTS, OUTPUTS = 32, (16, 256), (16, 128)


class Job(NamedTuple):
    """One request: greedy, and exactly max_tokens long whatever the model says."""

    prompt_token_ids: list[int]
    max_tokens: int


def draw(tokenizer: Tokenizer, longest: int) -> list[Job]:
    """32 requests of real text, prompts of 16 to 256 and outputs of 16 to 128 tokens, the same ones every time.

    No two prompts begin alike, so that a prefix cache has nothing to find. Shorter ones where the longest sequence
    that the engine holds, or the tokenizer's text, is shorter.
    """
    scale = min(1.0, (longest - 1) / (PROMPTS[1] + OUTPUTS[1]))
    lengths = random.Random(0)
    sizes = [
        (max(1, int(lengths.randint(*PROMPTS) * scale)), max(1, int(lengths.randint(*OUTPUTS) * scale)))
        for _ in range(REQUESTS)
    ]
    ids = text_ids(tokenizer, sum(prompt for prompt, _ in sizes))
    jobs, start = [], 0
    for prompt, output in sizes:
        jobs.append(Job(ids[start : start + prompt], output))
        start += prompt
    return jobs


def read(path: str | Path, vocab_size: int, longest: int) -> list[Job]:
    """Jobs from a JSON file, each of at most `longest` tokens, prompt and output together.

    Raises RequestError naming the file, the entry, and the form that is wanted.
    """
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"workload {short(path)} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"workload {short(path)} is not JSON: {short(error)}; write {FORM}") from None
    if not isinstance(entries, list) or not entries:
        raise RequestError(f"workload {short(path)} must be a list of at least one request; write {FORM}")
    return [_job(path, i, entry, vocab_size, longest) for i, entry in enumerate(entries)]


def _job(path, index: int, entry, vocab_size: int, longest: int) -> Job:
    where = f"workload {short(path)}, entry {index}"
    if not isinstance(entry, dict) or set(entry) != {"prompt_token_ids", "max_tokens"}:
        raise RequestError(f"{where} must have prompt_token_ids and max_tokens, and nothing else; write {FORM}")
    ids, count = entry["prompt_token_ids"], entry["max_tokens"]
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise RequestError(f"{where}: prompt_token_ids must be a list of ids, 0 to {vocab_size - 1}, and not empty")
    if type(count) is not int or count < 1:
        raise RequestError(f"{where}: max_tokens is {short(count)}; it must be a whole number of at least 1")
    if len(ids) + count > longest:
        raise RequestError(f"{where} needs {len(ids) + count} tokens and the engine holds {longest}; shorten it")
    return Job(ids, count)


def totals(jobs: Sequence[Job]) -> tuple[int, int]:
    """(prompt tokens, output tokens)."""
    return sum(len(job.prompt_token_ids) for job in jobs), sum(job.max_tokens for job in jobs)
