"""Promise: a conversation that reuses its cache says what one without a cache would, however it is interrupted."""

from __future__ import annotations

import json

import pytest

from minillm import cli
from minillm.cli import chat
from minillm.cli.chat import Conversation, shared_length
from minillm.errors import RequestError
from minillm.generate import generate
from minillm.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture
def conversation(loaded):
    return Conversation(*loaded)


def alone(loaded, messages, params=GREEDY):
    """The answer to a conversation computed from nothing."""
    return generate(*loaded, loaded[1].encode_chat(messages), params)


def check_next_turn(conversation, loaded, text):
    expected = alone(loaded, [*conversation.messages, {"role": "user", "content": text}])
    assert "".join(conversation.ask(text, GREEDY)) == expected.text
    assert conversation.last.token_ids == expected.token_ids


def test_turns_reuse_the_cache_and_change_nothing(conversation, loaded):
    check_next_turn(conversation, loaded, "the cat sat")
    assert conversation.reused == 0
    for text in ("on the mat", "and the dog?", "the log"):
        before = conversation.cache.length
        check_next_turn(conversation, loaded, text)
        assert 0 < conversation.reused <= before
    assert [m["role"] for m in conversation.messages] == ["user", "assistant"] * 4


def test_the_same_question_after_a_reset_computes_one_token_at_least(conversation, loaded):
    """All of the prompt is in the cache, and its last token must be computed all the same."""
    check_next_turn(conversation, loaded, "the cat sat")
    conversation.messages = []
    check_next_turn(conversation, loaded, "the cat sat")
    assert conversation.reused == len(conversation.last.prompt_token_ids) - 1


@pytest.mark.parametrize("steps", [1, 3])
def test_a_stopped_answer_stays_as_far_as_it_got(conversation, loaded, steps):
    texts = conversation.ask("the cat sat", GREEDY)
    said = "".join(next(texts) for _ in range(steps))
    texts.close()  # what Ctrl-C in the loop comes to
    assert conversation.messages[-1] == {"role": "assistant", "content": said}
    assert len(conversation.cached_ids) == conversation.cache.length
    check_next_turn(conversation, loaded, "and the dog?")


def test_reset_keeps_the_system_message(loaded):
    conversation = Conversation(*loaded, system="the log")
    check_next_turn(conversation, loaded, "the cat")
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "the log"}]
    check_next_turn(conversation, loaded, "the cat")
    assert conversation.reused == 0


def test_a_message_too_long_is_refused_and_leaves_no_trace(loaded):
    conversation = Conversation(*loaded, context=60)
    check_next_turn(conversation, loaded, "a")
    messages, ids = list(conversation.messages), list(conversation.cached_ids)
    with pytest.raises(RequestError, match="the context holds 60"):
        list(conversation.ask("the cat " * 60, GREEDY))
    assert (conversation.messages, conversation.cached_ids) == (messages, ids)


def test_an_answer_ends_where_the_context_does(loaded):
    conversation = Conversation(*loaded, context=40)
    list(conversation.ask("the", SamplingParams(temperature=0, max_tokens=500, min_tokens=400, ignore_eos=True)))
    done = conversation.last
    assert len(done.prompt_token_ids) + len(done.token_ids) == 40
    assert done.finish_reason == "length"


@pytest.mark.parametrize("context", [0, -1, 513])
def test_a_context_the_model_does_not_have_is_refused(loaded, context):
    with pytest.raises(RequestError, match="from 1 to the model's own, 512"):
        Conversation(*loaded, context=context)


def test_shared_length():
    assert shared_length([1, 2, 3], [1, 2, 4]) == 2
    assert shared_length([1, 2], [1, 2, 3]) == 2
    assert shared_length([], [1]) == 0
    assert shared_length([2], [1]) == 0


# --- the command ---


@pytest.fixture
def options(folder):
    return ["--model", str(folder), "--dtype", "float32", "--temperature", "0", "--max-tokens", "10", "--ignore-eos"]


@pytest.fixture
def type_lines(monkeypatch, capsys, options):
    """Types lines into an interactive chat; an exception among them is raised instead. Returns (code, out, err)."""

    def type_lines(*lines, extra=()):
        waiting = iter(lines)

        def read(prompt=""):
            line = next(waiting, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
        code = cli.main(["chat", *options, *extra])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return type_lines


def test_one_message(capsys, options, loaded):
    messages = [{"role": "system", "content": "the log"}, {"role": "user", "content": "the cat"}]
    expected = alone(loaded, messages)
    command = ["chat", "--message", "the cat", "--system", "the log", *options]
    assert cli.main(command) == 0
    assert capsys.readouterr().out == expected.text + "\n"
    assert cli.main([*command, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["text"] == expected.text
    assert values["token_ids"] == expected.token_ids
    assert values["messages"] == [*messages, {"role": "assistant", "content": expected.text}]
    assert values["finish_reason"] == "length"


def test_a_conversation_until_the_end_of_input(type_lines, loaded):
    code, out, err = type_lines("the cat", "", "on the mat")
    first = alone(loaded, [{"role": "user", "content": "the cat"}])
    second = alone(
        loaded,
        [
            {"role": "user", "content": "the cat"},
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "on the mat"},
        ],
    )
    assert code == 0
    assert out == f"{first.text}\n{second.text}\n\n"
    assert f"0 of {len(first.prompt_token_ids)} prompt tokens were in the cache" in err


def test_reset_and_exit(type_lines, loaded):
    code, out, err = type_lines("the cat", "/reset", "the cat", "/exit", "never read")
    text = alone(loaded, [{"role": "user", "content": "the cat"}]).text
    assert (code, out) == (0, f"{text}\n{text}\n")
    assert "A new conversation." in err


def test_an_unknown_command_is_not_sent_to_the_model(type_lines):
    code, out, err = type_lines("/help")
    assert (code, out.strip()) == (0, "")
    assert "/help is no command: /reset begins anew" in err


def test_ctrl_c_at_the_prompt_leaves(type_lines):
    code, out, _ = type_lines(KeyboardInterrupt(), "never read")
    assert (code, out.strip()) == (0, "")


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(monkeypatch, type_lines):
    real, calls = chat.common.collect, []

    def interrupted(chunks, answer, started):
        calls.append(answer)
        for i, text in enumerate(real(chunks, answer, started)):
            yield text
            if len(calls) == 1 and i == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(chat.common, "collect", interrupted)
    code, _, err = type_lines("the cat", "the dog")
    assert code == 0
    assert err.count("[stopped]") == 1
    assert [len(answer.tokens) for answer in calls] == [3, 10]


def test_an_overflow_is_one_line_and_the_conversation_goes_on(type_lines):
    code, out, err = type_lines("the cat " * 100, "a", extra=("--context", "60"))
    assert code == 0
    lines = [line for line in err.splitlines() if line.startswith("minillm: ")]
    assert len(lines) == 1
    assert "the context holds 60" in lines[0]
    assert out.strip()  # the second message was answered
