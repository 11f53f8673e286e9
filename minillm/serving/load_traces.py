"""Traces of real services: who came when, and with how many tokens. No trace holds a user's words.

azure     `TIMESTAMP,ContextTokens,GeneratedTokens`, a calendar time a row: the Azure LLM inference traces of 2023
          (Patel et al., Splitwise, ISCA 2024) and 2024 (Stojkovic et al., DynamoLLM, HPCA 2025)
burstgpt  `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`, seconds, further columns allowed
          (Wang et al., BurstGPT, arXiv 2401.17644). A failed request has 0 response tokens: it is left out and counted
mooncake  a JSON object a line with timestamp (ms), input_length, output_length and hash_ids, one for each 512 tokens
          of the prompt (Qin et al., Mooncake, FAST 2025)
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import short
from .load_record import LONGEST_S, MOST_TOKENS, LoadError, TraceRequest

MOONCAKE_BLOCK = 512  # tokens that one hash id of a Mooncake trace stands for


class Trace(NamedTuple):
    """requests: by arrival, the first at 0. left_out: requests that failed when the trace was taken.

    block_tokens: how many tokens one hash id stands for, after scaling.
    """

    requests: tuple[TraceRequest, ...]
    left_out: int = 0
    block_tokens: int = MOONCAKE_BLOCK


def read_trace(
    path: str | Path,
    format: str | None = None,
    limit: int | None = None,
    time_scale: float = 1.0,
    length_scale: float = 1.0,
    max_prompt_tokens: int | None = None,
    max_output_tokens: int | None = None,
) -> Trace:
    """A trace file as requests.

    format: "azure", "burstgpt" or "mooncake"; told from the first line if None. limit: take the first so many.
    time_scale: multiplies the times, so 0.5 doubles the rate. length_scale: multiplies lengths (at least 1 stays) and
    the size of a hash id's block alike, so shared prefixes stay shared. max_*: longer ones are clipped to it. Raises
    LoadError that names file, line and remedy, also for more than 10 million tokens after all that; OSError.
    """
    _check_options(time_scale, length_scale, max_prompt_tokens, max_output_tokens, limit)
    path = Path(path)
    rows: list[tuple[int, TraceRequest]] = []
    left_out = 0
    with path.open(encoding="utf-8-sig", newline="") as file:
        for number, row in _rows(file, path, format):
            if row is None:
                left_out += 1
                continue
            rows.append((number, row))
            if limit is not None and len(rows) == limit:
                break
    if not rows:
        raise LoadError(f"{short(path, 200)}: no request in it; check that it is a trace of the format you named")
    rows.sort(key=lambda numbered: numbered[1].arrival_s)
    start = rows[0][1].arrival_s
    block = max(1, round(min(MOONCAKE_BLOCK * length_scale, MOST_TOKENS)))

    def scaled(number: int, row: TraceRequest) -> TraceRequest:
        arrival = (row.arrival_s - start) * time_scale
        if not arrival < LONGEST_S:
            raise _bad(path, number, f"arrives {arrival:.3g} s after the first", "correct its time, or time_scale")
        prompt = _clip(row.prompt_tokens, length_scale, max_prompt_tokens)
        output = _clip(row.output_tokens, length_scale, max_output_tokens)
        if prompt is None or output is None:
            remedy = "shorten it, or give length_scale or max_prompt_tokens and max_output_tokens"
            raise _bad(path, number, f"a prompt or output of more than {MOST_TOKENS} tokens", remedy)
        return TraceRequest(arrival, prompt, output, row.hash_ids[: -(-prompt // block)])

    return Trace(tuple(scaled(*numbered) for numbered in rows), left_out, block)


def write_mooncake(path: str | Path, requests: Iterable[TraceRequest]) -> None:
    """Writes requests as a Mooncake trace, the one schema that holds all of a TraceRequest. Times are rounded to ms."""
    with Path(path).open("w", encoding="utf-8") as file:
        for row in requests:
            values = {"timestamp": round(row.arrival_s * 1e3), "input_length": row.prompt_tokens}
            values |= {"output_length": row.output_tokens, "hash_ids": list(row.hash_ids)}
            file.write(json.dumps(values) + "\n")


def _clip(tokens: int, scale: float, limit: int | None) -> int | None:
    """Scaled, at least 1; None above MOST_TOKENS."""
    scaled = tokens * scale if limit is None else min(tokens * scale, limit)
    return max(1, round(scaled)) if scaled <= MOST_TOKENS else None


def _check_options(time_scale, length_scale, max_prompt, max_output, limit) -> None:
    for name, value in (("time_scale", time_scale), ("length_scale", length_scale)):
        if not (0 < value < math.inf):
            raise LoadError(f"{name} is {value}; it must be a number above 0")
    for name, value in (("max_prompt_tokens", max_prompt), ("max_output_tokens", max_output), ("limit", limit)):
        if value is not None and value < 1:
            raise LoadError(f"{name} is {value}; it must be 1 or more")


# --- one reader a format: yields (line number, request, or None for one that failed) ---

Row = tuple[int, TraceRequest | None]


def _rows(file: Any, path: Path, format: str | None) -> Iterator[Row]:
    try:
        first = file.readline(1_000_000)
        file.seek(0)
        yield from _reader(first, path, format)(file, path)
    except UnicodeDecodeError:
        raise LoadError(f"{short(path, 200)}: not UTF-8 text; decompress or convert it first") from None
    except csv.Error as error:
        raise LoadError(f"{short(path, 200)}: no CSV text ({error}); export it as CSV again") from None


def _reader(first: str, path: Path, format: str | None) -> Callable[[Any, Path], Iterator[Row]]:
    if format is None and first.lstrip().startswith("{"):
        format = "mooncake"
    elif format is None:
        columns = [name.strip() for name in next(csv.reader([first]), [])]
        if "ContextTokens" in columns:
            format = "azure"
        elif "Request tokens" in columns:
            format = "burstgpt"
        else:
            raise _bad(path, 1, "no known trace format", f"name one of {', '.join(READERS)} if you are sure of it")
    if format not in READERS:
        raise LoadError(f"trace format {format!r} is unknown; choose among {', '.join(READERS)}")
    return READERS[format]


def _azure(file: Any, path: Path) -> Iterator[Row]:
    for number, (time, prompt, output) in _columns(file, path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        try:
            moment = datetime.fromisoformat(time.strip())
        except ValueError:
            wanted = "write it as 2023-11-16 18:17:03.97"
            raise _bad(path, number, f"TIMESTAMP {short(time)!r} is no calendar time", wanted) from None
        seconds = moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
        yield _row(path, number, seconds, prompt, output)


def _burstgpt(file: Any, path: Path) -> Iterator[Row]:
    for number, (time, prompt, output) in _columns(file, path, ("Timestamp", "Request tokens", "Response tokens")):
        try:
            seconds = float(time)
        except ValueError:
            raise _bad(path, number, f"Timestamp {short(time)!r} is no number", "write seconds") from None
        yield _row(path, number, seconds, prompt, output)


def _mooncake(file: Any, path: Path) -> Iterator[Row]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            raise _bad(path, number, "no JSON object", "write one object a line") from None
        if not isinstance(values, dict) or not {"timestamp", "input_length", "output_length"} <= values.keys():
            wanted = "give timestamp, input_length and output_length"
            raise _bad(path, number, "fields are missing", wanted)
        time, ids = values["timestamp"], values.get("hash_ids", [])
        if isinstance(time, bool) or not isinstance(time, int | float):
            raise _bad(path, number, f"timestamp {short(time)!r} is no number", "write milliseconds")
        if not abs(time) < 1e3 * LONGEST_S:
            raise _bad(path, number, "the timestamp is beyond all time", "write milliseconds")
        if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise _bad(path, number, "hash_ids is no list of whole numbers", "write [1, 2, ...] or leave it out")
        row = _row(path, number, time / 1e3, values["input_length"], values["output_length"])
        yield number, row[1] and row[1]._replace(hash_ids=tuple(ids))


READERS = {"azure": _azure, "burstgpt": _burstgpt, "mooncake": _mooncake}


def _columns(file: Any, path: Path, names: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """The named columns of a CSV file, wherever they stand, with the line number."""
    reader = csv.reader(file)
    header = [name.strip() for name in next(reader, [])]
    if missing := [name for name in names if name not in header]:
        raise _bad(path, 1, f"no column {missing[0]!r}", f"the header must name {', '.join(names)}")
    places = [header.index(name) for name in names]
    for values in reader:
        if not values:
            continue
        if len(values) <= max(places):
            raise _bad(path, reader.line_num, f"{len(values)} fields", f"the header has {len(header)}; mend the line")
        yield reader.line_num, [values[place] for place in places]


def _row(path: Path, number: int, seconds: float, prompt: Any, output: Any) -> Row:
    if not abs(seconds) < LONGEST_S:
        raise _bad(path, number, f"the time is no number below {LONGEST_S:g} s", "correct it or delete the line")
    prompt = _tokens(path, number, "prompt", prompt)
    output = _tokens(path, number, "output", output)
    if output == 0:
        return number, None
    if prompt == 0:
        raise _bad(path, number, "a prompt of 0 tokens", "delete the line")
    return number, TraceRequest(seconds, prompt, output)


def _tokens(path: Path, number: int, what: str, value: Any) -> int:
    try:
        tokens = int(value) if isinstance(value, str) else value
    except ValueError:
        tokens = None
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 <= tokens < 2**31:
        raise _bad(path, number, f"{what} tokens {short(value)!r}", "write a whole number, 0 or more")
    return tokens


def _bad(path: Path, number: int, wrong: str, remedy: str) -> LoadError:
    return LoadError(f"{short(path, 200)}, line {number}: {wrong}; {remedy}")
