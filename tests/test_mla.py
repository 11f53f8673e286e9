"""Promise: MLA's two forms are one attention, equal to transformers', and one row a token is all that is kept."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from minillm import checkpoint, kv_cache, mla
from minillm.analysis import Hardware, profile_step
from minillm.analysis.costs import OPERATORS, Step, step_costs, total
from minillm.analysis.kv_size import kv_bytes_per_token
from minillm.analysis.models import model_config
from minillm.attention import sdpa_attention
from minillm.config import ModelConfig
from minillm.errors import CheckpointError
from minillm.kv_cache import ContiguousCache, NoCache, WindowCache
from minillm.paging import PagedCache, SequenceStep, StepMetadata
from tests import tiny

DEEPSEEK = model_config("DeepSeek-V3")


def relative(a, b) -> float:
    return ((a - b).double().norm() / b.double().norm()).item()


def by_hand(q, rows, kv_b, nope):
    """One query, one head, one row at a time: keys and values written out, the definition with no tensor tricks."""
    (T, H, width), (S, _), latent = q.shape, rows.shape, kv_b.shape[2]
    out = torch.zeros(T, H, kv_b.shape[1] - nope, dtype=torch.float64)
    for t in range(T):
        for h in range(H):
            scores = []
            for s in range(S - T + t + 1):
                key = torch.cat([kv_b[h, :nope] @ rows[s, :latent], rows[s, latent:]])
                scores.append(float(q[t, h] @ key) / math.sqrt(width))
            weights = [math.exp(score - max(scores)) for score in scores]
            for s, weight in enumerate(weights):
                out[t, h] += kv_b[h, nope:] @ rows[s, :latent] * (weight / math.fsum(weights))
    return out


shapes = st.fixed_dictionaries(
    {
        "queries": st.integers(1, 4),
        "earlier": st.integers(0, 5),
        "heads": st.integers(1, 3),
        "nope": st.integers(1, 5),
        "rope": st.sampled_from([2, 4]),
        "latent": st.integers(1, 9),
        "value": st.integers(1, 6),
        "seed": st.integers(0, 10_000),
    }
)


def draw(s):
    g = torch.Generator().manual_seed(s["seed"])
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    q = normal(s["queries"], s["heads"], s["nope"] + s["rope"]) * 3
    rows = normal(s["queries"] + s["earlier"], s["latent"] + s["rope"])
    return q, rows, normal(s["heads"], s["nope"] + s["value"], s["latent"])


@settings(max_examples=50, deadline=None)
@given(shapes)
def test_both_forms_are_the_definition(s):
    q, rows, kv_b = draw(s)
    expected = by_hand(q, rows, kv_b, s["nope"])
    for form in (mla.mla_expanded, mla.mla_absorbed):
        assert torch.allclose(form(q, rows, kv_b), expected, atol=1e-11)
        assert torch.allclose(form(q, rows, kv_b, attention=sdpa_attention), expected, atol=1e-11)


@pytest.fixture(scope="module", params=["deepseek", "deepseek-yarn", "deepseek-halves"])
def pair(request, tmp_path_factory):
    """(transformers model, folder)."""
    folder = tmp_path_factory.mktemp(request.param)
    return tiny.save(request.param, folder), folder


class AbsorbedNoCache(NoCache):
    """The whole sequence, and yet the other form."""

    def __init__(self, config, attention=sdpa_attention) -> None:
        super().__init__(config, attention)
        self.fresh = False


IDS = torch.randint(0, tiny.VOCAB, (60,), generator=torch.Generator().manual_seed(3))


@torch.inference_mode()
def logits_of(model, cache=NoCache, cuts=(60,)):
    cache, rows, start = cache(model.config), [], 0
    for cut in cuts:
        part = slice(start, start + cut)
        rows.append(model.logits(model(IDS[part], torch.arange(60)[part], cache)))
        start += cut
    return torch.cat(rows)


@torch.inference_mode()
def theirs_of(model):
    return model(IDS[None]).logits[0]


@pytest.mark.parametrize("cache", [NoCache, AbsorbedNoCache])
def test_each_form_equals_transformers(pair, cache):
    theirs, folder = pair
    assert relative(logits_of(checkpoint.load_model(folder), cache), theirs_of(theirs)) < 1e-5


CUTS = (20, 7, 1, 1, 30, 1)  # expanded, then absorbed: chunks and decodes


def cached(kind):
    return lambda config: kind(config, 60)


@pytest.mark.parametrize("kind", [ContiguousCache, WindowCache])
def test_expanded_then_absorbed_from_the_cache_equals_transformers(pair, kind):
    theirs, folder = pair
    assert relative(logits_of(checkpoint.load_model(folder), cached(kind), CUTS), theirs_of(theirs)) < 1e-5


# --- mistakes that would be easy to make: each must move the logits far more than rounding does ---


def scale_of_the_wide_key(monkeypatch):
    monkeypatch.setattr(mla, "softmax_scale", lambda c: (c.kv_lora_rank + c.qk_rope_head_dim) ** -0.5)


def mscale_forgotten(monkeypatch):
    monkeypatch.setattr(mla, "softmax_scale", lambda c: (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5)


def mscale_once(monkeypatch):
    plain = mla.softmax_scale
    root = lambda c: (plain(c) * (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5) ** 0.5  # noqa: E731
    monkeypatch.setattr(mla, "softmax_scale", root)


def pairs_left_interleaved(monkeypatch):
    monkeypatch.setattr(mla, "paired_halves", lambda weight, heads, rope: weight)


def rotary_on_the_first_entries(monkeypatch):
    right = mla.LatentAttention._query_and_row

    def wrong(self, x, rotation):
        (_, row), (still, _) = right(self, x, rotation), right(self, x, (rotation[0] * 0 + 1, rotation[1] * 0))
        turned = mla.apply_rotary(still[..., : self.rope], rotation)
        return torch.cat([turned, still[..., self.rope :]], dim=-1), row

    monkeypatch.setattr(mla.LatentAttention, "_query_and_row", wrong)


def latent_kept_before_its_norm(monkeypatch):
    right = mla.LatentAttention._query_and_row

    def wrong(self, x, rotation):
        q, row = right(self, x, rotation)
        return q, torch.cat([self.kv_a_proj(x)[:, : self.latent], row[:, self.latent :]], dim=-1)

    monkeypatch.setattr(mla.LatentAttention, "_query_and_row", wrong)


def inner_norms_with_the_outer_epsilon(monkeypatch):
    monkeypatch.setattr(mla, "LATENT_NORM_EPS", 1e-2)


def value_one_entry_off(monkeypatch):
    shifted = lambda c, storage: [(s[0], s[0, ..., 1 : c.kv_lora_rank + 1]) for s in storage]  # noqa: E731
    monkeypatch.setattr(kv_cache, "keys_and_values", shifted)


def value_is_the_end_of_the_row(monkeypatch):
    end = lambda c, storage: [(s[0], s[0, ..., c.qk_rope_head_dim :]) for s in storage]  # noqa: E731
    monkeypatch.setattr(kv_cache, "keys_and_values", end)


@pytest.mark.parametrize(
    "mistake",
    [
        scale_of_the_wide_key, mscale_forgotten, mscale_once, pairs_left_interleaved, rotary_on_the_first_entries,
        latent_kept_before_its_norm, inner_norms_with_the_outer_epsilon, value_one_entry_off,
        value_is_the_end_of_the_row,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_a_mistake_does_not_go_unseen(mistake, tmp_path, monkeypatch):
    theirs = theirs_of(tiny.save("deepseek-yarn", tmp_path))
    mistake(monkeypatch)
    assert relative(logits_of(checkpoint.load_model(tmp_path), cached(ContiguousCache), CUTS), theirs) > 1e-3


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_kimi_k2_is_the_same_model_under_another_name(tmp_path):
    tiny.save("deepseek", tmp_path)
    expected = logits_of(checkpoint.load_model(tmp_path))
    change_config(tmp_path, model_type="kimi_k2")
    assert torch.equal(logits_of(checkpoint.load_model(tmp_path)), expected)


def test_layers_that_guess_ahead_are_left_unread(tmp_path):
    """DeepSeek-V3's file holds one layer more than num_hidden_layers, for multi-token prediction."""
    tiny.save("deepseek", tmp_path)
    expected = logits_of(checkpoint.load_model(tmp_path))
    save_file({"model.layers.3.eh_proj.weight": torch.zeros(3, 3)}, tmp_path / "more.safetensors")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.3.eh_proj.weight"] = "more.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    change_config(tmp_path, num_nextn_predict_layers=1)
    assert torch.equal(logits_of(checkpoint.load_model(tmp_path)), expected)
    change_config(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"does not have, such as model\.layers\.3\.eh_proj"):
        checkpoint.load_model(tmp_path)


# --- which form, and what it costs ---


def test_the_rule_takes_the_form_with_fewer_flops_where_nothing_is_cached():
    for tokens in (1, 7, 4096):
        forms = [total(step_costs(DEEPSEEK, Step.prefill(tokens), absorbed=form)).flops for form in (False, True)]
        assert forms[0] < forms[1]
    forms = [total(step_costs(DEEPSEEK, Step.decode(4096), absorbed=form)).flops for form in (False, True)]
    assert forms[1] < forms[0] / 50


def test_a_step_is_fresh_if_nothing_was_cached_before_it(tmp_path, monkeypatch):
    tiny.save("deepseek", tmp_path)
    model, forms = checkpoint.load_model(tmp_path), []
    for name in ("expand", "absorb"):
        right = getattr(mla, name)
        monkeypatch.setattr(mla, name, lambda *a, right=right, name=name: (forms.append(name), right(*a))[1])
    logits_of(model, cached(ContiguousCache), (20, 1))
    assert forms == ["expand"] * 3 + ["absorb"] * 3
    cache, fresh = PagedCache(model.config, 9, 4), SequenceStep(0, 4, 0, [1])
    for sequences, exact, expected in (
        ([fresh, SequenceStep(4, 2, 0, [2])], False, True),
        ([fresh, SequenceStep(4, 1, 3, [2])], False, False),
        ([fresh], True, False),
    ):
        assert cache.step(StepMetadata(sequences, 4), exact).fresh is expected


def test_the_profile_names_both_forms(tmp_path):
    tiny.save("deepseek", tmp_path)
    model = checkpoint.load_model(tmp_path)
    cache = ContiguousCache(model.config, 60)
    hardware = Hardware("a machine", 1e9, 1e9, {"float32": 1e9})
    for cuts, form in (((20,), {"kv_b_proj"}), ((20, 1), {"q_absorb", "v_absorb"})):
        step = Step.decode(20) if len(cuts) > 1 else Step.prefill(20)

        def run(cuts=cuts):
            cache.reset()
            logits_of(model, lambda _: cache, cuts)

        table = profile_step(run, step_costs(model.config, step), hardware, "float32", repeats=1)
        named = {row.operator for row in table.rows if row.calls}
        assert {"q_a_proj", "q_a_norm", "q_b_proj", "kv_a_proj", "kv_a_norm", "rotary", "attention"} | form <= named
        assert set(named) <= {*OPERATORS, "overhead"}


def test_decode_reads_every_matrix_once(tmp_path):
    theirs = tiny.save("deepseek", tmp_path)
    model = checkpoint.load_model(tmp_path)
    parameters = sum(p.numel() for p in theirs.parameters())
    unread = (tiny.VOCAB - 1) * model.config.hidden_size  # rows of the embedding
    assert model.decode_bytes() == 4 * (parameters - unread)


# --- what is kept ---

CACHED = {
    "mha": tiny.FAMILIES["llama-mha-bias"],
    "gqa": tiny.FAMILIES["llama"],
    "mqa": tiny.FAMILIES["llama-mqa-tied"],
    "mla": tiny.FAMILIES["deepseek"],
}


@pytest.mark.parametrize("kind", CACHED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_allocated_bytes_are_those_of_the_cost_model(kind, dtype):
    name, changes = CACHED[kind]
    model_type = "deepseek_v3" if kind == "mla" else name.lower()
    config = ModelConfig.from_dict({**tiny.SHAPE, **changes, "model_type": model_type, "rope_parameters": None})
    per_token = kv_bytes_per_token(config, str(dtype).removeprefix("torch."))
    assert ContiguousCache(config, 7, dtype).allocated_bytes == 7 * per_token
    paged = PagedCache(config, 5, 4, dtype)
    assert paged.allocated_bytes == 5 * 4 * per_token == 5 * PagedCache.bytes_of_block(config, 4, dtype)


def test_deepseek_v3_keeps_70272_bytes_a_token():
    for name in ("DeepSeek-V3", "Kimi-K2"):
        config = model_config(name)
        assert PagedCache.bytes_of_block(config, 1, torch.bfloat16) == 70_272 == kv_bytes_per_token(config)
