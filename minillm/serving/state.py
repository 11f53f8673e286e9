"""What the parts of one running server share."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

from ..async_engine import AsyncEngine
from .metrics import Metrics
from .settings import ServerSettings


class ServerState:
    """`active` counts requests under way. `draining`: new ones are refused. `stopping`: running ones end too.

    Prompts are tokenized in one thread of its own: a long one delays other prompts, never the tokens of running
    requests, and the tokenizer's cache of words needs no lock.
    """

    def __init__(self, engine: AsyncEngine, settings: ServerSettings) -> None:
        self.engine, self.settings = engine, settings
        self.metrics = Metrics(engine.engine, settings.model_name)
        self.active, self.draining, self.stopping = 0, False, asyncio.Event()
        self.started = int(time.time())
        self.tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    def close(self) -> None:
        self.metrics.close()
        self.tokenizing.shutdown(wait=False, cancel_futures=True)
