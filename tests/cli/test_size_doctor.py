"""Promise: size is the memory budget of the library, and doctor tells what is missing and how to mend it."""

from __future__ import annotations

import json

import pytest

import minillm.analysis
from minillm import fetch
from minillm.analysis import budget, model_config
from minillm.cli import common, doctor


def test_size_json_is_the_memory_budget(run):
    shown = run("size", "Llama-3-8B", "--tokens", 8192, "--sequences", 4, "--gpu", "a100-40", "--weights", "int8",
                "--kv", "fp8", "--tp", 2, "--json")  # fmt: skip
    expected = budget(model_config("Llama-3-8B"), 8192, 4, "A100-40", weight_dtype="int8", kv_dtype="fp8",
                      tensor_parallel=2)  # fmt: skip
    assert json.loads(shown) == {"model": "Llama-3-8B", **expected.to_dict()}


def test_size_takes_a_folder_a_config_a_hub_name_and_a_gguf_file(run, folder, smollm2_path):
    by_folder = json.loads(run("size", folder, "--json"))
    by_file = json.loads(run("size", folder / "config.json", "--json"))
    assert by_folder["bytes_per_gpu"] == by_file["bytes_per_gpu"]
    names = [json.loads(run("size", name, "--json")) for name in ("Qwen/Qwen3-8B", "qwen3-8b")]
    assert names[0] == names[1]
    gguf, table = (json.loads(run("size", name, "--json")) for name in (smollm2_path, "SmolLM2-135M"))
    assert gguf["bytes_per_gpu"] == table["bytes_per_gpu"]


def test_size_says_whether_it_fits_and_what_would(run):
    assert "Fits, at most" in run("size", "Llama-3-8B", "--gpu", "h100")
    assert "4 GPUs hold it: --tp 4" in run("size", "Llama-3-70B", "--gpu", "h100")
    assert "no number of these GPUs helps" in run("size", "Llama-3-70B", "--gpu", "t4", "--sequences", 10**6)


def test_size_lists_its_tables(run):
    tables = json.loads(run("size", "--list", "--json"))
    assert tables == {"models": list(minillm.analysis.MODELS), "gpus": list(minillm.analysis.HARDWARE)}
    shown = run("size", "--list")
    assert all(name in shown for name in tables["models"] + tables["gpus"])


def findings(run, code=0):
    values = json.loads(run("doctor", "--json", code=code))
    assert values["healthy"] == (code == 0)
    return {finding["name"]: finding for finding in values["findings"]}


def test_doctor_of_this_machine(run, smollm2_path):
    found = findings(run)
    assert {"python", "torch", "cpu", "layouts", "gpu", "triton", "memory", "model", "cache"} <= set(found)
    assert found["model"]["status"] == "ok"
    assert str(smollm2_path) in found["model"]["detail"]
    assert all(f["remedy"] for f in found.values() if f["status"] == "missing")
    shown = run("doctor")
    assert all(f["name"] in shown and f["remedy"] in shown for f in found.values())


def test_doctor_fails_for_what_is_essential_alone(monkeypatch, run, tmp_path):
    monkeypatch.setattr(doctor, "REQUIRED", ("torch", "no_such_package"))
    found = findings(run, code=1)
    assert found["no_such_package"]["status"] == "missing"
    assert "pip install" in found["no_such_package"]["remedy"]
    assert "Something essential is missing" in run("doctor", code=1)
    monkeypatch.setattr(doctor, "REQUIRED", ("torch",))
    monkeypatch.setattr(doctor, "OPTIONAL", {"no_such_package": "nothing"})
    assert findings(run)["no_such_package"]["status"] == "missing"


def test_doctor_sees_a_missing_and_a_damaged_model(monkeypatch, run, tmp_path):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    found = findings(run)
    assert "not there" in found["model"]["detail"]

    (tmp_path / "models").mkdir()
    (tmp_path / "models" / fetch.FILE).write_bytes(b"GGUF")
    found = findings(run)
    assert "damaged" in found["model"]["detail"]
    assert found["model"]["remedy"]
    (tmp_path / "models" / fetch.FILE).unlink()
    (tmp_path / "models" / fetch.FILE).mkdir()
    model = findings(run)["model"]
    assert "is a folder" in model["detail"]
    assert model["remedy"] == "move the folder away"
    monkeypatch.setattr(doctor, "_ROOM", 1 << 62)  # no disk has as much
    assert findings(run, code=1)["cache"]["status"] == "missing"


def test_doctor_of_a_cache_in_an_unknown_home(monkeypatch, run):
    monkeypatch.setenv("MINILLM_CACHE", "~nobodyxyz/x")
    found = findings(run, code=1)
    assert "MINILLM_CACHE ~nobodyxyz/x: the home folder of ~nobodyxyz is not known" in found["model"]["detail"]
    assert found["model"]["remedy"] == "write the path out"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (98362432, "98.4 MB"), (-2_500, "-2.5 kB"), (1.5e12, "1.50 TB"),
     (10**400, "1.00e+388 TB"), (-(10**5000), "-1.00e+4988 TB"), (float("inf"), "Infinity TB")],
    ids=range(8),
)  # fmt: skip
def test_sizes_of_any_magnitude_have_a_text(count, text):
    assert common.size_text(count) == text


@pytest.mark.parametrize("source", ["./nowhere/config", "/nowhere/model", "~/nowhere/model", "a/b/c"])
def test_a_path_that_is_missing_is_no_name(refused, source):
    assert f"{source}: no such file or folder; check the path" in refused("size", source)
