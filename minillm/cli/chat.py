"""`python -m minillm chat`: a conversation, in the model's own chat template."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import MinillmError, RequestError
from ..sampling_params import SamplingParams
from . import common, drafting

if TYPE_CHECKING:
    from ..generate import Completion
    from ..speculative import Speculator
    from ..tokenizer import Tokenizer
    from ..transformer import Transformer

EXAMPLES = """
python -m minillm chat
python -m minillm chat --system "Answer in one sentence." --temperature 0
python -m minillm chat --message "What is the capital of France?" --max-tokens 100 --json
"""
_COMMANDS = "/reset begins anew, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def add_parser(commands) -> None:
    parser = common.add_command(
        commands,
        "chat",
        run,
        "talk to the model",
        EXAMPLES,
        description=f"Talk to the model in its chat template. Without --message a conversation begins: {_COMMANDS}. "
        "What earlier turns left in the KV cache is not computed again.",
    )
    parser.add_argument("--message", metavar="TEXT", help='ask this once and stop; "-" reads stdin')
    parser.add_argument("--system", metavar="TEXT", help="the system message (default: the template's own, if any)")
    parser.add_argument("--context", type=int, metavar="N", help="tokens the conversation may hold (default: the "
                        "model's context, 8192 at most)")  # fmt: skip
    common.add_json(parser)
    common.add_model_options(parser, offload=True)
    drafting.add_options(parser)
    common.add_sampling_options(parser, temperature=0.2, top_p=0.9, max_tokens=512)


def run(args: argparse.Namespace) -> int:
    params = common.sampling_params(args)
    if args.json and args.message is None:
        raise RequestError("chat --json answers one message; add --message TEXT")
    message = None if args.message is None else common.read_text(args.message)
    config = drafting.config(args)
    model, tokenizer = common.load(args)
    speculator = drafting.speculator(config, model, tokenizer)
    conversation = Conversation(model, tokenizer, args.system, args.context, speculator)
    if message is None:
        return _converse(conversation, params)
    texts = conversation.ask(message, params)
    if args.json:
        list(texts)
        values = common.completion_values(conversation.last)
        values |= {"seed": params.seed, "layout": model.layout, "messages": conversation.messages}
        common.print_json(values if speculator is None else values | {"speculation": drafting.counts(speculator)})
    else:
        common.show(texts)
        print()
    return 0


class Conversation:
    """The messages so far, and the cache of their tokens.

    The prompt of a turn begins with the tokens of the turn before, so the cache is cut back to what both share and
    only the rest is computed. `reused` says how many tokens that saved in the last turn, `last` is its Completion.
    """

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, system: str | None = None, context: int | None = None,
        speculator: Speculator | None = None,
    ) -> None:  # fmt: skip
        from ..backend import attention
        from ..kv_cache import ContiguousCache

        longest = model.config.max_position_embeddings
        self.context = min(longest, 8192) if context is None else context
        if not 1 <= self.context <= longest:
            raise RequestError(f"context is {context}; it must be from 1 to the model's own, {longest}")
        self.model, self.tokenizer, self.system, self.speculator = model, tokenizer, system, speculator
        self.cache = ContiguousCache(model.config, self.context, model.dtype, model.device, attention(model))
        self.last: Completion | None = None
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.cached_ids: list[int] = []
        self.reused = 0
        self.cache.reset()

    def ask(self, text: str, params: SamplingParams) -> Iterator[str]:
        """Yields the answer's text as it comes. An answer that is broken off stays in the conversation as far as it
        got; a message that cannot be served leaves the conversation as it was. Raises RequestError."""
        from ..generate import Completion, stream

        started = time.perf_counter()
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self.tokenizer.encode_chat(messages)
        params = self._bounded(params, len(ids))
        self.reused = shared_length(self.cached_ids, ids[:-1])  # the last token's logits are needed
        self.cache.truncate(self.reused)
        chunks = stream(self.model, self.tokenizer, ids, params, self.cache, speculative=self.speculator)
        answer = self.last = Completion(ids)
        try:
            yield from common.collect(chunks, answer, started)
        finally:
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]
            self.cached_ids = [*ids, *answer.token_ids][: self.cache.length]

    def _bounded(self, params: SamplingParams, prompt_tokens: int) -> SamplingParams:
        """The parameters with max_tokens cut to what the context still holds."""
        room = self.context - prompt_tokens
        if room < 1:
            raise RequestError(
                f"the conversation has {prompt_tokens} tokens and the context holds {self.context}, answer included; "
                "say less, or begin a new one (/reset)"
            )
        return replace(params, max_tokens=min(params.max_tokens, room), min_tokens=min(params.min_tokens, room))


def shared_length(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two sequences share at their beginning."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return min(len(left), len(right))


def _converse(conversation: Conversation, params: SamplingParams) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  arrow keys and history for input()
    common.say(f"{_COMMANDS[0].upper()}{_COMMANDS[1:]}.")
    while (line := _read_line()) is not None:
        if line == "/exit":
            break
        if line == "/reset":
            conversation.reset()
            common.say("A new conversation.")
        elif line.startswith("/"):
            common.say(f"{common.one_line(line.split()[0], 60)} is no command: {_COMMANDS}.")
        elif line:
            _answer(conversation, line, params)
    return 0


def _read_line() -> str | None:
    """The next line without its surrounding space, or None at the end of the input or on Ctrl-C."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except UnicodeDecodeError:
        raise RequestError("stdin is not UTF-8 text; convert it first") from None
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def _answer(conversation: Conversation, line: str, params: SamplingParams) -> None:
    try:
        common.show(conversation.ask(line, params))
    except MinillmError as error:
        common.say(f"minillm: {common.error_line(error)}")
        return
    except KeyboardInterrupt:
        common.say("\n[stopped]")
        return
    print()
    done = conversation.last
    rate = f", {1 / done.tpot_s:.1f} tokens/s" if done.tpot_s else ""
    prompt = len(done.prompt_token_ids)
    common.say(
        f"[{len(done.token_ids)} tokens{rate}; first after {common.time_text(done.ttft_s)}; "
        f"{conversation.reused} of {prompt} prompt tokens were in the cache]"
    )
