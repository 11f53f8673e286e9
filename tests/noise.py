"""Claims about time on a machine that does other work too."""

from __future__ import annotations

import functools
from collections.abc import Callable


def calmly(test: Callable) -> Callable:
    """For a test that bounds a time from above: noise only ever adds, so it is to hold in one run of three."""

    @functools.wraps(test)
    def attempts(*args, **kwargs):
        for _ in range(2):
            try:
                return test(*args, **kwargs)
            except AssertionError:
                continue
        return test(*args, **kwargs)

    return attempts
