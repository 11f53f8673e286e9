"""A module with one mistake planted in it, to see a test catch it."""

from __future__ import annotations

import inspect
import types


def planted(module, right: str, wrong: str) -> types.ModuleType:
    """A second copy of the module, in which `right`, found exactly once, is replaced."""
    source = inspect.getsource(module)
    assert source.count(right) == 1, f"{right!r} stands {source.count(right)} times in {module.__name__}"
    copy = types.ModuleType(module.__name__)
    copy.__package__, copy.__file__ = module.__package__, module.__file__
    exec(compile(source.replace(right, wrong), f"{module.__file__} (planted)", "exec"), copy.__dict__)
    return copy
