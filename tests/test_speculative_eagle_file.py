"""Promise: an EAGLE head that was written is the head that is read, by others too, and by its own target alone."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from minillm import checkpoint
from minillm.errors import CheckpointError, EngineError, MinillmError, RequestError
from minillm.generate import generate
from minillm.kv_cache import NoCache
from minillm.layers import RMSNorm
from minillm.quantization import quantize_
from minillm.sampling import SamplingParams
from minillm.speculative import EagleHead, SpeculativeConfig, eagle, eagle_file, make_speculator
from tests import tiny
from tests.eagle_heads import GREEDY, JOBS, PROMPT, serve
from tests.planted import planted
from tests.serving import alone, answers, expected, make_engine, make_tiny

ANSWER = SamplingParams(max_tokens=30, **GREEDY)
LAYER = {
    "self_attn.q_proj": (96, 48), "self_attn.k_proj": (32, 48), "self_attn.v_proj": (32, 48),
    "self_attn.o_proj": (48, 96), "mlp.gate_proj": (80, 48), "mlp.up_proj": (80, 48), "mlp.down_proj": (48, 80),
    "input_layernorm": (48,), "post_attention_layernorm": (48,),
}  # fmt: skip
SHAPES = {"fc.weight": (48, 96), **{f"layers.0.{name}.weight": shape for name, shape in LAYER.items()}}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return make_tiny("qwen3", tmp_path_factory)


@pytest.fixture(scope="module")
def head(qwen3):
    """Trained on one answer, so that its drafts of that one are kept. Not to be changed."""
    (answer,) = alone(*qwen3, tuple(PROMPT), ANSWER)
    head = EagleHead(qwen3[0])
    eagle.train_eagle(head, [[*PROMPT, *answer.token_ids]], steps=60, learning_rate=3e-3)
    return head


@pytest.fixture(scope="module")
def saved(head, tmp_path_factory):
    """Its folder. Not to be changed."""
    folder = tmp_path_factory.mktemp("head") / "head"
    assert head.save(folder, "the tiny one") == (folder / "model.safetensors").stat().st_size
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def normed(model) -> EagleHead:
    """A head whose norms are not one, as training leaves them: others may train them."""
    head, generator = EagleHead(model, seed=5), torch.Generator().manual_seed(6)
    weights = (1 + 0.5 * torch.randn(48, generator=generator) for _ in range(2))
    head.block.attn_norm, head.block.ffn_norm = (RMSNorm(w, head.config.rms_norm_eps) for w in weights)
    return head


@torch.no_grad()
def guesses(head: EagleHead) -> torch.Tensor:
    tokens = torch.tensor(PROMPT)
    return head(
        tokens[1:], eagle.features(head.target, PROMPT)[:-1], torch.arange(len(PROMPT) - 1), NoCache(head.config)
    )


# --- what is written ---


def test_equal_bit_for_bit(qwen3, head, tmp_path):
    for i, one in enumerate((head, normed(qwen3[0]))):
        one.save(tmp_path / f"{i}")
        again = EagleHead.load(tmp_path / f"{i}", qwen3[0])
        assert all(torch.equal(a, b) for a, b in zip(one.tensors().values(), again.tensors().values(), strict=True))
        assert torch.equal(guesses(one), guesses(again))
        again.save(tmp_path / f"{i} again")
        for name in ("model.safetensors", "config.json"):
            assert (tmp_path / f"{i}" / name).read_bytes() == (tmp_path / f"{i} again" / name).read_bytes()


def test_a_loaded_head_learns_on(qwen3, saved):
    head = EagleHead.load(saved, qwen3[0])
    before = head.tensors()["fc.weight"].clone()
    eagle.train_eagle(head, [PROMPT], steps=1)
    assert not torch.equal(before, head.tensors()["fc.weight"])


def test_the_layout_of_published_heads(saved):
    assert {path.name for path in saved.iterdir()} == {"config.json", "model.safetensors"}
    tensors = load_file(saved / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == SHAPES
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    config = json.loads((saved / "config.json").read_text(encoding="utf-8"))
    assert (config["model_type"], config["num_hidden_layers"], config["bias"]) == ("eagle", 1, False)
    assert config["target"]["name"] == "the tiny one"
    assert config["target"]["num_hidden_layers"] == 3


def by_transformers(folder, model) -> torch.Tensor:
    """What the file says, computed by a Llama layer of transformers: the names mean there what they mean here."""
    tensors = load_file(folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "head_dim", "rms_norm_eps")  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": raw["rope_theta"]}
    theirs = transformers.LlamaModel(
        transformers.LlamaConfig(**{n: raw[n] for n in names}, rope_parameters=rope)
    ).eval()
    left = theirs.load_state_dict({n: t for n, t in tensors.items() if n != "fc.weight"}, strict=False)
    assert (left.unexpected_keys, set(left.missing_keys)) == ([], {"embed_tokens.weight", "norm.weight"})
    theirs.norm = torch.nn.Identity()  # a head has none
    embedded, features = model.embedding[torch.tensor(PROMPT[1:])], eagle.features(model, PROMPT)[:-1]
    joined = torch.cat([embedded, features], dim=-1) @ tensors["fc.weight"].T
    with torch.no_grad():
        return theirs(inputs_embeds=joined[None]).last_hidden_state[0]


def test_others_read_the_same_from_the_file(qwen3, tmp_path):
    head = normed(qwen3[0])
    head.save(tmp_path / "head")
    ours, theirs = guesses(head), by_transformers(tmp_path / "head", qwen3[0])
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4 * float(ours.abs().max()))


K_V, GATE_UP, NORMS = (
    '"self_attn.k_proj": {}, "self_attn.v_proj": {}',
    '"mlp.gate_proj": {}, "mlp.up_proj": {}',
    '("{}_layernorm", "{}_layernorm")',
)
MISTAKES = {
    "keys and values change places": (K_V.format("k", "v"), K_V.format("v", "k")),
    "gate and up change places": (GATE_UP.format("gate", "up"), GATE_UP.format("up", "gate")),
    "norms change places": (NORMS.format("input", "post_attention"), NORMS.format("post_attention", "input")),
    "norms are taken to be one": ('RMSNorm(found[f"layers.0.{name}.weight"], eps)', "RMSNorm(torch.ones(48), eps)"),
    "nothing is read": ("part.copy_(found[name])", "part.clone()"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_it_are_caught(qwen3, tmp_path, mistake):
    bad, head = planted(eagle, *MISTAKES[mistake]).EagleHead, normed(qwen3[0])
    eagle_file.write(tmp_path / "head", bad.tensors(head), head.config, head.target, None)
    ours = guesses(head)
    read_back = torch.equal(ours, guesses(bad.load(tmp_path / "head", qwen3[0])))
    assert not (read_back and torch.allclose(ours, by_transformers(tmp_path / "head", qwen3[0]), rtol=1e-3, atol=1e-3))


# --- whole or not at all ---


@pytest.mark.parametrize("stops", ["model.safetensors", "config.json"])
def test_a_broken_off_save_leaves_nothing(head, tmp_path, monkeypatch, stops):
    real = eagle_file.write_atomically

    def interrupted(path, write):
        if path.name == stops:
            raise KeyboardInterrupt
        real(path, write)

    monkeypatch.setattr(eagle_file, "write_atomically", interrupted)
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty"):
        with pytest.raises(KeyboardInterrupt):
            head.save(tmp_path / name)
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_nothing_is_written_over(qwen3, copy, tmp_path):
    before = (copy / "model.safetensors").read_bytes()
    with pytest.raises(RequestError, match="not an empty folder; name a new one"):
        EagleHead(qwen3[0]).save(copy)
    assert (copy / "model.safetensors").read_bytes() == before
    head = EagleHead(qwen3[0])
    with torch.no_grad():
        head.join.weight[3, 4] = math.nan
    with pytest.raises(CheckpointError, match=r"fc\.weight is not finite"):
        head.save(tmp_path / "diverged")
    assert not (tmp_path / "diverged").exists()


# --- the gate ---


def test_a_loaded_head_changes_no_token(qwen3, head, saved):
    """In the engine and alone; it drafts what the head that was saved drafts."""
    config = SpeculativeConfig("eagle", 4, draft=saved, adaptive=False, sampled=False)
    engine = make_engine(qwen3, speculative=config)
    done = serve(engine, JOBS)
    assert all(answers(done[str(i)]) == expected(qwen3, *job) for i, job in enumerate(JOBS))
    (plain,), counts = alone(*qwen3, tuple(PROMPT), ANSWER), []
    for draft in (saved, head):
        speculator = make_speculator(SpeculativeConfig("eagle", 4, draft=draft, adaptive=False), *qwen3)
        assert generate(*qwen3, PROMPT, ANSWER, speculative=speculator).token_ids == plain.token_ids
        counts.append((speculator.stats.drafted, speculator.stats.accepted))
    assert counts[0] == counts[1]
    assert engine.speculation.stats.accepted > 5
    assert counts[0][1] > 5


def test_the_target_in_fewer_bits_is_the_same_target(saved, tmp_path):
    """Layouts that round the weights keep the final norm, but for its own rounding to 16 bits."""
    tiny.save("qwen3", tmp_path)
    placed, rounded = (checkpoint.load_model(tmp_path, "float32") for _ in range(2))
    placed.place("cpu", torch.bfloat16)
    quantize_(rounded, "int8")
    for model in (placed, rounded):
        EagleHead.load(saved, model)


def test_a_rotated_target_is_another(saved, tmp_path):
    """It computes the same logits from hidden states that no head of the plain one has ever seen."""
    tiny.save("qwen3", tmp_path)
    model = checkpoint.load_model(tmp_path, "float32")
    quantize_(model, "hadamard-int8")
    with pytest.raises(EngineError, match="with the target's own --quantize"):
        EagleHead.load(saved, model)


# --- what is refused ---


def test_a_head_of_another_model_names_both_and_the_remedy(saved, tmp_path):
    for name, changes, words in (
        ("llama", {}, "a llama of 3 layers"),
        ("qwen3", {"num_hidden_layers": 2}, "a qwen3 of 2 layers, 48 wide, 320 tokens"),
        ("qwen3", {"vocab_size": 330}, "330 tokens"),
        ("qwen3", {"hidden_size": 60}, "60 wide"),
        ("qwen3", {"seed": 7}, "of the same shape with other weights"),
    ):
        tiny.make(name, **changes).save_pretrained(tmp_path / str(words))
        model = checkpoint.load_model(tmp_path / str(words))
        with pytest.raises(EngineError) as error:
            EagleHead.load(saved, model)
        message = str(error.value)
        assert f"{saved}: a head for the tiny one, a qwen3 of 3 layers, 48 wide, 320 tokens; the target is" in message
        assert words in message.partition("the target is")[2]
        assert "python -m minillm train_eagle" in message


@pytest.mark.parametrize("family", ["deepseek", "qwen3-next", "mixtral"])
def test_a_target_that_can_have_none(saved, tmp_path, family):
    tiny.make(family).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=r"has a plain block.* speculate with ngram, draft or early_exit"):
        EagleHead.load(saved, checkpoint.load_model(tmp_path))


def rewrite(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def cut(folder) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def describe(**changes):
    def change(folder) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


O_PROJ, FC = "layers.0.self_attn.o_proj.weight", "fc.weight"
DAMAGE = {
    "half a file": (cut, "not a whole safetensors file"),
    "nonsense": (lambda f: (f / "model.safetensors").write_bytes(b"nonsense"), "not a whole safetensors file"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no such file; copy the whole folder"),
    "a folder as weights": (
        lambda f: ((f / "model.safetensors").unlink(), (f / "model.safetensors").mkdir()),
        "not a whole safetensors file",
    ),
    "a tensor missing": (lambda f: rewrite(f, lambda t: t.pop(O_PROJ)), f"tensor {O_PROJ} is missing"),
    "a tensor too many": (lambda f: rewrite(f, lambda t: t.update(x=t[FC].clone())), "tensor x is no part of a head"),
    "a wrong shape": (
        lambda f: rewrite(f, lambda t: t.update({FC: t[FC][:, :90].clone()})),
        r"fc\.weight has shape \(48, 90\), a head of this target \(48, 96\)",
    ),
    "no numbers": (lambda f: rewrite(f, lambda t: t[FC].fill_(math.nan)), "fc.weight holds numbers that are"),
    "infinite": (lambda f: rewrite(f, lambda t: t[O_PROJ][0].fill_(math.inf)), f"{O_PROJ} holds numbers that are not"),
    "whole numbers": (lambda f: rewrite(f, lambda t: t.update({FC: t[FC].to(torch.int32)})), "is stored as I32"),
    "no description": (lambda f: (f / "config.json").unlink(), "holds no config.json; give the folder of an EAGLE"),
    "half a description": (lambda f: (f / "config.json").write_text('{"model_type"'), "config.json cannot be read"),
    "bytes": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), "config.json cannot be read"),
    "a list": (lambda f: (f / "config.json").write_text("[]"), "model_type None, which is no EAGLE head of minillm"),
    "a model": (describe(model_type="qwen3"), "model_type 'qwen3', which is no EAGLE head of minillm"),
    "no target": (describe(target=None), "does not say which model"),
    "a target of words": (describe(target={"final_norm": ["a"]}), "does not say which model"),
    "a target of nothing": (describe(target={"final_norm": []}), "a head for a None of None layers"),
    "a target beyond numbers": (describe(target={"final_norm": [10**400]}), "does not say which model"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_clear_error(qwen3, copy, name):
    damage, message = DAMAGE[name]
    damage(copy)
    with pytest.raises(MinillmError, match=message) as error:
        EagleHead.load(copy, qwen3[0])
    assert "\n" not in str(error.value)
    assert str(copy) in str(error.value)


def test_sixteen_bits_are_read(qwen3, head, copy):
    """Whoever shrinks the file rounds the weights; they are read as they are."""
    rewrite(copy, lambda t: t.update({name: tensor.to(torch.bfloat16) for name, tensor in t.items()}))
    found, whole = EagleHead.load(copy, qwen3[0]).tensors(), head.tensors()
    assert all(torch.equal(t, whole[name].to(torch.bfloat16).float()) for name, t in found.items())


@pytest.mark.parametrize(
    ("right", "wrong", "name"),
    [
        ("if not tensor.isfinite().all():", "if False:", "no numbers"),
        ("!= shape:", "== ():", "a wrong shape"),
        ("not in _FLOATS:", "is None:", "whole numbers"),
        ("if surplus := sorted(names - set(shapes)):", "if surplus := []:", "a tensor too many"),
    ],
)
def test_an_unchecked_file_is_caught(qwen3, copy, monkeypatch, right, wrong, name):
    source = planted(eagle_file, right, wrong)
    monkeypatch.setattr(eagle, "eagle_file", source)
    damage, message = DAMAGE[name]
    damage(copy)
    with (
        pytest.raises((pytest.fail.Exception, AssertionError, RuntimeError)),
        pytest.raises(MinillmError, match=message),
    ):
        EagleHead.load(copy, qwen3[0])
