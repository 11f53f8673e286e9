"""minillm: LLM inference, built to be read.

`from minillm import LLM, SamplingParams` is where a user of vLLM looks first; everything else is in its own file.
"""

from importlib import import_module

__version__ = "0.4.0"
_FRONT = {"LLM": "llm", "SamplingParams": "sampling_params", "AsyncEngine": "async_engine", "Engine": "engine"}


def __getattr__(name: str):
    """Loads the front door when it is opened: the package alone imports nothing."""
    if name in _FRONT:
        return getattr(import_module(f"{__name__}.{_FRONT[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
