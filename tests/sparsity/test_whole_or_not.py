"""sparsify_ and pack_ change a model whole or not at all: whatever ends them on the way, it is the one it was."""

from __future__ import annotations

import pytest

from minillm import checkpoint, cli
from minillm.errors import SparsityError
from minillm.sparsity import SparseLinear, apply, pack_, sparsify_
from tests import tiny
from tests.cli import models
from tests.quantization.kept import CALIBRATION, Kept, stop_at

WIDE = {"hidden_size": 96, "intermediate_size": 96}
METHODS = ["magnitude", "wanda", "sparsegpt"]
LAYERS = range(1, 13)  # four in each of three blocks


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    return tiny.copies(tmp_path_factory, **WIDE)


@pytest.mark.parametrize("family", ["llama-mha-bias", "llama-mqa-tied"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("call", LAYERS)
@pytest.mark.parametrize("method", METHODS)
def test_a_layer_that_is_never_made(load, monkeypatch, family, method, call, error):
    model = load(family)
    kept = Kept(model)
    with monkeypatch.context() as patch:
        stop_at(patch, apply, method, call, error)
        with pytest.raises(error):
            sparsify_(model, method, pattern="2:4", calibration=CALIBRATION)
    kept.check()
    report = sparsify_(model, method, pattern="2:4", calibration=CALIBRATION)  # and it can be done afterwards
    assert (report.layers, report.fraction) == (12, 0.5)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("call", LAYERS)
@pytest.mark.parametrize("method", METHODS)
def test_a_layer_after_which_it_ends(load, monkeypatch, method, call, error):
    """The last of them: all is done but the model's own notes."""
    model = load("llama")
    kept = Kept(model)
    stop_at(monkeypatch, apply, "_set", call, error, after=True)
    with pytest.raises(error):
        sparsify_(model, method, 0.5, calibration=CALIBRATION)
    kept.check()


@pytest.mark.parametrize("family", ["mixtral", "deepseek-experts", "qwen3-next"])
def test_experts_and_other_blocks(load, monkeypatch, family):
    model = load(family)
    kept = Kept(model)
    stop_at(monkeypatch, apply, "_set", 9, KeyboardInterrupt, after=True)
    with pytest.raises(KeyboardInterrupt):
        sparsify_(model, "wanda-0.5", calibration=CALIBRATION)
    kept.check()


def sparsified(model):
    sparsify_(model, "magnitude-0.5")
    return model


def test_notes_of_a_change_that_is_taken_back_are_too(load):
    """Attributes that the model did not have are gone again: here half of all is zero, and not two in four."""
    model = load("llama")
    kept = Kept(model)
    with pytest.raises(SparsityError), apply.whole_or_not(model):
        pack_(sparsified(model))
    kept.check()
    assert not hasattr(model, "sparsity")


@pytest.mark.parametrize("call", LAYERS)
def test_packing_that_ends_half_way(load, monkeypatch, call):
    """Before any layer is in its place, and when some are."""
    model = load("llama")
    sparsify_(model, "magnitude-2:4")
    kept = Kept(model)
    with monkeypatch.context() as patch:
        stop_at(patch, SparseLinear, "__init__", call, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            pack_(model)
    kept.check()
    with monkeypatch.context() as patch:
        patch.setattr(apply, "setattr", setattr, raising=False)
        stop_at(patch, apply, "setattr", call, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            pack_(model)
    kept.check()
    pack_(model)
    assert sum(isinstance(module, SparseLinear) for module in model.modules()) == 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.save(tmp_path_factory.mktemp("cli"))


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (SparsityError, 2)])
@pytest.mark.parametrize("call", LAYERS)
@pytest.mark.parametrize("method", METHODS)
def test_through_the_command_line(monkeypatch, capsys, folder, method, call, error, code):
    """One line or none, no file touched, and the model in memory as it was read."""
    files = {path: path.read_bytes() for path in folder.iterdir()}
    read = []
    work = checkpoint.load

    def loads(*arguments, **options):
        found = work(*arguments, **options)
        read.append(Kept(found[0]))
        return found

    monkeypatch.setattr(checkpoint, "load", loads)
    stop_at(monkeypatch, apply, "_set", call, error, after=True)
    command = ["generate", "x", "--sparsify", f"{method}-2:4", "--model", str(folder), "--device", "cpu"]
    assert cli.main(command) == code
    assert len(capsys.readouterr().err.splitlines()) <= 1
    assert len(read) == 1
    read[0].check()
    assert {path: path.read_bytes() for path in folder.iterdir()} == files
