"""Tiny engines and what they must agree with."""

from __future__ import annotations

from functools import cache

from minillm import checkpoint
from minillm.batching import SchedulerConfig
from minillm.engine import Engine
from minillm.generate import Completion, generate_n
from minillm.sampling import SamplingParams
from tests import tiny


@cache
def load_tiny(folder):
    return checkpoint.load(folder, "float32")


def make_tiny(family: str, tmp_path_factory):
    """(model, tokenizer), made once a session."""
    folder = tmp_path_factory.getbasetemp() / f"serving-{family}"
    if not folder.exists():
        folder.mkdir()
        tiny.save(family, folder)
    return load_tiny(folder)


@cache
def alone(model, tokenizer, prompt: tuple[int, ...], params: SamplingParams) -> list[Completion]:
    """What generate.py answers to this request, with nobody else there."""
    return generate_n(model, tokenizer, list(prompt), params)


def make_engine(pair, batch_invariant: bool = False, speculative=None, **options) -> Engine:
    options = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32, **options}
    return Engine(*pair, SchedulerConfig(**options), batch_invariant, speculative=speculative)


def run(engine: Engine, check: bool = True) -> dict:
    """Steps until nothing is left. Returns the last output of each request; invariants hold after every step."""
    last, steps = {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert not (output.request_id in last and last[output.request_id].finished), "ended twice"
            last[output.request_id] = output
        if check:
            engine.scheduler.check()
        steps += 1
        assert steps < 5000, "the engine does not come to an end"
    return last


def answers(output) -> list[tuple]:
    return [(o.token_ids, o.text, o.finish_reason, o.stop_reason) for o in output.outputs]


def expected(pair, prompt, params) -> list[tuple]:
    done = alone(*pair, tuple(prompt), params)
    return [(d.token_ids, d.text, d.finish_reason, d.stop_reason) for d in done]
