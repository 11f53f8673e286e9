"""`python -m minillm train_eagle`: an EAGLE head for a model, from what the model writes."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import RequestError, short
from ..storage import new_folder, user_path
from . import common

if TYPE_CHECKING:
    from ..speculative import EagleHead
    from ..tokenizer import Tokenizer
    from ..transformer import Transformer

EXAMPLES = """
python -m minillm train_eagle --out smollm2-head
python -m minillm train_eagle --out head --model path/to/model --text notes.txt --steps 800
"""
EVERY = 8  # one prompt in so many is held out
PASSAGE = 16  # tokens of a --text that the model goes on from
_TOGETHER = 32  # answers that are written at once
_MOST = 100_000  # --steps, --texts


def add_parser(commands) -> None:
    parser = common.add_command(
        commands,
        "train_eagle",
        run,
        "make a head that guesses ahead, for --speculate eagle",
        EXAMPLES,
        description="The model answers short prompts, a head learns to continue the model's hidden states over these "
        "answers, and is written to a folder that --speculate eagle --draft FOLDER takes with this model. It says at "
        "the end how often the head's first guess was the model's first choice, on answers that it has not seen: for "
        "SmolLM2 16%, and 20% with --texts 384 --steps 1200. Heads in use have read far more.",
    )
    parser.add_argument("--out", metavar="FOLDER", required=True, help="a folder that is new or empty")
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="of training, a text each (default: 400)")
    parser.add_argument("--texts", type=int, default=128, metavar="N", help="that the model writes (default: 128)")
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="of an answer, at most (default: 96)")
    parser.add_argument(
        "--text", metavar="FILE", help="UTF-8 text whose passages are the prompts (default: questions and openings)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of texts and weights (default: 0)")
    common.add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    folder = new_folder(args.out, "--out")
    for name, least in (("steps", 1), ("texts", EVERY), ("tokens", 2)):
        if not least <= (value := getattr(args, name)) <= _MOST:
            raise RequestError(f"--{name} is {value}; it must be a whole number from {least} to {_MOST}")
    text = None if args.text is None else _read(args.text)
    common.refuse_compile(args, "trains on float32 operators")
    model, tokenizer = common.load(args)
    from ..speculative import EagleHead

    head = EagleHead(model, args.seed)  # a target that can have none is told before it writes
    generator = random.Random(args.seed)
    prompts = (
        from_templates(tokenizer, args.texts, generator)
        if text is None
        else passages(tokenizer.encode(text), args.texts, generator)
    )
    texts = answers(model, tokenizer, prompts, args.tokens, generator)
    losses = _train(head, [t for i, t in enumerate(texts) if i % EVERY], args.steps, args.seed)
    found, positions = first_guesses(head, texts[::EVERY], [len(prompt) for prompt in prompts[::EVERY]])
    size = head.save(folder, common.model_name(args.model))
    print(
        f"{folder}: {common.size_text(size)}, loss {losses[0]:.3f} to {losses[-1]:.3f}; the first guess is the model's "
        f"first choice at {found:.0%} of {positions} places of {len(texts[::EVERY])} answers not trained on"
    )
    return 0


def _read(path: str) -> str:
    try:
        return user_path(path, "--text").read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"--text {short(path, 200)} is not UTF-8 ({error.reason}); convert it first") from None


def from_templates(tokenizer: Tokenizer, count: int, generator: random.Random) -> list[list[int]]:
    """`count` prompts: questions in the chat template, if the model has one, and beginnings of documents. Every
    EVERY-th is of other templates and topics."""
    from ..train_draft.prompts import HELD_OUT, TRAIN, PromptMaker

    kinds = ("chat", "text") if tokenizer.vocabulary.chat_template else ("text",)
    makers = [PromptMaker(tokenizer, words, 0) for words in (HELD_OUT, TRAIN)]
    return [makers[i % EVERY > 0].draw(generator.choice(kinds), generator).ids for i in range(count)]


def passages(ids: Sequence[int], count: int, generator: random.Random) -> list[list[int]]:
    """`count` beginnings of PASSAGE tokens, in order; every EVERY-th is of the text's last part, the others are not.
    Raises RequestError for a text that is too short to hold one out."""
    if len(ids) < EVERY * PASSAGE:
        raise RequestError(f"--text has {len(ids)} tokens; give at least {EVERY * PASSAGE}, or leave it out")
    split = len(ids) - len(ids) // EVERY
    starts = ((0, split - PASSAGE), (split, len(ids) - PASSAGE))
    found = (generator.randint(*starts[i % EVERY == 0]) for i in range(count))
    return [list(ids[start : start + PASSAGE]) for start in found]


def answers(
    model: Transformer, tokenizer: Tokenizer, prompts: Sequence[list[int]], tokens: int, generator: random.Random
) -> list[list[int]]:
    """Each prompt with what the model says to it: its likeliest words, or, by lot, some drawn at temperature 1."""
    from ..llm import LLM
    from ..sampling_params import SamplingParams

    longest = min(model.config.max_position_embeddings, max(map(len, prompts)) + tokens)
    llm = LLM(model, tokenizer, max_num_seqs=_TOGETHER, max_model_len=longest)
    params = [
        SamplingParams(temperature=generator.choice((0.0, 1.0)), max_tokens=tokens, seed=generator.getrandbits(62))
        for _ in prompts
    ]
    done = llm.generate(prompts, params, use_tqdm=True)
    return [prompt + out.outputs[0].token_ids for prompt, out in zip(prompts, done, strict=True)]


def _train(head: EagleHead, texts: Sequence[list[int]], steps: int, seed: int) -> list[float]:
    from tqdm import tqdm

    from ..speculative import train_eagle

    with tqdm(total=steps, unit="step") as bar:

        def told(step: int, loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update()

        return train_eagle(head, texts, steps, seed=seed, on_step=told)


def first_guesses(head: EagleHead, texts: Sequence[list[int]], starts: Sequence[int]) -> tuple[float, int]:
    """Share of places at which the head, given everything before it, guesses the model's likeliest token, and how many
    there are. Answer i begins at token starts[i]; before it nobody speculates, and a chat template is easily guessed.
    """
    import torch

    from ..kv_cache import NoCache
    from ..speculative import eagle

    target, same = head.target, []
    with torch.inference_mode():
        for text, start in zip(texts, starts, strict=True):
            hidden, tokens = eagle.features(target, text), torch.tensor(text[1:], device=target.device)
            positions = torch.arange(len(tokens), device=target.device)
            guessed = head(tokens, hidden[:-1], positions, NoCache(head.config))
            pairs = (guessed[start - 1 :], hidden[start:])  # what follows the answer's first token, and so on
            ours, theirs = (target.logits(h.to(target.dtype)).argmax(-1) for h in pairs)
            same.append(ours == theirs)
    every = torch.cat(same).float()
    return every.mean().item(), len(every)
