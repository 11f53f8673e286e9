"""One family of errors for bad input. Each message names the thing that is wrong and the remedy.

The command line turns any `MinillmError` into one line on stderr and exit code 2; `--debug` shows the traceback.
They are ValueErrors, so a library user who expects Python's own habits is not surprised.
"""


class MinillmError(ValueError):
    """Bad input, told in one line."""


class ConfigError(MinillmError):
    """A config.json or a GGUF header that no model can be built from."""


class CheckpointError(MinillmError):
    """A weight file that is missing, damaged, or holds what minillm cannot run."""


class FetchError(MinillmError):
    """A model that could not be downloaded or stored."""


class TokenizerError(MinillmError):
    """Text or ids that cannot be tokenized, or a damaged vocabulary."""


class RequestError(MinillmError):
    """A prompt or sampling parameter that cannot be served."""


class EngineError(MinillmError):
    """Settings under which an engine cannot run."""


class QuantizationError(MinillmError):
    """Weights, a scheme or a file of quantized weights that do not go together."""


class CompilationError(MinillmError):
    """A model, or a machine, that compiled code cannot be made for."""


class SparsityError(MinillmError):
    """Weights and a pattern of zeros that do not go together."""


class QueueFullError(RequestError):
    """The queue is at its limit; the same request may be served later, best after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OverloadedError(QueueFullError):
    """It would be served, but later than the latency that was promised."""


def short(value: object, limit: int = 60) -> str:
    """A name as a message shows it: one line, at most `limit` characters, the middle of a longer one left out.

    Names come from files and may be as long as a file's author likes.
    """
    try:
        text = " ".join(str(value).split())
    except ValueError:  # Python's own limit
        text = "a number of thousands of digits"
    if len(text) <= limit:
        return text
    tail = (limit - 1) // 3
    return text[: limit - 1 - tail] + "…" + text[len(text) - tail :]
