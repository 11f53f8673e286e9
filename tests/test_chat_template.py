"""Chat templates: the same text as transformers, inside the sandbox, and no message can write a control token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from minillm import chat_template
from minillm.errors import TokenizerError
from minillm.tokenizer import Tokenizer, train_bpe
from minillm.vocabulary import Vocabulary
from tests.tokenizer_references import trained

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 < 3 & 'é'?  \n"},
    {"role": "assistant", "content": "True."},
    {"role": "user", "content": ""},
]
LLAMA3 = (
    "{{- bos_token }}\n{%- for message in messages %}\n    {%- if message.role == 'tool' %}{% continue %}{% endif %}\n"
    "    {{- '<|start|>' + message['role'] + '<|eot|>\\n\\n' + message['content'] | trim + '<|eot|>' }}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|start|>assistant' }}\n{%- endif %}\n"
)
TRIMMED = (
    "{% for message in messages %}\n  {% if loop.index > 3 %}\n    {% break %}\n  {% endif %}\n"
    "  {% generation %}\n{{ message | tojson }}\n  {% endgeneration %}\n{% endfor %}\n"
    "{{ tools | tojson(indent=2) }} {{ documents }} {{ missing }} {{ eos_token }} {{ thinking }}\n"
)
TOOLS = [{"type": "function", "function": {"name": "f<x>", "parameters": {"é": 1}}}]


@pytest.fixture(scope="module")
def reference():
    names = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    return PreTrainedTokenizerFast(tokenizer_object=trained("gpt2"), **names)


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf_fields):
    return Tokenizer.from_gguf(smollm2_gguf_fields)


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("template", ["smollm2", LLAMA3, TRIMMED])
def test_text_equals_that_of_transformers(reference, tokenizer, template, prompt):
    template = tokenizer.vocabulary.chat_template if template == "smollm2" else template
    names = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    for tools in (None, TOOLS):
        for talk in (TALK, TALK[1:], TALK[1:2]):
            extra = {"tools": tools, "thinking": False}
            expected = reference.apply_chat_template(
                talk, chat_template=template, tokenize=False, add_generation_prompt=prompt, **extra
            )
            assert chat_template.render(template, talk, prompt, {**names, **extra}) == expected


def test_smollm2_speaks_by_its_own_template(tokenizer):
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(text, allow_special=True)
    assert ids.count(tokenizer.special_tokens["<|im_start|>"]) == 3
    assert tokenizer.encode_chat([{"role": "user", "content": "Hi"}]) == ids


def test_the_date_is_the_readers_choice_of_form():
    assert len(chat_template.render("{{ strftime_now('%Y-%m-%d') }}", TALK)) == 10


@settings(deadline=None, max_examples=200)
@given(
    parts=st.lists(
        st.sampled_from(["<|im_end|>", "<|im_start|>", "<", "|im_end|>", "<|", "\ufdd0", "\ufdd1", "a", " "])
    )
)
def test_no_message_can_write_a_control_token(tokenizer, parts):
    text = "".join(parts)
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": text}]
    ids = tokenizer.encode_chat(talk)
    safe = tokenizer.encode_chat([talk[0], {"role": "user", "content": ""}])
    for index in tokenizer.special_tokens.values():
        assert ids.count(index) == safe.count(index)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(talk)


def test_guarding_reaches_overlapping_and_one_letter_tokens():
    special = {"%": 300, "|x|": 301}
    base = train_bpe("", 256).vocabulary
    tokens = {**base.tokens, 300: b"%", 301: b"|x|"}
    template = "{{ tools[0].name }}%{{ messages[0].content }}|x|"
    ours = Tokenizer(Vocabulary(tokens, base.words, [], base.stages, special, chat_template=template))
    ids = ours.encode_chat([{"role": "user", "content": "|x|x|%"}], tools=[{"name": "%|x|"}])
    assert [i for i in ids if i >= 300] == [300, 301]
    assert ours.decode(ids) == "%|x|%|x|x|%|x|"


def test_messages_that_use_up_every_mark_are_refused(tokenizer):
    every = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    with pytest.raises(TokenizerError, match="noncharacters"):
        tokenizer.encode_chat([{"role": "user", "content": every}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ (''|attr('__class__'))|attr('__base__') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ '{0.__class__.__init__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(template):
    talk = [{"role": "user", "content": "a"}]
    with pytest.raises(TokenizerError, match="chat template failed") as caught:
        chat_template.render(template, talk)
    assert "\n" not in str(caught.value)
    assert talk == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{% for %}", "chat template failed: Expected"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", "can only concatenate"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ raise_exception('roles must\n alternate') }}", "failed: roles must alternate; check"),
        ("{% include 'other' %}", "chat template failed"),
    ],
)
def test_a_failing_template_is_one_line(template, match):
    with pytest.raises(TokenizerError, match=match) as caught:
        chat_template.render(template, TALK)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "non-empty list"),
        ("hello", "non-empty list"),
        ({"role": "user", "content": "a"}, "non-empty list"),
        (["hello"], "message 0 is str"),
        ([TALK[0], {"content": "a"}], "message 1 has no role"),
        ([{"role": 3, "content": "a"}], "message 0 has no role"),
        ([{"role": "user"}], r"message 0 \(user\) has no text"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], "content must be a string"),
    ],
)
def test_malformed_messages_are_refused(tokenizer, messages, match):
    for use in (tokenizer.apply_chat_template, tokenizer.encode_chat):
        with pytest.raises(TokenizerError, match=match):
            use(messages)


def test_a_call_of_a_tool_needs_no_text():
    call = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    assert chat_template.render("{{ messages[0].tool_calls[0].name }}", call) == "f"
