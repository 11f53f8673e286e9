"""Everything at once: experts in 4 bits, keys and values in 8, guesses, shared prefixes, behind the server."""

from __future__ import annotations

import pytest

from minillm import checkpoint
from minillm.batching import SchedulerConfig
from minillm.engine import Engine
from minillm.quantization import quantize_
from minillm.quantization.linear import QuantizedLinear
from minillm.sampling_params import SamplingParams
from minillm.serving import serve_in_thread
from minillm.speculative.settings import SpeculativeConfig
from minillm.tokenizer import Tokenizer
from tests import tiny
from tests.serving import run
from tests.serving_http import MODEL, client_of, wait_idle

SHARED = "the cat sat on the mat and the dog sat on the log and the cat sat on the mat and the dog sat on "
PROMPTS = [SHARED + tail for tail in ("the log", "the mat", "the cat", "the dog")]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("composed")
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    tiny.save("mixtral", folder, head_dim=32, **shape)
    model = checkpoint.load_model(folder, "float32")
    quantize_(model, "int4-g32")
    experts = [layer for name, layer in model.named_modules() if "mlp" in name and isinstance(layer, QuantizedLinear)]
    assert len(experts) >= 3 * 6 * 2  # every matrix of every expert is 4-bit
    return model, Tokenizer.from_file(folder)


def make_engine(pair, kv="int8", speculative=True, prefix_cache="hash") -> Engine:
    config = SchedulerConfig(
        num_blocks=96, block_size=8, max_num_seqs=4, max_num_batched_tokens=48, prefix_cache=prefix_cache
    )
    guesses = SpeculativeConfig(method="ngram", num_tokens=4) if speculative else None
    return Engine(*pair, config, batch_invariant=True, kv_cache_dtype=kv, speculative=guesses)


def alone(pair, prompt, **options) -> list[int]:
    engine = make_engine(pair, **options)
    engine.add_request("r", prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    return run(engine)["r"].outputs[0].token_ids


def test_one_server_run(pair):
    """Through real sockets; what comes is what the same weights and the same cache say without guesses or sharing."""
    plain = [alone(pair, prompt, speculative=False, prefix_cache="off") for prompt in PROMPTS]
    engine = make_engine(pair)
    with serve_in_thread(engine, model_name=MODEL) as server:
        client = client_of(server)
        for _ in range(2):  # the second time every prompt is in the prefix cache
            for prompt, wanted in zip(PROMPTS, plain, strict=True):
                done = client.completions.create(
                    model=MODEL, prompt=prompt, max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
                )
                assert done.choices[0].text == pair[1].decode(wanted, skip_special=True)
        wait_idle(server)
    engine.scheduler.check()
    stats = engine.speculation.stats
    assert stats.accepted > 0
    cached = [event.data["cached"] for event in engine.events if event.kind == "admitted"]
    assert sum(n >= 8 for n in cached) >= 7  # every prompt but the first shares a prefix, and comes twice
    assert engine.runner.cache.allocated_bytes < make_engine(pair, kv="float32").runner.cache.allocated_bytes / 2


def test_eight_bits_of_cache_are_really_used(pair):
    """The composed answer must not be that of an unquantized cache by accident of a switch that does nothing."""
    engine, exact = make_engine(pair), make_engine(pair, kv="float32")
    logits = []
    for each in (engine, exact):
        each.add_request("r", PROMPTS[0], SamplingParams(temperature=0, max_tokens=1, logprobs=5))
        logits.append(run(each)["r"].outputs[0].logprobs)
    assert logits[0] != logits[1]
