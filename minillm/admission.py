"""What a scheduler takes into its queue: whatever could run if it were alone, and no more than may wait."""

from __future__ import annotations

from .errors import QueueFullError, RequestError
from .request import Request
from .scheduler_config import SchedulerConfig


def refuse(request: Request, config: SchedulerConfig, max_sequence: int, waiting: int) -> None:
    """Raises RequestError, or QueueFullError while `waiting` requests are as many as may wait.

    max_sequence: tokens of prompt and answer that the whole cache can hold.
    """
    prompt = request.num_prompt
    if prompt == 0:
        raise RequestError("the prompt is empty; give at least one token for the model to continue")
    if prompt >= config.max_model_len:
        raise RequestError(
            f"the prompt has {prompt} tokens and max_model_len is {config.max_model_len}, which must hold at least "
            "one token of answer too; shorten the prompt"
        )
    if prompt >= max_sequence:
        raise RequestError(
            f"the prompt has {prompt} tokens and the whole cache holds {max_sequence - 1}; shorten the "
            "prompt, or start the engine with more num_blocks"
        )
    if request.width > config.max_running:
        limit = "max_num_seqs" if config.max_running == config.max_num_seqs else "num_state_slots"
        raise RequestError(
            f"n is {request.width} and at most {config.max_running} sequences run at once; lower n or raise {limit}"
        )
    if config.max_waiting is not None and waiting >= config.max_waiting:
        raise QueueFullError(f"{waiting} requests are waiting, which is the limit; try again later")
