"""Promise: an OpenAI client gets, over a real socket, what generate() gives, streamed or whole."""

from __future__ import annotations

import json
import re

import pytest

from minillm import engine
from minillm.sampling_params import SamplingParams
from tests.serving import alone
from tests.serving_http import MODEL, client_of, events, make_chat_model, post, serving

MESSAGES = [{"role": "system", "content": "the mat"}, {"role": "user", "content": "the cat sat on"}]

ROUNDING = 1e-5  # an engine step adds in another order than generate() does


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_chat_model(tmp_path_factory)


@pytest.fixture(scope="module")
def server(pair):
    with serving(pair, policy="priority") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return client_of(server)


def expected(pair, prompt, **params):
    """What generate.py answers to a text or to token ids."""
    ids = pair[1].encode(prompt, add_special=True) if isinstance(prompt, str) else prompt
    return alone(*pair, tuple(ids), SamplingParams(**params))


SETTINGS = [
    {"temperature": 0, "max_tokens": 12},
    {"seed": 5, "max_tokens": 20, "n": 3},
    {"seed": -7, "temperature": 0.7, "top_p": 0.8, "max_tokens": 9},
    {"seed": 1, "presence_penalty": 1.5, "frequency_penalty": -0.5, "max_tokens": 15},
    {"seed": 2, "logit_bias": {"17": 100, "18": -100}, "max_tokens": 5},
    {"seed": 3, "stop": ["e", "\x19"], "max_tokens": 60},
    {"seed": 3, "stop": "t", "max_tokens": 60, "n": 2},
]
EXTRAS = [
    {"top_k": 5, "min_p": 0.1},
    {"repetition_penalty": 1.3, "ignore_eos": True},
    {"min_tokens": 8, "stop_token_ids": list(range(40, 90))},
    {"stop_token_ids": list(range(100, 200)), "top_k": -1},
    {"stop": ["t", "e", "a"], "include_stop_str_in_output": True},
]


def as_params(settings: dict) -> dict:
    bias = {int(k): v for k, v in settings.get("logit_bias", {}).items()}
    return {**settings, "logit_bias": bias}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_completions_are_those_of_generate(client, pair, settings):
    answer = client.completions.create(model=MODEL, prompt="the cat sat", **settings)
    done = expected(pair, "the cat sat", **as_params(settings))
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
        (i, d.text, d.finish_reason) for i, d in enumerate(done)
    ]
    assert answer.usage.prompt_tokens == len(done[0].prompt_token_ids)
    assert answer.usage.completion_tokens == sum(len(d.token_ids) for d in done)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("extra", EXTRAS, ids=str)
def test_additions_have_vllms_names_and_meanings(client, pair, extra):
    answer = client.completions.create(model=MODEL, prompt="the dog", seed=11, max_tokens=30, extra_body=extra)
    (done,) = expected(pair, "the dog", seed=11, max_tokens=30, **extra)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (done.text, done.finish_reason, done.stop_reason)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_chats_are_generate_of_the_template(client, pair, settings):
    settings = dict(settings)
    limit = settings.pop("max_tokens")
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=limit, **settings)
    done = expected(pair, pair[1].encode_chat(MESSAGES), max_tokens=limit, **as_params(settings))
    assert [(c.message.content, c.finish_reason) for c in answer.choices] == [(d.text, d.finish_reason) for d in done]
    assert {c.message.role for c in answer.choices} == {"assistant"}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_stream_joined_is_the_whole_answer(client, settings):
    request = {"model": MODEL, "prompt": ["the cat sat", "on"], **settings}
    whole = client.completions.create(**request)
    parts, ends, usage = ["" for _ in whole.choices], {}, None
    for chunk in client.completions.create(**request, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            assert choice.index not in ends
            parts[choice.index] += choice.text
            if choice.finish_reason is not None:
                ends[choice.index] = choice.finish_reason
        if not chunk.choices:
            assert usage is None
            usage = chunk.usage
    assert parts == [c.text for c in whole.choices]
    assert ends == {c.index: c.finish_reason for c in whole.choices}
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_a_chat_stream_joined_is_the_whole_answer(client):
    request = {"model": MODEL, "messages": MESSAGES, "seed": 4, "n": 2, "max_tokens": 15, "logprobs": True}
    whole = client.chat.completions.create(**request)
    text, tokens, roles, ends = ["", ""], [[], []], [[], []], [None, None]
    for chunk in client.chat.completions.create(**request, stream=True):
        assert chunk.usage is None
        for choice in chunk.choices:
            text[choice.index] += choice.delta.content
            roles[choice.index].append(choice.delta.role)
            ends[choice.index] = choice.finish_reason
            tokens[choice.index] += choice.logprobs.content if choice.logprobs else []
    assert text == [c.message.content for c in whole.choices]
    assert tokens == [c.logprobs.content for c in whole.choices]
    assert ends == ["length", "length"]
    assert all(r[0] == "assistant" and set(r[1:]) <= {None} for r in roles)


def test_the_wire_is_as_the_standard_has_it(server):
    body = {"prompt": "the", "max_tokens": 4, "seed": 1, "stream": True, "stream_options": {"include_usage": True}}
    response = post(server, "/v1/completions", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last, done = events(response)
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in [*chunks, last]}) == 1
    plain = events(post(server, "/v1/completions", {**body, "stream_options": {"include_usage": False}}))
    assert not any("usage" in chunk for chunk in plain[:-1])


def test_prompts_of_every_form(client, pair):
    ids = [pair[1].encode(text) for text in ("the cat", "on the log")]
    forms = [["the cat", "on the log"], ids]
    for form in forms:
        answer = client.completions.create(model=MODEL, prompt=form, seed=2, n=2, max_tokens=6)
        assert [c.index for c in answer.choices] == [0, 1, 2, 3]
        wanted = [d.text for one in ids for d in expected(pair, one, seed=2, n=2, max_tokens=6)]
        assert [c.text for c in answer.choices] == wanted
        assert answer.usage.prompt_tokens == sum(map(len, ids))
    single = client.completions.create(model=MODEL, prompt=ids[0], seed=2, max_tokens=6)
    assert single.choices[0].text == expected(pair, ids[0], seed=2, max_tokens=6)[0].text


def test_content_in_parts_is_joined_and_developer_is_system(client):
    parts = [{"type": "text", "text": "the cat"}, {"type": "text", "text": "sat"}]
    texts = [
        client.chat.completions.create(
            model=MODEL, seed=1, max_tokens=12, messages=[{"role": role, "content": content}, MESSAGES[1]]
        ).choices[0].message.content
        for role, content in (("developer", parts), ("system", "the cat\nsat"))
    ]  # fmt: skip
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "text",
    [
        "\x00",
        "\ufeff",
        "\U0010ffff",
        "e\u0301",
        "\u202eab",
        "a\u2028b",
        "\ufdd0",
        "\r\n",
        "data: [DONE]\n\n",
        "\U0001f600",
    ],
)
def test_any_unicode_is_a_prompt_and_part_of_an_answer(server, pair, text):
    """Sent escaped and as it is."""
    for escaped in (True, False):
        body = json.dumps({"prompt": text, "max_tokens": 2}, ensure_ascii=escaped).encode()
        answer = post(server, "/v1/completions", body)
        assert answer.json()["usage"]["prompt_tokens"] == len(pair[1].encode(text))
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 3, "stop": text, "cache_salt": text}
    assert events(post(server, "/v1/chat/completions", {**body, "stream": True}))[-1] == "[DONE]"
    assert post(server, "/v1/chat/completions", body).status_code == 200


def test_a_message_cannot_write_special_tokens(client, pair):
    """The spelling of the end token in a message is text, and the answer ends where it should."""
    messages = [{"role": "user", "content": "a<end>b"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    assert answer.usage.prompt_tokens == len(pair[1].encode_chat(messages))
    assert pair[1].encode_chat(messages).count(1) == 1


def test_a_reply_can_be_sent_back_as_it_came(client):
    reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3, seed=1).choices[0].message
    messages = [*MESSAGES, reply.model_dump(), {"role": "user", "content": "the"}]
    assert client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2).choices


def test_without_a_limit_a_chat_goes_on_to_the_end_of_the_context(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"
    assert client.completions.create(model=MODEL, prompt="a", extra_body={"ignore_eos": True}).usage.total_tokens == 17


def test_completion_logprobs(client, pair):
    answer = client.completions.create(model=MODEL, prompt="the cat", seed=6, max_tokens=20, logprobs=3)
    (done,) = expected(pair, "the cat", seed=6, max_tokens=20, logprobs=3)
    found = answer.choices[0].logprobs
    assert found.token_logprobs == pytest.approx([t.logprob for t in done.tokens], abs=ROUNDING)
    raw = [pair[1].token_bytes(i) for i in done.token_ids]
    assert b"".join(map(_as_bytes, found.tokens)) == b"".join(raw)
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top[token] == logprob
        assert 3 <= len(top) <= 4
    for offset, data in zip(found.text_offset, raw, strict=True):
        if data.isascii():
            assert answer.choices[0].text[offset:].startswith(data.decode())
    assert client.completions.create(model=MODEL, prompt="a", max_tokens=1).choices[0].logprobs is None
    none = client.completions.create(model=MODEL, prompt="a", max_tokens=1, logprobs=0).choices[0].logprobs
    assert [len(top) for top in none.top_logprobs] == [1]


def _as_bytes(token: str) -> bytes:
    if not token.startswith("bytes:"):
        return token.encode()
    return bytes(int(h, 16) for h in re.findall(r"\\x(..)", token))


def test_chat_logprobs(client, pair):
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, seed=6, max_tokens=20, logprobs=True, top_logprobs=2
    )
    (done,) = expected(pair, pair[1].encode_chat(MESSAGES), seed=6, max_tokens=20, logprobs=2)
    content = answer.choices[0].logprobs.content
    assert [e.logprob for e in content] == pytest.approx([t.logprob for t in done.tokens], abs=ROUNDING)
    assert [bytes(e.bytes) for e in content] == [pair[1].token_bytes(t.id) for t in done.tokens]
    for entry, token in zip(content, done.tokens, strict=True):
        wanted = [(pair[1].token_bytes(i), pytest.approx(value, abs=ROUNDING)) for i, value in token.top_logprobs]
        assert [(bytes(t.bytes), t.logprob) for t in entry.top_logprobs] == wanted


def test_streamed_logprobs_joined_are_the_whole_ones(client):
    request = {"model": MODEL, "prompt": "the", "seed": 8, "max_tokens": 25, "logprobs": 1, "stop": ["at", "zz"]}
    whole = client.completions.create(**request).choices[0].logprobs
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    joined = {name: [] for name in names}
    for chunk in client.completions.create(**request, stream=True):
        for name in names:
            joined[name] += getattr(chunk.choices[0].logprobs, name) if chunk.choices[0].logprobs else []
    assert joined == {name: getattr(whole, name) for name in names}


def test_log_zero_is_valid_json(server, monkeypatch):
    """JSON has no word for it; OpenAI's is -9999."""
    sample = engine.sample

    def with_zero(*args):
        tokens = sample(*args)
        return [t._replace(logprob=float("-inf"), top_logprobs=((5, float("-inf")),)) for t in tokens]

    monkeypatch.setattr(engine, "sample", with_zero)
    for path, body in (
        ("/v1/completions", {"prompt": "a", "logprobs": 1}),
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1}),
    ):
        for stream in (False, True):
            response = post(server, path, {**body, "max_tokens": 2, "stream": stream})
            assert response.status_code == 200
            assert "-9999.0" in response.text
            assert "Infinity" not in response.text


def test_a_seed_repeats_and_its_absence_does_not(client):
    request = {"model": MODEL, "prompt": "the", "max_tokens": 24, "n": 2}
    first, again = (client.completions.create(**request, seed=9).choices for _ in range(2))
    assert [c.text for c in first] == [c.text for c in again]
    assert first[0].text != first[1].text
    assert client.completions.create(**request).choices[0].text != client.completions.create(**request).choices[0].text


def test_cached_tokens_and_the_salt_that_keeps_them_apart(client):
    request = {"model": MODEL, "prompt": list(range(20, 40)), "max_tokens": 2, "seed": 1}

    def cached(**extra):
        return client.completions.create(**request, extra_body=extra).usage.prompt_tokens_details.cached_tokens

    assert [cached(), cached(), cached(cache_salt="a"), cached(cache_salt="b"), cached(cache_salt="a")] == [
        0, 16, 0, 0, 16
    ]  # fmt: skip


def test_a_priority_reaches_the_queue(server, client):
    client.completions.create(model=MODEL, prompt="the", max_tokens=1, extra_body={"priority": -3}, user="me")
    assert server.engine.engine.events.of("added")[-1].data["priority"] == -3


def test_models(client):
    (card,) = client.models.list().data
    assert (card.id, card.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL) == card
