"""--kv-cache-dtype on the command line, the needle, and what a quantized cache costs on real text."""

from __future__ import annotations

import json

import pytest

from minillm import cli
from minillm.analysis import needle
from minillm.analysis.quality import evaluation_ids, kl_divergence, window_logits
from minillm.errors import RequestError
from minillm.kv_cache import ContiguousCache
from tests import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("heads-of-32")
    tiny.save("llama", path, head_dim=32)
    return path


def values(capsys, *argv) -> dict:
    assert cli.main([str(a) for a in argv]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("name", "bits"), [("int8", 8 + 32 / 32), ("fp8", 8), ("int4", 5)])
def test_quality_prints_the_cache_beside_the_weights(folder, capsys, name, bits):
    options = ["--model", folder, "--tokens", 80, "--device", "cpu", "--kv-cache-dtype", name, "--json"]
    alone = values(capsys, "quality", *options, "--needle", "--needle-tokens", 180)
    assert alone["kv_cache_dtype"] == name
    assert alone["scheme"] is None
    assert alone["kl"] > 0
    assert alone["weight_bytes"] == alone["float32_bytes"]
    assert alone["kv_bytes_per_token"] == 3 * 2 * 2 * 32 * bits / 8
    assert alone["needle"]["accuracy"] == 0
    assert len(alone["needle"]["each"]) == 3
    assert alone["needle"]["logprob"] != alone["needle"]["reference"]["logprob"]
    both = values(capsys, "quality", *options, "--quantize", "int8")
    assert both["weight_bytes"] < both["float32_bytes"]
    assert both["needle"] is None


def test_generate_takes_it(folder, capsys):
    options = ["--model", folder, "--dtype", "float32", "--max-tokens", 6, "--json"]
    for name in ("auto", "bfloat16", "int8", "fp8", "int4"):
        done = values(capsys, "generate", "the cat sat", *options, "--kv-cache-dtype", name)
        assert done["kv_cache_dtype"] == name
        assert done["output_tokens"] <= 6


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["generate", "x", "--kv-cache-dtype", "int2"], "kv_cache_dtype 'int2' is not known; choose one of auto"),
        (["serve", "--port", "0", "--kv-cache-dtype", "int2"], "kv_cache_dtype 'int2' is not known"),
        (["quality", "--kv-cache-dtype", "Int4"], "kv_cache_dtype 'Int4' is not known"),
        (["quality"], "nothing is quantized"),
        (["quality", "--kv-cache-dtype", "int8", "--needle", "--needle-tokens", "600"], "context of 512"),
        (["quality", "--kv-cache-dtype", "int8", "--needle", "--needle-tokens", "60"], "ask for more"),
    ],
)
def test_what_cannot_be_done_is_one_line(folder, capsys, argv, reason):
    assert cli.main([*argv, "--model", str(folder), *(["--tokens", "20"] if argv[0] == "quality" else [])]) == 2
    out, err = capsys.readouterr()
    assert reason in err
    assert err.count("\n") == 1
    assert not out


# --- real text ---


def test_the_cost_on_real_text(smollm2):
    model, tokenizer = smollm2
    ids = evaluation_ids(tokenizer, 100)
    exact, kl, same = window_logits(model, ids), {}, {}
    for name in ("int8", "fp8", "int4"):
        logits = window_logits(model, ids, ContiguousCache(model.config, 100, name))
        kl[name] = kl_divergence(exact, logits)
        same[name] = (exact.argmax(-1) == logits.argmax(-1)).float().mean()
    assert 0 < kl["int8"] < 2e-3
    assert kl["int8"] < kl["int4"] < 1e-2
    assert kl["int8"] < kl["fp8"] < 2e-2
    assert min(same.values()) > 0.93


def test_a_needle_is_found_through_int4_and_only_where_it_is(smollm2):
    """The answer comes from the text, not from the question."""
    model, tokenizer = smollm2
    (one,) = needle.needles(model, tokenizer, [200], [0.3], lambda n: ContiguousCache(model.config, n, "int4"))
    assert one.found
    assert one.logprob > -0.5
    prompt, answer = needle.question(tokenizer, 200, 0.3, "48213")
    other, _ = needle.question(tokenizer, 200, 0.3, "97504")
    assert len(prompt) == 200
    assert tokenizer.decode(prompt).count("48213") == 2
    logprob, found = needle.ask(model, other, answer, ContiguousCache(model.config, 210))
    assert not found
    assert logprob < -1.5


def test_depths_are_places(smollm2):
    _, tokenizer = smollm2
    places = []
    for depth in (0, 0.5, 1):
        text = tokenizer.decode(needle.question(tokenizer, 400, depth, "48213")[0])
        places.append(text.index("48213") / len(text))
    assert places[0] < 0.1
    assert 0.4 < places[1] < 0.6
    assert places[2] > 0.8
    with pytest.raises(RequestError, match=r"depth is 1\.5"):
        needle.question(tokenizer, 400, 1.5, "48213")
