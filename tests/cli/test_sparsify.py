"""Promise: --sparsify does what the library does, and says what it found."""

from __future__ import annotations

import json

import pytest

from minillm import cli


@pytest.fixture
def only_here(folder):
    return ["--model", str(folder), "--device", "cpu"]


def test_quality_as_json(capsys, only_here):
    assert cli.main(["quality", "--sparsify", "magnitude-2:4", "--tokens", "100", "--json", *only_here]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["scheme"] == "magnitude-2:4"
    assert values["sparsity"] == 0.5
    assert values["kl"] > 0
    assert 0 <= values["top1_agreement"] <= 1
    assert values["weight_bytes"] == values["float32_bytes"]
    assert values["packed_bytes"] == values["float32_bytes"] * 9 // 32
    assert values["layout"] == "float32, magnitude-2:4"


def test_a_share_has_no_packed_form(capsys, only_here):
    assert cli.main(["quality", "--sparsify", "wanda-0.6", "--tokens", "100", "--json", *only_here]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["packed_bytes"] is None
    assert values["sparsity"] == pytest.approx(0.6, abs=0.01)


def test_with_quantization(capsys, only_here):
    both = ["--sparsify", "magnitude-2:4", "--quantize", "int8"]
    assert cli.main(["quality", *both, "--tokens", "100", "--json", *only_here]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["scheme"] == "magnitude-2:4, int8"
    assert values["weight_bytes"] < values["float32_bytes"] / 3
    assert cli.main(["quality", *both, "--tokens", "100", *only_here]) == 0
    assert "50.0%" in capsys.readouterr().out


def test_generate(capsys, only_here):
    assert cli.main(["generate", "the cat", "--sparsify", "magnitude-0.5", "--max-tokens", "4", *only_here]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("magnitude-0.5: 50.0% of")


def test_nothing_to_compare(refused, only_here):
    assert "--sparsify METHOD-PATTERN" in refused("quality", *only_here)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--sparsify", "wanda"], "write one like"),
        (["--sparsify", "wanda-2:4", "--dtype", "bfloat16"], "leave --dtype bfloat16 out"),
        (["--sparsify", "wanda-2:4", "--quantize", "gptq-int4-g32"], "would fill the zeros"),
    ],
)
def test_refused(refused, only_here, options, told):
    assert told in refused("generate", "x", *options, *only_here)
