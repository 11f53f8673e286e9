"""Promise: source that a notebook shows is source that is shipped; chapters link to files that are there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SHOWN = re.compile(r"^# ((?:minillm|kernels)/[\w/]+\.py), lines (\d+)–(\d+)\n", re.MULTILINE)


def shown(notebook: Path) -> list[tuple[str, list[str]]]:
    """(file, lines without their numbers) of each output of `show`."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(o.get("data", {}).get("text/plain", "")) for c in cells for o in c.get("outputs", [])]
    return [(m[1], [re.sub(r"^ *\d+ {0,2}", "", line, count=1) for line in text[m.end() :].splitlines()])
            for text in texts if (m := SHOWN.match(text))]  # fmt: skip


def stripped(lines: list[str]) -> list[str]:
    return [line.strip() for line in lines]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_shown_is_shipped(notebook):
    for file, lines in shown(notebook):
        source, code = stripped((ROOT / file).read_text(encoding="utf-8").splitlines()), stripped(lines)
        found = any(source[i : i + len(code)] == code for i in range(len(source) - len(code) + 1))
        assert found, f"{notebook.name} shows {code[0]!r} of {file} as it was; run the notebook again"


def test_something_is_shown():
    counts = {notebook.stem: len(shown(notebook)) for notebook in NOTEBOOKS}
    assert sum(counts.values()) > 30, counts


@pytest.mark.parametrize("notebook", [*NOTEBOOKS, ROOT / "README.md", ROOT / "exercises/README.md"], ids=str)
def test_links_lead_somewhere(notebook):
    text = notebook.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([\w./-]+\.(?:ipynb|md|py|png))\)", text)
    assert all((notebook.parent / link).exists() for link in links), links
