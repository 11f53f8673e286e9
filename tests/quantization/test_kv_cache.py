"""Promise: within a quantized cache nothing depends on how a sequence came there. Chunks, batch-mates, hits, forks,
swaps: a query sees the same stored numbers, to the bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import checkpoint
from minillm.attention import naive_attention
from minillm.config import ModelConfig
from minillm.engine import Engine
from minillm.errors import EngineError, RequestError
from minillm.generate import generate, next_logits
from minillm.kv_cache import ContiguousCache
from minillm.llm import LLM
from minillm.paging import SequenceStep, StepMetadata, move_blocks, move_slots
from minillm.quantization import kv, kv_tails
from minillm.quantization.kv_paged import QuantizedPagedCache
from minillm.sampling import SamplingParams
from minillm.scheduler_config import SchedulerConfig
from tests import tiny
from tests.serving import make_tiny, run

H, HKV, D, SIZE = 4, 2, 32, 4


def config(window=None, sinks=0) -> ModelConfig:
    kind = "sliding_attention" if window else "full_attention"
    return ModelConfig(
        "llama", 64, 32, 32, 2, H, HKV, D, 512, sliding_window=window, attention_sinks=sinks,
        layer_types=("full_attention", kind),
    )  # fmt: skip


# --- what each query sees, worked out anew ---


def stored(name, side, x):
    """x (S, HKV, D) as a cache gives it back, whole blocks for int4; the rest stays."""
    if name != "int4":
        return kv.dequantize_side(name, side, kv.quantize_side(name, side, x))
    whole = len(x) // SIZE * SIZE
    blocks = x[:whole].view(-1, SIZE, HKV, D)
    rounded = kv.dequantize_side(name, side, kv.quantize_side(name, side, blocks)) if whole else blocks
    return torch.cat([rounded.flatten(0, 1), x[whole:]])


def expected(name, q, k, v, window, sinks):
    """The rule, query by query: int4 sees its own block as it is."""
    rounded, rows = (stored(name, 0, k), stored(name, 1, v)), []
    for p in range(len(q)):
        own = p // SIZE * SIZE if name == "int4" else p + 1
        keys, values = (torch.cat([r[:own], x[own : p + 1]]) for r, x in zip(rounded, (k, v), strict=True))
        rows.append(naive_attention(q[p : p + 1], keys, values, window, sinks=sinks))
    return torch.cat(rows)


def poisoned(name, blocks, window=None, sinks=0, slots=4) -> QuantizedPagedCache:
    """As an earlier request may have left it: NaN wherever a format has one."""
    cache = QuantizedPagedCache(config(window, sinks), blocks, SIZE, name, state_slots=slots)
    for t in cache.tensors:
        t[:, :, 1:] = math.nan if t.is_floating_point() else 127
    for t in cache.slotted:
        t[:] = math.nan
    return cache


def attend_in_pieces(cache, sequences, tables, pieces, exact, layers=(0, 1)):
    """sequences: (q, k, v) each; pieces: their counts, a step takes one of each that has any left."""
    outs = [[[] for _ in layers] for _ in sequences]
    start, queues = [0] * len(sequences), [list(p) for p in pieces]
    while any(queues):
        parts, rows = [], 0
        for i, queue in enumerate(queues):
            if queue:
                count = queue.pop(0)
                parts.append((i, SequenceStep(rows, count, start[i], tables[i], i + 1)))
                rows += count
        step = cache.step(StepMetadata([s for _, s in parts], SIZE), exact)
        packed = [torch.cat([sequences[i][j][s.start : s.context] for i, s in parts]) for j in range(3)]
        for n, layer in enumerate(layers):
            out = step.attend(layer, *packed)
            for i, s in parts:
                outs[i][n].append(out[s.first : s.first + s.count])
        for i, s in parts:
            start[i] += s.count
    return [[torch.cat(layer) for layer in sequence] for sequence in outs]


def random_sequences(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randn(n, h, D, generator=generator) for h in (H, HKV, HKV)) for n in lengths]


cuts = st.lists(st.sampled_from([1, 1, 1, 2, 3, 4, 5, 9, 14]), min_size=1, max_size=8)


@pytest.mark.parametrize("name", kv.KV_FORMATS)
@settings(max_examples=12, deadline=None)
@given(
    pieces=st.lists(cuts, min_size=1, max_size=3),
    window=st.sampled_from([None, None, 1, 6]),
    sinks=st.sampled_from([0, 3]),
    exact=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_chunks_beside_anyone_see_what_the_rule_says(name, pieces, window, sinks, exact, seed):
    sequences = random_sequences([sum(p) for p in pieces], seed)
    used = [-(-len(s[0]) // SIZE) for s in sequences]
    order = torch.randperm(sum(used), generator=torch.Generator().manual_seed(seed)) + 1
    tables = [t.tolist() for t in order.split(used)]
    cache = poisoned(name, 1 + sum(used), window, sinks)
    outs = attend_in_pieces(cache, sequences, tables, pieces, exact)
    for (q, k, v), (full, sliding), table in zip(sequences, outs, tables, strict=True):
        torch.testing.assert_close(full, expected(name, q, k, v, None, 0), rtol=1e-4, atol=1e-5)
        of_window = expected(name, q, k, v, window, sinks if window else 0)
        torch.testing.assert_close(sliding, of_window, rtol=1e-4, atol=1e-5)
        whole = len(q) // SIZE if name == "int4" else -(-len(q) // SIZE)
        for side, x in ((0, k), (1, v)):
            held = cache.take(0, torch.tensor(table[:whole], dtype=torch.int32))[side].flatten(0, 1)
            count = min(len(q), whole * SIZE)
            assert torch.equal(held[:count], stored(name, side, x)[:count])


# --- blocks and tails move as one ---


@pytest.mark.parametrize("name", kv.KV_FORMATS)
def test_a_block_moves_with_its_scales(name):
    device, host = (poisoned(name, 6) for _ in range(2))
    ((q, k, v),) = random_sequences([3 * SIZE], 0)
    attend_in_pieces(device, [(q, k, v)], [[1, 2, 3]], [[3 * SIZE]], False)
    device.copy_blocks([(1, 4), (2, 1)])
    move_blocks(device, host, [(4, 2), (1, 5)])
    first, second = (stored(name, 0, k)[i * SIZE : (i + 1) * SIZE] for i in (0, 1))
    assert torch.equal(device.take(0, torch.tensor([4, 1]))[0], torch.stack([first, second]))
    assert torch.equal(host.take(0, torch.tensor([2, 5]))[0], torch.stack([first, second]))


def test_a_tail_moves_whole():
    device, host = (poisoned("int4", 4) for _ in range(2))
    ((q, k, v),) = random_sequences([7], 0)
    attend_in_pieces(device, [(q, k, v)], [[1, 2]], [[7]], False)
    move_slots(device, host, [(1, 3)])
    move_slots(device, device, [(1, 2)])
    for tails in (host.slotted[-1][:, 3], device.slotted[-1][:, 2]):
        assert torch.equal(tails[0, 0, 0], k[:SIZE])
        assert torch.equal(tails[0, 1, 1, :3], v[SIZE:])


# --- planted mistakes: each is caught by the tests above ---

GIVEN = test_any_chunks_beside_anyone_see_what_the_rule_says.hypothesis.inner_test


def caught(name, pieces=((9, 1, 1, 3), (1, 5, 2))) -> bool:
    try:
        for exact in (False, True):
            GIVEN(name, pieces, 6, 0, exact, 0)
        test_a_block_moves_with_its_scales(name)
    except AssertionError:
        return True
    return False


def plant(monkeypatch, mistake):
    if mistake == "scale of another token":
        right = kv.quantize_int8  # other tokens in every step
        monkeypatch.setattr(kv, "quantize_int8", lambda x: (right(x)[0], right(x)[1].roll(1, 0)))
    elif mistake == "block copied without scales":
        right = QuantizedPagedCache.copy_blocks

        def codes_alone(self, pairs):
            every, self.tensors = self.tensors, self.tensors[:1]
            right(self, pairs)
            self.tensors = every

        monkeypatch.setattr(QuantizedPagedCache, "copy_blocks", codes_alone)
    elif mistake == "residual off by one":
        right = kv_tails.TailStep._keep_newest

        def before(self, layer, group, k, v):
            right(self, layer, group._replace(places=(group.places - 1) % SIZE), k, v)

        monkeypatch.setattr(kv_tails.TailStep, "_keep_newest", before)
    elif mistake == "own block rounded at once":
        right = kv_tails.TailStep._attend_block

        def rounded(self, layer, s, q, keys, values, positions, scale, out):
            if positions.stop % SIZE == 0:
                here = slice(positions.stop - SIZE, positions.stop)
                block = torch.tensor([s.blocks[here.start // SIZE]])
                keys[here], values[here] = (side[0] for side in self.cache.take(layer, block))
            right(self, layer, s, q, keys, values, positions, scale, out)

        monkeypatch.setattr(kv_tails.TailStep, "_attend_block", rounded)
    elif mistake == "stale tail":
        monkeypatch.setattr("minillm.quantization.kv_paged.begin_tails", lambda tails, metadata: None)


MISTAKES = [
    ("int8", "scale of another token"),
    ("int8", "block copied without scales"),
    ("int4", "block copied without scales"),
    ("int4", "residual off by one"),
    ("int4", "own block rounded at once"),
    ("int4", "stale tail"),
]


@pytest.mark.parametrize(("name", "mistake"), MISTAKES)
def test_a_planted_mistake_is_caught(monkeypatch, name, mistake):
    assert not caught(name)
    plant(monkeypatch, mistake)
    assert caught(name)


# --- in the engine ---


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads-of-32")
    tiny.save("qwen3", folder, head_dim=32)
    return checkpoint.load(folder, "float32")


def make_engine(pair, name, exact=True, **options) -> Engine:
    options = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32, **options}
    return Engine(*pair, SchedulerConfig(**options), exact, kv_cache_dtype=name)


GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = list(range(60, 90))


@torch.inference_mode()
def bits(pair, name, others=0, before=False, prompt=PROMPT, params=GREEDY, **options):
    """Logits of request x at every step, of all its sequences."""
    engine = make_engine(pair, name, **options)
    seen, run_model = [], engine.runner.run

    def recording(output):
        logits = run_model(output)
        names = [p.request.request_id for p in output.scheduled if p.samples]
        seen.extend(logits[i].clone() for i, who in enumerate(names) if who == "x")
        return logits

    engine.runner.run = recording
    if before:
        engine.add_request("before", prompt, params)
        run(engine)
    for i in range(others):
        engine.add_request(str(i), list(range(100 + i, 105 + 3 * i)), params)
    engine.add_request("x", prompt, params)
    done = run(engine)["x"]
    return torch.stack(seen), done, engine


@pytest.mark.parametrize("name", kv.KV_FORMATS)
def test_batched_is_alone_chunked_is_whole_and_a_hit_is_a_miss(pair, name):
    reference, _, _ = bits(pair, name)
    for options in (
        {"others": 3}, {"max_num_batched_tokens": 7}, {"others": 2, "max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 1}, {"before": True}, {"before": True, "others": 1, "max_num_batched_tokens": 9},
    ):  # fmt: skip
        found, done, _ = bits(pair, name, **options)
        assert torch.equal(found, reference), options
        assert (done.num_cached_tokens > 0) == ("before" in options)


@pytest.mark.parametrize("name", kv.KV_FORMATS)
def test_preempted_by_swap_is_never_preempted(pair, name):
    params = SamplingParams(temperature=0, max_tokens=22, ignore_eos=True)
    reference, _, _ = bits(pair, name, params=params)
    options = {"num_blocks": 22, "num_host_blocks": 40, "preemption": "swap", "watermark": 0.0, "prefix_cache": "off"}
    found, _, engine = bits(pair, name, others=3, params=params, **options)
    assert any(e.data["how"] == "swap" for e in engine.events.of("preempted"))
    assert torch.equal(found, reference)


@pytest.mark.parametrize("name", kv.KV_FORMATS)
def test_a_prefix_that_comes_back_from_host_memory_is_a_miss(pair, name):
    reference, _, _ = bits(pair, name)
    engine = make_engine(pair, name, num_blocks=12, num_host_blocks=40, host_reuse="always")
    for i, prompt in enumerate((PROMPT, list(range(100, 130)), PROMPT)):
        engine.add_request(str(i), prompt, GREEDY)
        last = run(engine)[str(i)]
    assert last.num_cached_tokens == 28
    assert last.outputs[0].token_ids == reference.argmax(-1).tolist()


@pytest.mark.parametrize("name", kv.KV_FORMATS)
def test_forks_answer_as_each_alone(pair, name):
    """n = 3 share their prompt's blocks and write behind it: 30 tokens end within a block."""
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=9, ignore_eos=True, n=3)
    engine, last = make_engine(pair, name, max_num_batched_tokens=5), {}
    run_model = engine.runner.run

    def recording(output):
        logits = run_model(output)
        sampling = [p.request.sequence for p in output.scheduled if p.samples]
        last.update((sequence, logits[i].clone()) for i, sequence in enumerate(sampling))
        return logits

    engine.runner.run = recording
    engine.add_request("x", PROMPT, params)
    done = run(engine)["x"]
    assert len({tuple(o.token_ids) for o in done.outputs}) == 3
    for sequence, output in enumerate(done.outputs):
        once = SamplingParams(temperature=0, max_tokens=1)
        alone, _, _ = bits(pair, name, prompt=PROMPT + output.token_ids[:-1], params=once)
        assert torch.equal(last[sequence], alone[0])


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("family", ["deepseek", "qwen3-next", "mistral-window"])
def test_latents_states_and_windows(tmp_path_factory, family, name):
    pair = make_tiny(family, tmp_path_factory)
    reference, done, engine = bits(pair, name)
    assert torch.equal(bits(pair, name, others=2, max_num_batched_tokens=5)[0], reference)
    if engine.runner.cache.states is not None:
        assert engine.runner.cache.states.delta.dtype is torch.float32
    cache = ContiguousCache(pair[0].config, 40, name)
    assert generate(*pair, PROMPT, GREEDY, cache).token_ids == done.outputs[0].token_ids


def test_int4_and_states_share_slots(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid-heads-of-32")
    tiny.save("qwen3-next", folder, head_dim=32)
    pair = checkpoint.load(folder, "float32")
    reference, _, _ = bits(pair, "int4")
    params = SamplingParams(temperature=0, max_tokens=22, ignore_eos=True)
    assert torch.equal(bits(pair, "int4", others=2, max_num_batched_tokens=5)[0], reference)
    options = {"num_blocks": 22, "num_host_blocks": 40, "preemption": "swap", "watermark": 0.0}
    assert torch.equal(bits(pair, "int4", others=3, params=params, **options)[0], bits(pair, "int4", params=params)[0])


# --- one sequence ---


@pytest.mark.parametrize("name", kv.KV_FORMATS)
def test_the_contiguous_cache_is_the_paged_one(pair, name):
    """Blocks of 32 in both, so that int4 rounds the same groups."""
    model, tokenizer = pair
    prompt = [2 + i * 7 % 250 for i in range(70)]
    paged = LLM(model, tokenizer, kv_cache_dtype=name, block_size=32, num_blocks=8)
    one = generate(model, tokenizer, prompt, GREEDY, ContiguousCache(model.config, 90, name), chunk=13)
    assert one.token_ids == paged.generate([prompt], GREEDY)[0].outputs[0].token_ids
    cache = ContiguousCache(model.config, 90, name)
    whole = next_logits(model, prompt, cache)
    cache.truncate(40)
    torch.testing.assert_close(next_logits(model, prompt, cache), whole, rtol=1e-3, atol=1e-3)
    assert cache.used_bytes < cache.allocated_bytes == cache.paged.allocated_bytes
    with pytest.raises(RequestError, match="needs 91 tokens"):
        next_logits(model, [*prompt, *range(2, 23)], cache)


def test_int4_cannot_go_back_into_what_is_rounded(pair):
    model, _ = pair
    cache = ContiguousCache(model.config, 130, "int4")
    next_logits(model, list(range(2, 122)), cache)
    with pytest.raises(RequestError, match="take 32, where a block begins"):
        cache.truncate(40)
    cache.truncate(32)
    cache.truncate(0)


# --- refusals and memory ---


def test_what_is_not_known_is_told(pair, tmp_path_factory):
    with pytest.raises(EngineError, match=r"kv_cache_dtype 'int2' is not known; choose one of auto, .*int8, fp8, int4"):
        LLM(*pair, kv_cache_dtype="int2")
    with pytest.raises(EngineError, match="one latent; use int8 or fp8"):
        LLM(*make_tiny("deepseek", tmp_path_factory), kv_cache_dtype="int4", num_blocks=8)
    with pytest.raises(EngineError, match="heads of 16"):
        LLM(*make_tiny("qwen3", tmp_path_factory), kv_cache_dtype="int4")
    with pytest.raises(EngineError, match="block_size is 33"):
        LLM(*pair, kv_cache_dtype="int4", block_size=33)


def test_the_same_memory_holds_more_tokens(pair):
    model, tokenizer = pair
    blocks = {}
    for name in ("float32", *kv.KV_FORMATS):
        llm = LLM(model, tokenizer, kv_cache_dtype=name, kv_cache_bytes=1 << 19, block_size=32, num_state_slots=4)
        cache = llm.engine.runner.cache
        assert cache.allocated_bytes <= (1 << 19) + cache.block_bytes
        blocks[name] = cache.num_blocks
    assert blocks["int8"] > 3.3 * blocks["float32"]
    assert blocks["fp8"] > blocks["int8"]


# --- on the kernels ---


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_step_on_the_kernels_is_torchs(name, window, monkeypatch):
    """Both are written and read by the kernels; chunks and decodes."""
    pytest.importorskip("triton")
    from kernels.launch import HAVE_TRITON
    from minillm.paging import PagedStep
    from minillm.triton_step import TritonStep

    assert HAVE_TRITON
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for parts in ([(5, 1), (0, 1), (9, 1)], [(3, 6), (5, 1)]):
        sequences, row = [], 0
        for i, (start, count) in enumerate(parts):
            sequences.append(SequenceStep(row, count, start, list(range(1 + 4 * i, 5 + 4 * i))))
            row += count
        q, k, v = (torch.randn(row, h, D, device=device) for h in (H, HKV, HKV))
        outs, caches = [], []
        for kind in (PagedStep, TritonStep):
            cache = QuantizedPagedCache(config(window), 13, SIZE, name, torch.float32, device, kind)
            assert cache.for_kernels(0)
            generator = torch.Generator().manual_seed(0)
            old = [torch.randn(12 * SIZE, HKV, D, generator=generator).to(device) for _ in range(2)]
            for layer in (0, 1):
                cache.write(layer, torch.arange(SIZE, 13 * SIZE, device=device), *old)
            step = cache.step(StepMetadata(sequences, SIZE, device=device))
            with monkeypatch.context() as patch:
                if kind is TritonStep:
                    patch.setattr(PagedStep, "attend", None)  # whoever falls back to torch stops here
                outs.append(torch.stack([step.attend(layer, q, k, v) for layer in (0, 1)]))
            caches.append(cache)
        torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)
        assert all(torch.equal(a, b) for a, b in zip(*(c.tensors for c in caches), strict=True))
