"""An EAGLE head beside everything else: drawn answers, few bits, the server, faults; and how it is trained."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch

from minillm import checkpoint
from minillm.batching import SchedulerConfig
from minillm.engine import Engine
from minillm.errors import EngineError
from minillm.kv_cache import NoCache
from minillm.llm import LLM
from minillm.quantization import quantize_
from minillm.sampling import SamplingParams, probabilities
from minillm.serving import serve_in_thread
from minillm.speculative import (
    Proposal,
    Proposer,
    SpeculativeConfig,
    Speculator,
    chains,
    eagle,
    first_layers,
    make_speculator,
)
from tests import tiny
from tests.eagle_heads import GREEDY, JOBS, PROMPT, SAMPLED, Checked, checked, head_of, proposer_of, serve, trained
from tests.planted import planted
from tests.serving import alone, answers, expected, make_engine, make_tiny, run
from tests.serving_http import MODEL, client_of, wait_idle
from tests.test_backend import DEVICE, needs_triton
from tests.test_speculative_verification import chi_square


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return make_tiny("qwen3", tmp_path_factory)


# --- sampled drafts ---


def triples(pair, samples: int) -> tuple[torch.Tensor, torch.Tensor, Speculator]:
    """Counts of the first three tokens over seeds, and their probabilities. The first comes with the prompt; the others
    are drafted and judged."""
    config = SpeculativeConfig("eagle", 2, draft=head_of(*pair), adaptive=False)
    engine = make_engine(pair, False, config, num_blocks=256, max_num_seqs=32, max_num_batched_tokens=128)
    jobs = [(PROMPT, SamplingParams(seed=seed, **SAMPLED)) for seed in range(samples)]
    cells = cells_of(pair)
    counts = torch.zeros(len(cells))
    places = {tokens: i for i, tokens in enumerate(cells)}
    for output in serve(engine, jobs).values():
        counts[places[tuple(output.outputs[0].token_ids[:3])]] += 1
    return counts, torch.tensor(list(cells.values())), engine.speculation.speculator


@cache
def cells_of(pair) -> dict[tuple[int, ...], float]:
    """Three tokens -> their probability, from the target without any cache."""
    model, tokenizer = pair
    params, cells = SamplingParams(seed=0, **SAMPLED), {(): 1.0}
    for _ in range(3):
        longer = {}
        for tokens, mass in cells.items():
            ids = [*PROMPT, *tokens]
            hidden = model(torch.tensor(ids), torch.arange(len(ids)), NoCache(model.config))
            p = probabilities(model.logits(hidden[-1:])[0, : tokenizer.vocab_size], params, PROMPT, tokens)
            longer |= {(*tokens, i): mass * float(p[i]) for i in p.nonzero()[:, 0].tolist()}
        cells = longer
    return cells


def test_sampled_drafts_leave_the_distribution_alone(qwen3):
    counts, probs, speculator = triples(qwen3, 1000)
    assert chi_square(counts, probs) < 4
    assert 0.05 < speculator.stats.acceptance < 0.95


def test_a_head_that_misstates_its_distribution_is_caught(qwen3, monkeypatch):
    bad = planted(chains, "chain.probs.append(q)", "chain.probs.append((q > 0) / (q > 0).sum())")
    monkeypatch.setattr(chains.ChainProposer, "_draw", bad.ChainProposer._draw)
    counts, probs, _ = triples(qwen3, 600)
    assert chi_square(counts, probs) > 7


# --- with everything else ---


def test_few_bits_prefixes_and_a_head_in_one_server(tmp_path):
    """int8 weights and int8 keys and values, the head trained before they were rounded; through a socket, twice."""
    tiny.save("qwen3", tmp_path, head_dim=32)
    pair = checkpoint.load(tmp_path, "float32")
    text = "the cat sat on the mat and the dog sat on the log and the cat "
    head = trained(*pair, pair[1].encode(text, add_special=True))
    quantize_(pair[0], "int8")
    params = SamplingParams(max_tokens=24, **GREEDY)
    engines = [
        Engine(*pair, SchedulerConfig(num_blocks=48, block_size=8), True, kv_cache_dtype="int8", speculative=way)
        for way in (None, SpeculativeConfig("eagle", 4, draft=head, adaptive=False))
    ]
    engines[0].add_request("a", text, params)
    plain = run(engines[0])["a"].outputs[0].text
    with serve_in_thread(engines[1], model_name=MODEL) as server:
        client = client_of(server)
        for _ in range(2):
            done = client.completions.create(
                model=MODEL, prompt=text, max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
            )
            assert done.choices[0].text == plain
        wait_idle(server)
    assert engines[1].speculation.stats.accepted > 5
    assert engines[1].events.of("admitted")[-1].data["cached"] >= 8


@needs_triton
def test_the_head_reads_what_the_kernels_compute(tmp_path):
    """It was trained on the model of another backend, another object of the same weights. On a GPU all is there."""
    tiny.save("qwen3", tmp_path, num_hidden_layers=2)
    pair = checkpoint.load(tmp_path, "float32", DEVICE, "torch")
    config = SpeculativeConfig("eagle", 3, draft=head_of(*pair), adaptive=False)
    speculator = Speculator(config, Checked(pair, sampled=False))
    settings = SchedulerConfig(num_blocks=64, block_size=4, max_num_batched_tokens=12)
    engine = Engine(*pair, settings, backend="triton", speculative=speculator)
    params = SamplingParams(max_tokens=5, **GREEDY)
    prompts = {"a": PROMPT[:9], "b": PROMPT[:5]}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    done = run(engine)
    for name, prompt in prompts.items():
        assert answers(done[name]) == expected(pair, prompt, params)
    assert engine.model.backend == "triton"
    assert not speculator.proposer.wrong
    assert speculator.proposer.right > 0
    assert all(p.device.type == DEVICE for p in speculator.proposer.head.parameters())


def test_a_target_in_bfloat16_has_a_head_in_float32(tmp_path):
    """As models on a GPU are kept: features come in its precision, and guesses go back to it."""
    tiny.save("qwen3", tmp_path)
    model, tokenizer = checkpoint.load(tmp_path, "float32")
    model.place("cpu", torch.bfloat16)
    head = trained(model, tokenizer, PROMPT)
    config = SpeculativeConfig("eagle", 4, draft=head, adaptive=False)
    plain, ours = (make_engine((model, tokenizer), speculative=way) for way in (None, config))
    assert answers(serve(ours, JOBS[:1])["0"]) == answers(serve(plain, JOBS[:1])["0"])
    assert ours.speculation.stats.accepted > 5


def test_llm_takes_a_head_as_any_other_method(qwen3):
    """Adaptive, sampled, with log-probabilities; under the names that a user writes."""
    llm = LLM(*qwen3, speculative=SpeculativeConfig("eagle", 3, draft=head_of(*qwen3)), num_blocks=64, block_size=4)
    done = llm.generate([PROMPT, PROMPT[:9]], SamplingParams(max_tokens=20, logprobs=2, **GREEDY))
    for output, ids in zip(done, (PROMPT, PROMPT[:9]), strict=True):
        (plain,) = alone(*qwen3, tuple(ids), SamplingParams(max_tokens=20, logprobs=2, **GREEDY))
        assert output.outputs[0].token_ids == plain.token_ids
        for ours, theirs in zip(output.outputs[0].tokens, plain.tokens, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


def test_the_same_weights_in_another_object_are_the_same_target(qwen3):
    model, tokenizer = qwen3
    config = SpeculativeConfig("eagle", draft=head_of(*qwen3))
    assert make_speculator(config, copy.copy(model), tokenizer, engine=True)
    with pytest.raises(EngineError, match="hidden states of another model"):
        make_speculator(config, first_layers(model, 2), tokenizer, engine=True)


# --- faults ---


class Failing(Proposer):
    """Fails where it is shown what the target computed, once."""

    needs_hidden = True

    def __init__(self, error: BaseException) -> None:
        self.errors = [error]

    def observe(self, key, start, tokens, hidden):
        if self.errors:
            raise self.errors.pop()

    def propose(self, contexts):
        return [Proposal([7] * context.count) for context in contexts]


def test_a_proposer_that_fails_to_observe_is_given_up(qwen3):
    engine = make_engine(qwen3, False, Speculator(SpeculativeConfig(), Failing(MemoryError("no room"))))
    with pytest.warns(UserWarning, match="drafting failed .*no room.*; going on without speculation"):
        done = serve(engine, JOBS)
    assert all(answers(done[str(i)]) == expected(qwen3, *job) for i, job in enumerate(JOBS))
    assert engine.speculation.failed
    assert not engine.speculation._seen  # no step's hidden states are kept for nobody


def test_an_interrupt_while_it_observes_loses_nothing(qwen3):
    engine = checked(qwen3)
    observe = proposer_of(engine).observe
    left = [3]

    def interrupted(*arguments):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        observe(*arguments)

    proposer_of(engine).observe = interrupted
    engine.add_request("a", *JOBS[0])
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    assert answers(run(engine)["a"]) == expected(qwen3, *JOBS[0])
    assert not proposer_of(engine).wrong
    assert proposer_of(engine).bases[-1] > len(PROMPT)  # what came before was forgotten


def test_who_reads_no_hidden_state_is_shown_none(qwen3):
    assert make_engine(qwen3, speculative=SpeculativeConfig("ngram")).runner.watch is None


# --- training ---


@pytest.mark.parametrize(("dtype", "scheme", "near"), [("bfloat16", None, 0.02), ("float32", "int8", 0.05)])
def test_it_learns_through_a_matrix_that_has_no_gradient(tmp_path, dtype, scheme, near):
    """Packed and rounded heads of a target once gave none, or a wrong one, and said nothing."""
    tiny.save("qwen3", tmp_path)
    plain, other = (checkpoint.load_model(tmp_path, kind) for kind in ("float32", dtype))
    if scheme is not None:
        quantize_(other, scheme)
    hidden, found = torch.randn(8, 48, generator=torch.Generator().manual_seed(0)), []
    for model in (plain, other):
        x = hidden.clone().requires_grad_()
        logits = eagle._differentiable(model)(x)
        assert torch.allclose(logits, model.logits(hidden), atol=0.05 * float(logits.detach().abs().max()))
        logits.log_softmax(-1)[:, 3].sum().backward()
        found.append(x.grad)
    assert (found[1] - found[0]).norm() < near * found[0].norm()
