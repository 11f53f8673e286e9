"""Chapter 10, a scheduler in four functions: makespan, token budget, admission, preemption.

The right answers come from playing it step by step, token by token and block by block.
"""

from __future__ import annotations

from .chapter_10_memory import ADMIT, GIVE_WAY
from .chapter_10_steps import MAKESPAN, SPLIT

EXERCISES = [MAKESPAN, SPLIT, ADMIT, GIVE_WAY]
