"""Fields of OpenAI's and vLLM's APIs that this server knows and does not do.

A value that asks for nothing is taken, so that clients which always send the field work. Any other is refused with the
reason: what a client asked for and did not get must not look like success.
"""

from __future__ import annotations

from typing import Any

Table = dict[str, tuple[tuple[Any, ...], str]]  # field -> (values that ask for nothing, reason)

_TOOLS = "this server runs no tools; describe them in a message and read the answer yourself"
_GRAMMAR = "answers are not held to a format here; ask for it in the prompt and check the answer"
_STORE = "this server stores nothing"

BOTH: Table = {
    "response_format": ((None, {"type": "text"}), _GRAMMAR),
    "structured_outputs": ((None,), _GRAMMAR),
    "guided_json": ((None,), _GRAMMAR),
    "guided_regex": ((None,), _GRAMMAR),
    "guided_choice": ((None,), _GRAMMAR),
    "guided_grammar": ((None,), _GRAMMAR),
    "best_of": ((None, 1), "candidates are not ranked here; ask for n and choose"),
    "use_beam_search": ((None, False), "there is no beam search here; use temperature 0, or n answers"),
    "prompt_logprobs": ((None,), "log-probabilities are given for answers alone"),
    "skip_special_tokens": ((None, True), "special tokens are never part of the text"),
    "spaces_between_special_tokens": ((None, True, False), ""),
    "truncate_prompt_tokens": ((None,), "a prompt is never cut silently; shorten it yourself"),
    "allowed_token_ids": ((None,), "use logit_bias"),
    "bad_words": ((None, []), "use logit_bias"),
    "store": ((None, False), _STORE),
    "metadata": ((None, {}), _STORE),
    "service_tier": ((None, "auto", "default"), "there is one tier; use priority"),
}
CHAT: Table = BOTH | {
    "tools": ((None, []), _TOOLS),
    "tool_choice": ((None, "none", "auto"), _TOOLS),
    "parallel_tool_calls": ((None, True, False), ""),
    "functions": ((None, []), _TOOLS),
    "function_call": ((None, "none", "auto"), _TOOLS),
    "modalities": ((None, ["text"]), "answers are text alone"),
    "audio": ((None,), "answers are text alone"),
    "prediction": ((None,), "predicted outputs are not used here"),
    "reasoning_effort": ((None,), "the model has no levels of reasoning"),
    "verbosity": ((None,), "ask for it in the prompt"),
    "web_search_options": ((None,), "this server searches nothing"),
    "continue_final_message": ((None, False), "use /v1/completions to continue a text"),
    "chat_template": ((None,), "the model's own template is used"),
    "chat_template_kwargs": ((None, {}), "the template's own defaults are used"),
}
COMPLETION: Table = BOTH | {
    "echo": ((None, False), "the prompt is not sent back; put it in front of the answer yourself"),
    "suffix": ((None,), "the model does not fill in between two texts"),
}
MESSAGE: Table = {
    "tool_calls": ((None, []), _TOOLS),
    "tool_call_id": ((None,), _TOOLS),
    "function_call": ((None,), _TOOLS),
    "audio": ((None,), "messages are text alone"),
    "refusal": ((None,), "leave the refused turn out, or give it as content"),
    "annotations": ((None, []), "messages are text alone"),
    "name": ((None,), "the template shows no names; write the name into the content"),
}


def asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Equality that keeps 1, 1.0 and true apart, as JSON's reader does."""
    return any(type(value) is type(other) and value == other for other in neutral)


def schema(table: Table) -> dict[str, Any]:
    """The fields as OpenAPI properties that take their neutral values only."""
    return {
        name: {"enum": list(neutral), "description": f"Not supported: {reason}." if reason else "Without effect."}
        for name, (neutral, reason) in table.items()
    }
