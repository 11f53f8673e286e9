"""Right answers that go about it another way than the solutions do: every one of them must pass.

A check that grows stricter is held against these. Each follows the statement to the letter.
"""

import pytest

from exercises import registry
from exercises.child import execute
from exercises.grade import grade

ANSWERS = {
    ("01", "train_merges"): """
from collections import Counter
def train_merges(text, n):
    pieces, merges = [bytes([b]) for b in text.encode()], []
    while len(merges) < n:
        common = Counter(zip(pieces, pieces[1:])).most_common(1)
        if not common or common[0][1] < 2:
            break
        pair, joined, fresh = common[0][0], [], False
        for piece in pieces:
            fresh = bool(joined) and not fresh and (joined[-1], piece) == pair
            if fresh:
                joined[-1] += piece
            else:
                joined.append(piece)
        merges.append(pair)
        pieces = joined
    return merges
""",
    ("01", "encode"): """
def encode(text, merges):
    pieces = [bytes([b]) for b in text.encode()]
    while True:
        places = [(merges.index(p), i) for i, p in enumerate(zip(pieces, pieces[1:])) if p in merges]
        if not places:
            return pieces
        at = min(places)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
""",
    ("01", "streaming_decoder"): """
class StreamingDecoder:
    def __init__(self):
        self.held = b""
    def push(self, piece):
        data, self.held, text = self.held + piece, b"", ""
        while True:
            try:
                return text + data.decode()
            except UnicodeDecodeError as error:
                text += data[: error.start].decode()
                if error.reason == "unexpected end of data":
                    self.held = data[error.start :]
                    return text
                text, data = text + chr(0xFFFD), data[error.end :]
    def flush(self):
        data, self.held = self.held, b""
        return data.decode("utf-8", "replace")
""",
    ("02", "rms_norm"): """
def rms_norm(x, weight, eps):
    wide = x.double()
    return (weight.double() * wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()).type_as(x)
""",
    ("02", "rotate"): """
import torch
def rotate(x, positions, base=10000.0):
    half = x.shape[-1] // 2
    speeds = torch.tensor([base ** (-2 * i / x.shape[-1]) for i in range(half)])
    angles = torch.outer(positions.float(), speeds)[:, None]
    points = torch.complex(x[..., :half].float(), x[..., half:].float()) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([points.real, points.imag], -1).to(x.dtype)
""",
    ("02", "causal_mask"): """
import torch
def causal_mask(queries, keys, window=None):
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return seen if window is None else seen.triu(keys - queries - window + 1)
""",
    ("02", "grouped_attention"): """
import torch
def grouped_attention(q, k, v):
    (T, H, D), (S, Hkv, _) = q.shape, k.shape
    out = torch.zeros_like(q)
    for h in range(H):
        for t in range(T):
            seen, key = S - T + t + 1, h // (H // Hkv)
            scores = k[:seen, key].double() @ q[t, h].double() / D**0.5
            out[t, h] = (scores.softmax(0) @ v[:seen, key].double()).to(q.dtype)
    return out
""",
    ("03", "row_cache"): """
import torch
class RowCache:
    def __init__(self, max_tokens, heads, dim):
        self.rows, self.used = torch.empty(2, max_tokens, heads, dim), 0
    def append(self, k, v):
        end = self.used + len(k)
        if end > self.rows.shape[1]:
            raise ValueError("full")
        self.rows[0, self.used : end], self.rows[1, self.used : end], self.used = k, v, end
        return self.rows[0, :end], self.rows[1, :end]
    def reset(self):
        self.__init__(*self.rows.shape[1:])
""",
    ("03", "chunk_positions"): """
def chunk_positions(total, size, cached):
    if cached >= total:
        return [[total - 1]]
    passes, here = [], cached
    while here < total:
        count = total - here if size is None else min(size, total - here)
        passes.append([*range(here, here + count)])
        here += count
    return passes
""",
    ("03", "cache_bytes"): """
def cache_bytes(config, tokens, sequences, element_bytes):
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"] if "num_key_value_heads" in config else heads
    dim = config["head_dim"] if "head_dim" in config else config["hidden_size"] / heads
    return sum(2 * kv_heads * dim * element_bytes for _ in range(config["num_hidden_layers"])) * tokens * sequences
""",
    ("03", "top_p"): """
import torch, numpy
def top_p(probs, p):
    values = probs.numpy()
    order = numpy.argsort(-values, kind="stable")
    count = len(values) if p == 1 else int(numpy.searchsorted(numpy.cumsum(values[order]), p)) + 1
    kept = numpy.zeros_like(values)
    kept[order[:count]] = values[order[:count]]
    return torch.from_numpy(kept / kept.sum())
""",
    ("04", "turning_batch"): """
def turning_batch(flops_per_token, weight_bytes, kv_bytes_per_sequence, peak, bandwidth):
    if flops_per_token / peak <= kv_bytes_per_sequence / bandwidth:
        return None
    batch = 1
    while batch * flops_per_token / peak <= (weight_bytes + batch * kv_bytes_per_sequence) / bandwidth:
        batch += 1
    return batch
""",
    ("04", "largest_batch"): """
import math
def largest_batch(limit, flops_per_token, weight_bytes, kv_bytes_per_sequence, peak, bandwidth):
    kv, reading = kv_bytes_per_sequence / bandwidth, weight_bytes / bandwidth
    if reading + kv > limit:
        return 0
    compute = math.floor(limit / (kv + flops_per_token / peak))
    return compute if kv == 0 else min(compute, math.floor((limit - reading) / kv))
""",
    ("05", "slow_operator"): """
import math
def slow_operator(rows):
    best, won = None, 0
    for row in rows:
        if row["bound"] is not None and row["seconds"] - row["bound"] > won:
            best, won = row["operator"], row["seconds"] - row["bound"]
    step = math.fsum(row["seconds"] for row in rows)
    return (best, step / (step - won)) if best is not None else (None, 1.0)
""",
    ("05", "explain_residual"): """
def explain_residual(flops, bytes_moved, calls, measured, machine):
    memory, compute = bytes_moved / machine["bandwidth"], flops / machine["peak"]
    start = calls * machine["start"]
    share = (max(memory, compute) + start) / measured
    if share < 0.5:
        return "unexplained", share
    if memory >= compute and memory >= start:
        return "memory", share
    return "compute" if compute >= start else "overhead", share
""",
    ("05", "self_times"): """
def self_times(spans):
    own = {}
    for name, _, duration in spans:
        own[name] = own.get(name, 0) + duration
    for name, start, duration in spans:
        around = [s for s in spans if s[1] <= start and s[1] + s[2] >= start + duration and s[2] > duration]
        if around:
            own[min(around, key=lambda span: span[2])[0]] -= duration
    return own
""",
}


@pytest.mark.parametrize(("chapter", "name"), ANSWERS, ids="-".join)
def test_another_right_answer_passes(chapter, name):
    exercise = registry.find(chapter, name)
    namespace, errors = execute([ANSWERS[chapter, name]])
    assert errors == {}
    outcome = grade(exercise, namespace[exercise.entry])
    assert outcome.passed, outcome
