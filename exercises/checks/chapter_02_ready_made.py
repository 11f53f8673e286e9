"""Chapter 02: torch brings some of the answers ready-made. A mode refuses them, by whatever name they are called."""

from __future__ import annotations

from collections.abc import Callable

from torch.overrides import TorchFunctionMode

from exercises import Failed


class WithoutReadyMade(TorchFunctionMode):
    """While it is entered, torch's functions whose name holds `name` raise Failed.

    It sits in torch's own dispatch, so it makes no difference under which name or from which module one was taken.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __torch_function__(self, func: Callable, types, args=(), kwargs=None):
        if self.name in str(getattr(func, "__name__", "")):
            raise Failed(f"{self.name} is the answer ready-made; write the formula.")
        return func(*args, **(kwargs or {}))
