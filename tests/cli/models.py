"""What the tests of the command line share: a tiny model that can chat, and a machine that needs no measuring."""

from __future__ import annotations

import json

from minillm.analysis import Hardware
from tests import tiny

TEMPLATE = (
    "{% for m in messages %}<start>{{ m.role }}: {{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant: {% endif %}"
)
MACHINE = Hardware(
    "test machine", 8.0, 20e9, {"float32": 1e11, "bfloat16": 1e12}, measured={"date": "2026-01-02T03:04:05+00:00"}
)


def save(folder, family="llama"):
    """Writes a tiny random model, a tokenizer and a chat template; returns the folder."""
    tiny.save(family, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def generate_command(model, *options, prompt="the cat"):
    return ["generate", prompt, "--model", model, "--dtype", "float32", "--max-tokens", 4, *options]


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def strict(text: str):
    """The value of a JSON text, in which NaN and Infinity are no words."""

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def one_line(text: str) -> str:
    """The text, which must be one printable line of error."""
    assert text.startswith("minillm: error: ")
    assert text.endswith("\n")
    assert text.count("\n") == 1
    assert text.rstrip("\n").isprintable()
    return text
