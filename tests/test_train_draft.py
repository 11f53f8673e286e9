"""Promise: a draft is a function of its recipe, an interrupted run gives the same one, and what is exported is what
learned."""

from __future__ import annotations

import errno
import random
from dataclasses import replace
from itertools import islice

import pytest
import torch
from safetensors.torch import load_file

from minillm import checkpoint
from minillm.config import ModelConfig
from minillm.errors import CheckpointError, MinillmError, RequestError
from minillm.fetch import DRAFT_FOLDER
from minillm.kv_cache import NoCache
from minillm.tokenizer import Tokenizer
from minillm.train_draft import __main__ as command
from minillm.train_draft import evaluation, pipeline, prompts, sampling_stage
from minillm.train_draft.batches import batches, collate, order, split
from minillm.train_draft.export import write_weights
from minillm.train_draft.loss import head_loss, vocabulary_part
from minillm.train_draft.projection import project_embedding
from minillm.train_draft.recipe import MINUTES, Recipe, SamplingRecipe, fingerprint
from minillm.train_draft.sampling_stage import Sampler, sample_texts
from minillm.train_draft.student import exported, fresh_tensors, hidden_states, trainable
from minillm.train_draft.training_stage import train
from minillm.transformer import from_tensors
from tests import tiny

SAMPLING = SamplingRecipe(
    requests=16, kinds=(("text", 0.8), ("free", 0.2)), answer_tokens=20, top_k=8, temperatures=((0.0, 0.5), (1.0, 0.5))
)
RECIPE = Recipe(
    sampling=SAMPLING, tokens=400, hidden_size=16, intermediate_size=24, layers=2, heads=2, sliding_window=8, steps=12,
    batch_tokens=80, others=64, warmup=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """(folder, model, tokenizer) of a tiny random target."""
    folder = tmp_path_factory.mktemp("target")
    tiny.save("llama", folder)
    return folder, *checkpoint.load(folder, "float32")


@pytest.fixture(scope="module")
def texts(target, tmp_path_factory):
    _, model, tokenizer = target
    folder = tmp_path_factory.mktemp("texts")
    return list(sample_texts(Sampler(model, tokenizer, SAMPLING), folder, RECIPE.tokens, progress=False))


@pytest.fixture(scope="module")
def examples(texts):
    return [example for part in texts for example in split(part)]


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def trained(target, examples, recipe=RECIPE, path=None, tmp_path=None):
    trainer = pipeline.start(target[1], "target", examples, recipe)
    train(trainer, examples, path or tmp_path / "state.safetensors", progress=False)
    return trainer


# the target writes


def test_a_round_depends_on_recipe_and_number_alone(target):
    _, model, tokenizer = target
    once, again = (Sampler(model, tokenizer, SAMPLING) for _ in range(2))
    first = once.round(0)
    again.round(1)  # what came before changes nothing
    assert same(first, again.round(0))
    others = [once.round(1), Sampler(model, tokenizer, replace(SAMPLING, seed=1)).round(0),
              Sampler(model, tokenizer, replace(SAMPLING, held_out=True)).round(0)]  # fmt: skip
    assert not any(torch.equal(first.tokens, other.tokens) for other in others)


def test_texts_hold_what_the_target_thinks(target, texts):
    """Candidates against a forward pass of our own; greedy answers are the first candidate at every position."""
    _, model, tokenizer = target
    for example, start, temperature in zip(split(texts[0]), texts[0].starts, texts[0].temperature, strict=True):
        tokens = example.tokens.long()
        with torch.inference_mode():
            logits = model.logits(model(tokens, torch.arange(len(tokens)), NoCache(model.config)))[start - 1 :]
        logits = logits[:, : tokenizer.vocab_size]
        wanted = logits.log_softmax(-1).gather(1, example.ids.long())
        torch.testing.assert_close(example.logprobs.float(), wanted, rtol=1e-3, atol=1e-2)
        assert torch.equal(example.ids[:, 0].long(), logits.argmax(-1))
        if temperature == 0:
            assert torch.equal(example.ids[:-1, 0].long(), tokens[start:])


def test_an_interrupted_sampling_goes_on(target, tmp_path, texts, monkeypatch):
    _, model, tokenizer = target
    sampler = Sampler(model, tokenizer, SAMPLING)
    parts = sample_texts(sampler, tmp_path, RECIPE.tokens, progress=False)
    next(parts)
    parts.close()
    made = []
    monkeypatch.setattr(sampler, "round", lambda index: made.append(index) or Sampler.round(sampler, index))
    again = list(sample_texts(sampler, tmp_path, RECIPE.tokens, progress=False))
    assert made == list(range(1, len(texts)))
    assert all(same(a, b) for a, b in zip(texts, again, strict=True))


def test_training_and_held_out_prompts_share_nothing():
    for mine, held in zip(prompts.TRAIN, prompts.HELD_OUT, strict=True):
        assert len(set(mine)) == len(mine)
        assert not {text.lower() for text in mine} & {text.lower() for text in held}


def test_chat_prompts_are_those_of_the_template(smollm2_gguf_fields):
    tokenizer = Tokenizer.from_gguf(smollm2_gguf_fields)
    maker = prompts.PromptMaker(tokenizer, prompts.Words(("Why {}?",), ("{} is",), ("tea", "tea")), 0)
    chat, own = maker.draw("chat", random.Random(0)), maker.draw("self", random.Random(0))
    assert chat.ids == tokenizer.encode_chat([{"role": "user", "content": "Why tea?"}])
    assert own.asks
    assert own.ids + tokenizer.encode("Why tea?") + maker.after == chat.ids
    assert tokenizer.decode(maker.draw("text", random.Random(0)).ids) == "tea is"


# batches


def test_every_text_is_in_each_epoch_once():
    lengths = [random.Random(i).randint(3, 60) for i in range(1200)]
    found = order(lengths, 400, seed=3, epoch=1)
    assert sorted(i for batch in found for i in batch) == list(range(1200))
    assert all(400 <= sum(lengths[i] for i in batch) < 460 for batch in found if sum(lengths[i] for i in batch) >= 400)
    assert sum(sum(lengths[i] for i in batch) < 400 for batch in found) <= 3  # the last of each window
    assert found == order(lengths, 400, seed=3, epoch=1)
    assert found != order(lengths, 400, seed=3, epoch=2)
    assert found != order(lengths, 400, seed=4, epoch=1)


def test_a_batch_counts_the_answers_alone(texts, examples):
    batch = collate(examples[:3])
    real = batch.real.view(batch.tokens.shape)
    for row, tokens, start in zip(real, examples[:3], texts[0].starts, strict=False):
        assert row.nonzero().squeeze(-1).tolist() == list(range(start - 1, len(tokens.tokens)))
    assert len(batch.ids) == real.sum()
    torch.testing.assert_close(batch.probs.sum(-1), torch.ones(len(batch.probs)))


# loss


def reference_loss(hidden, embedding, ids, probs):
    return -(probs * (hidden @ embedding.t()).log_softmax(-1).gather(1, ids)).sum(-1).mean()


def loss_inputs():
    torch.manual_seed(0)
    hidden, embedding = torch.randn(40, 16).bfloat16().float(), torch.randn(300, 16).bfloat16().float()
    ids = torch.stack([torch.randperm(300)[:5] for _ in range(40)])
    return hidden.requires_grad_(), embedding.requires_grad_(), ids, torch.randn(40, 5).softmax(-1)


def test_loss_and_gradients_against_plain_cross_entropy():
    hidden, embedding, ids, probs = loss_inputs()
    wanted = torch.autograd.grad(reference_loss(hidden, embedding, ids, probs) * 3, (hidden, embedding))
    part = vocabulary_part(ids, 300, 300, seed=0)
    assert torch.equal(part.ids, torch.arange(300))
    loss = head_loss(hidden, embedding, ids, probs, part)
    torch.testing.assert_close(loss, reference_loss(hidden, embedding, ids, probs), rtol=0.01, atol=0)
    for found, right in zip(torch.autograd.grad(loss * 3, (hidden, embedding)), wanted, strict=True):
        assert (found - right).norm() < 0.02 * right.norm()


def test_a_part_of_the_vocabulary_stands_for_all_of_it():
    hidden, embedding, ids, _ = loss_inputs()
    ids = ids[:4]
    exact = (hidden[0] @ embedding.t()).exp().sum()
    estimates = []
    for seed in range(4000):
        part = vocabulary_part(ids, 300, 40, seed)
        assert len(part.ids) == 40 + len(ids.unique())
        estimates.append((hidden[0] @ embedding[part.ids].t() + part.log_weight).exp().sum())
    estimates = torch.stack(estimates)
    assert abs(estimates.mean() - exact) < 4 * estimates.std() / 4000**0.5


# the draft


def test_projection_is_exact_where_nothing_is_lost_and_best_where_something_is():
    torch.manual_seed(0)
    head, basis = torch.randn(200, 24), torch.randn(24, 24) * torch.linspace(2, 0.05, 24)
    hidden = torch.randn(500, 24) @ basis.t()
    logits = hidden @ head.t()

    def error(dim: int, small) -> float:
        """Mean KL of the best logits that some state of `dim` numbers gives."""
        z = torch.linalg.lstsq(small, logits.t()).solution
        log_p, log_q = logits.log_softmax(-1), (small @ z).t().log_softmax(-1)
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()

    assert error(24, project_embedding(head, hidden, 24)) < 1e-4
    found = error(10, project_embedding(head, hidden, 10))
    assert found < 0.7 * error(10, head[:, :10])
    assert found < 0.7 * error(10, head @ torch.randn(24, 10))


def draft_config(**changes):
    raw = replace(RECIPE, **changes).config(ModelConfig.from_dict({**tiny.SHAPE, "model_type": "llama"}), "target")
    return ModelConfig.from_dict(raw)


@pytest.mark.parametrize("window", [4, 512])
def test_a_padded_batch_is_each_text_alone(window):
    config = draft_config(sliding_window=window)
    tensors = fresh_tensors(config, torch.randn(config.vocab_size, 16), seed=0)
    model, plain = trainable(config, tensors), from_tensors(config, tensors)
    texts = [torch.arange(n) + 7 for n in (11, 3, 8)]
    tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    found = hidden_states(model, tokens).view(3, 11, -1)
    for row, text in zip(found, texts, strict=True):
        with torch.inference_mode():
            wanted = plain.final_norm(plain(text, torch.arange(len(text)), NoCache(config)))
        torch.testing.assert_close(row[: len(text)], wanted)


def test_what_learns_is_what_is_exported(target, examples, tmp_path):
    trainer = trained(target, examples, tmp_path=tmp_path)
    tensors = exported(trainer.model)
    again = exported(trainable(trainer.model.config, tensors))
    assert tensors.keys() == again.keys()
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
    write_weights(trainer, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(stored[name], tensors[name].half()) for name in tensors)
    loaded = checkpoint.load_model(tmp_path / "out")
    plain = from_tensors(loaded.config, {name: tensor.half().float() for name, tensor in tensors.items()})
    tokens, at = examples[0].tokens.long(), torch.arange(len(examples[0].tokens))
    with torch.inference_mode():
        states = [model(tokens, at, NoCache(loaded.config)) for model in (loaded, plain)]
        assert torch.equal(loaded.logits(states[0]), plain.logits(states[1]))
        learned = hidden_states(trainer.model, tokens[None])
    torch.testing.assert_close(loaded.final_norm(states[0]), learned, rtol=0.02, atol=0.02)


def test_weights_that_float16_cannot_hold_are_refused(target, examples, tmp_path):
    trainer = pipeline.start(target[1], "target", examples, RECIPE)
    for bad in (1e5, float("nan")):
        trainer.model.embedding.data[3, 3] = bad
        with pytest.raises(CheckpointError, match="embed_tokens"):
            write_weights(trainer, tmp_path)
    assert not list(tmp_path.iterdir())


# training


def test_loss_falls_and_the_embedding_helps(target, examples, tmp_path):
    recipe = replace(RECIPE, steps=150, learning_rate=1e-2, embedding_learning_rate=1e-2)
    trainer = trained(target, examples, recipe, tmp_path=tmp_path)
    first, *_, last = [loss for *_, loss in trainer.curve]
    assert last < 0.8 * first
    assert trainer.curve[-1][:2] == (150, trainer.tokens)


@pytest.mark.parametrize("stop", [1, 5, 11])
def test_a_resumed_run_is_an_uninterrupted_one(target, examples, tmp_path, monkeypatch, stop):
    monkeypatch.setattr("minillm.train_draft.training_stage.SAVE_EVERY", 1)
    whole = trained(target, examples, path=tmp_path / "whole")
    part = pipeline.start(target[1], "target", examples, RECIPE)
    for indices in islice(batches(examples, RECIPE.batch_tokens, 0), stop):
        part.step(collate([examples[i] for i in indices]))
    part.save(tmp_path / "part")
    resumed = trained(target, examples, path=tmp_path / "part")
    assert resumed.steps == whole.steps
    assert resumed.tokens == whole.tokens
    assert [point[0] for point in resumed.curve] == [point[0] for point in whole.curve]
    assert [point[-1] for point in resumed.curve] == [point[-1] for point in whole.curve]
    a, b = exported(whole.model), exported(resumed.model)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_seeds_give_other_weights_and_equal_seeds_equal_ones(target, examples, tmp_path):
    other = replace(RECIPE, sampling=replace(SAMPLING, seed=1))
    a, b, c = (
        exported(trained(target, examples, recipe, path=tmp_path / name).model)
        for name, recipe in (("a", RECIPE), ("b", RECIPE), ("c", other))
    )
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["model.layers.0.mlp.up_proj.weight"], c["model.layers.0.mlp.up_proj.weight"])


def test_a_state_of_another_run_or_half_a_file_is_refused(target, examples, tmp_path):
    path = tmp_path / "state.safetensors"
    trained(target, examples, path=path)
    with pytest.raises(RequestError, match="was made by recipe"):
        trained(target, examples, replace(RECIPE, learning_rate=1e-4), path=path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="not a whole training state"):
        trained(target, examples, path=path)
    shard = sampling_stage.shard_path(tmp_path, SAMPLING, 0)
    shard.write_bytes(b"no text")
    with pytest.raises(CheckpointError, match="not a whole file of texts"):
        sampling_stage.read_shard(shard, SAMPLING)


def test_scaling_keeps_the_rest():
    half = Recipe().scaled(MINUTES / 2)
    assert (half.steps, half.tokens) == (Recipe().steps // 2, Recipe().tokens // 2)
    assert fingerprint(half.sampling) == fingerprint(Recipe().sampling)
    assert fingerprint(half) != fingerprint(Recipe())
    for minutes in (0, -1, float("nan"), float("inf")):
        with pytest.raises(MinillmError, match="minutes"):
            Recipe().scaled(minutes)


# evaluation


def test_a_model_accepts_itself(target, texts):
    found = evaluation.acceptance(target[1], target[1], texts[0])
    assert found.greedy == 1
    assert found.sampled == pytest.approx(1, abs=1e-5)
    assert min(found.positions) > 0


def test_steps_of_a_greedy_verification():
    same = [True, True, False, True, True, True, False]
    assert evaluation._steps(same, 2) == [3, 3, 1]  # the target's own token stands where the first run ended
    assert evaluation._steps(same, 8) == [3, 4]
    assert evaluation._steps([False] * 3, 4) == [1, 1, 1]
    assert evaluation._steps([True] * 3, 4) == [3]  # nothing follows the end


def test_speed_up_against_a_simulation():
    alpha, gamma, cost, generator = 0.7, 3, 0.1, random.Random(0)
    tokens = 0
    for _ in range(100_000):
        run = 0
        while run < gamma and generator.random() < alpha:
            run += 1
        tokens += run + 1
    wanted = tokens / 100_000 / (1 + gamma * cost)
    assert evaluation.speed_up(alpha, gamma, cost) == pytest.approx(wanted, rel=0.01)
    assert evaluation.best_speed_up(0.01, 0.5) == (0, 1.0)


# the command


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr("minillm.train_draft.recipe.Recipe", lambda: RECIPE)


def test_the_command_makes_a_draft(target, tmp_path, small, capsys):
    options = ["--model", str(target[0]), "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    assert command.main(options) == 0
    card = capsys.readouterr().out
    assert "12 steps of AdamW" in card
    model, tokenizer = checkpoint.load(tmp_path / "out", "float32")
    assert tokenizer.vocab_size == target[2].vocab_size
    assert model.config.vocab_size == target[1].config.vocab_size
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert command.main(options) == 0  # all of it is there
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_bad_input_and_a_full_disk_are_one_line(target, tmp_path, small, capsys, monkeypatch):
    options = ["--model", str(target[0]), "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]

    def full(path, write):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    cases = [(["--minutes", "0"], "minutes is 0"), (["--model", str(tmp_path / "none.gguf")], "no such file")]
    for extra, wanted in cases:
        assert command.main([*options, *extra]) == 2
        assert wanted in capsys.readouterr().err
    monkeypatch.setattr(sampling_stage, "write_atomically", full)
    assert command.main(options) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("minillm: error:")
    assert "No space left" in error


# what comes with the package


def test_the_shipped_draft():
    assert (DRAFT_FOLDER / "model.safetensors").stat().st_size <= 20_000_000
    draft, tokenizer = checkpoint.load("smollm2-draft", "float32")
    target, own = checkpoint.load(None, "float32")
    assert tokenizer.vocab_size == own.vocab_size
    assert draft.config.vocab_size == target.config.vocab_size
    assert same(draft.parameters(), checkpoint.load_draft("float32").parameters())
