"""An OpenAI-compatible server over AsyncEngine, and load generators for any such server.

In reading order: settings, errors, strict_json, unsupported, protocol (what a client may send), responses (what it
gets), translate (request → prompts and SamplingParams), logprobs, guard (client gone, time over, server stopping),
answers and streaming (outputs → bodies and events), metrics, state, gate (key, drain, body), app (routes), lifecycle.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "serve_in_thread": "lifecycle",
    "serve_process": "lifecycle",
    "create_app": "app",
    "ServerSettings": "settings",
    "Metrics": "metrics",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Imported when first asked for: the load generators do not need FastAPI."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
