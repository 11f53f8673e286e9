"""The settings of a server, checked before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import EngineError


class ServingError(EngineError):
    """A server that cannot be started as asked."""


@dataclass(frozen=True)
class ServerSettings:
    """Limits are counts, bytes and seconds; None is no limit.

    api_keys: any of them opens /v1; with none the server is open to whoever reaches it.
    max_prompt_tokens: of one prompt, below what the engine itself can hold.
    max_choices: prompts × n of one request.
    max_connections: held at once, and fewer if the process has not as many file descriptors.
    head_timeout_s: from a connection's first moment, or its last answer, to the end of the next request's head.
    request_timeout_s: from a request's arrival to the last byte of its answer.
    drain_timeout_s: what running requests get to finish in when the server is told to stop.
    """

    model_name: str = "minillm"
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 1 << 20
    max_prompt_tokens: int | None = None
    max_choices: int = 128
    max_connections: int = 4096
    head_timeout_s: float = 10.0
    request_timeout_s: float | None = 600.0
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ServingError(f"port is {self.port}; it must be from 1 to 65535, or 0 for a free one")
        for name in ("max_body_bytes", "max_prompt_tokens", "max_choices", "max_connections"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ServingError(f"{name} is {value}; it must be at least 1")
        seconds = {"request_timeout_s": "above 0", "head_timeout_s": "above 0", "drain_timeout_s": "at least 0"}
        for name, least in seconds.items():
            value = getattr(self, name)
            bad = value is not None and (not math.isfinite(value) or value < 0 or (value == 0 and least == "above 0"))
            if bad:
                raise ServingError(f"{name} is {value}; it must be a number of seconds, {least}")
        if not all(key.strip() == key and key for key in self.api_keys):
            raise ServingError("an API key is empty or has space around it; give a word, or leave it out")
        if not self.model_name:
            raise ServingError("the model's name is empty; give the name that clients ask for")
