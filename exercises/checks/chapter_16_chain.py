"""Chapter 16's prompt lookup and greedy verification: held against strings, and against decoding token by token."""

from __future__ import annotations

import random

import torch

from exercises import Exercise, Judge, Mistake

# --- look_up


def by_strings(tokens: list, longest: int, shortest: int, count: int) -> list:
    """A letter for each token; Python's own search from the right."""
    text = "".join(chr(0x4E00 + token) for token in tokens)
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        at = text[:-1].rfind(text[-n:])
        if at >= 0:
            return [ord(letter) - 0x4E00 for letter in text[at + n : at + n + count]]
    return []


def looked_up(look_up, judge: Judge, tokens: list, hint: str, longest=3, shortest=1, count=4) -> None:
    got = look_up(tokens, longest, shortest, count)
    judge.type(got, list)
    want = by_strings(tokens, longest, shortest, count)
    judge.equal(got, want, f"for look_up({tokens}, {longest}, {shortest}, {count}). Likely mistake: {hint}")


def what_followed(look_up, judge: Judge) -> None:
    hint = "the copy begins at the match, not after it; or the tokens at the end were found in their own place."
    looked_up(look_up, judge, [5, 6, 7, 8, 9, 5, 6], hint, longest=2, shortest=2, count=2)
    looked_up(look_up, judge, [5, 6, 7, 8, 9, 5, 6], hint, longest=2, shortest=2, count=3)


def nothing_to_find(look_up, judge: Judge) -> None:
    looked_up(look_up, judge, [1, 2, 3, 4], "no earlier place means no drafts: an empty list.")
    looked_up(look_up, judge, [7], "one token has nothing before it.")
    looked_up(look_up, judge, [1, 2, 9, 2], "fewer than `shortest` tokens alike are no match.", longest=3, shortest=2)


def latest_place(look_up, judge: Judge) -> None:
    hint = "the first place was taken; the latest is the better guess."
    looked_up(look_up, judge, [1, 2, 3, 1, 2, 4, 1, 2], hint, longest=2, shortest=2, count=1)


def longest_first(look_up, judge: Judge) -> None:
    hint = "a shorter match was taken although a longer one exists."
    looked_up(look_up, judge, [1, 2, 3, 8, 9, 3, 7, 1, 2, 3], hint, count=2)


def overlaps_and_ends(look_up, judge: Judge) -> None:
    hint = "an earlier place may overlap the end, and the drafts stop where the tokens do."
    looked_up(look_up, judge, [4, 4, 4, 4], hint)
    looked_up(look_up, judge, [1, 2, 1, 2, 1, 2], hint, longest=4, shortest=2, count=9)


def many(look_up, judge: Judge) -> None:
    rng = random.Random(3)
    for _ in range(60):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 25))]
        looked_up(look_up, judge, tokens, "see above.", rng.randrange(2, 5), rng.randrange(1, 3), rng.randrange(1, 6))


LOOK_UP = Exercise(
    name="look_up",
    title="Prompt lookup",
    chapter="16",
    difficulty=2,
    minutes=20,
    checks=[what_followed, nothing_to_find, latest_place, longest_first, overlaps_and_ends, many],
    mistakes=[
        Mistake(
            "copies the match too", "what_followed", edit=("tokens[end : end + count]", "tokens[end - n : end + count]")
        ),
        Mistake("off by one", "what_followed", edit=("tokens[end : end + count]", "tokens[end + 1 : end + 1 + count]")),
        Mistake(
            "finds itself", "what_followed", edit=("range(len(tokens) - 1, n - 1, -1)", "range(len(tokens), n - 1, -1)")
        ),
        Mistake("first place", "latest_place", edit=("range(len(tokens) - 1, n - 1, -1)", "range(n, len(tokens))")),
        Mistake(
            "shortest first",
            "longest_first",
            edit=(
                "range(min(longest, len(tokens) - 1), shortest - 1, -1)",
                "range(shortest, min(longest, len(tokens) - 1) + 1)",
            ),
        ),
        Mistake("one token is enough", "nothing_to_find", edit=("shortest - 1, -1", "0, -1")),
        Mistake(
            "no overlap",
            "overlaps_and_ends",
            edit=("range(len(tokens) - 1, n - 1, -1)", "range(len(tokens) - n, n - 1, -1)"),
        ),
        Mistake("all that followed", "what_followed", edit=("tokens[end : end + count]", "tokens[end:]")),
    ],
    forbids=("minillm.speculative",),
)


# --- verify_greedy


def one_at_a_time(drafts: list, logits: torch.Tensor) -> tuple[list, int]:
    """Plain decoding, for as long as the rows at hand are those that it would see."""
    tokens: list = []
    while len(tokens) <= len(drafts) and tokens == drafts[: len(tokens)]:
        tokens.append(max(range(logits.shape[1]), key=logits[len(tokens)].tolist().__getitem__))
    return tokens, len(tokens)


def rows_for(choices: list, vocabulary: int = 12) -> torch.Tensor:
    """Logits whose largest is at each choice."""
    logits = torch.randn(len(choices), vocabulary, generator=torch.Generator().manual_seed(len(choices)))
    for row, choice in enumerate(choices):
        logits[row, choice] = 9.0
    return logits


def verified(verify_greedy, judge: Judge, drafts: list, choices: list, hint: str, keys: str = "see above.") -> None:
    got = verify_greedy(drafts, rows_for(choices))
    judge.type(got, tuple)
    judge.true(len(got) == 2, "Return the pair (tokens, valid).")
    tokens, valid = one_at_a_time(drafts, rows_for(choices))
    where = f"drafts {drafts}, the target's choices {choices}"
    judge.equal(got[0], tokens, f"for {where}. Likely mistake: {hint}")
    judge.true(
        all(type(token) is int for token in got[0]), "The tokens must be ints. Likely mistake: rows of a tensor."
    )
    judge.equal(got[1], valid, f"rows whose keys are valid, for {where}. Likely mistake: {keys}")


def all_kept(verify_greedy, judge: Judge) -> None:
    hint = "the bonus token left out: the row after the last draft is computed anyway."
    keys = "the last known token and each kept draft have valid keys; the bonus token was not an input."
    verified(verify_greedy, judge, [3, 1, 4], [3, 1, 4, 7], hint, keys)


def first_refusal_ends_it(verify_greedy, judge: Judge) -> None:
    hint = "what replaces the refused draft is the target's choice in the same row, and it ends the step."
    verified(verify_greedy, judge, [3, 1, 4], [3, 2, 8, 7], hint, "a refused draft's keys are stale.")
    verified(verify_greedy, judge, [3, 1, 4], [5, 2, 8, 7], hint, "a refused draft's keys are stale.")


def agreement_by_chance(verify_greedy, judge: Judge) -> None:
    hint = "drafts behind a refusal were guessed after another token; that they agree again means nothing."
    verified(verify_greedy, judge, [3, 1, 4, 5], [3, 2, 4, 5, 7], hint)


def no_drafts_at_all(verify_greedy, judge: Judge) -> None:
    verified(verify_greedy, judge, [], [6], "without drafts the step is plain decoding: one token, one row.")


VERIFY = Exercise(
    name="verify_greedy",
    title="Verify a chain",
    chapter="16",
    difficulty=2,
    minutes=20,
    checks=[all_kept, first_refusal_ends_it, agreement_by_chance, no_drafts_at_all],
    mistakes=[
        Mistake("no bonus", "all_kept", edit=("choices[: kept + 1]", "choices[: min(kept + 1, len(drafts))]")),
        Mistake("tensors for tokens", "all_kept", edit=("argmax(-1).tolist()", "argmax(-1).unbind()")),
        Mistake("rows shifted", "all_kept", edit=("choices[kept]", "choices[kept + 1]")),
        Mistake("the bonus has keys", "all_kept", edit=("], kept + 1", "], kept + 2")),
        Mistake(
            "refused draft stays",
            "first_refusal_ends_it",
            edit=("choices[: kept + 1]", "[*drafts[: kept + 1], choices[-1]]"),
        ),
        Mistake(
            "a stale key",
            "first_refusal_ends_it",
            edit=("choices[: kept + 1], kept + 1", "choices[: kept + 1], len(drafts) + 1"),
        ),
        Mistake(
            "a row too late",
            "first_refusal_ends_it",
            edit=("choices[: kept + 1]", "[*choices[:kept], choices[min(kept + 1, len(drafts))]]"),
        ),
        Mistake(
            "counts agreements",
            "agreement_by_chance",
            source="def verify_greedy(drafts, logits):\n    choices = logits.argmax(-1).tolist()\n"
            "    same = [a == b for a, b in zip(drafts, choices)]\n"
            "    kept = sum(same) if same[:1] == [True] else 0\n    return choices[: kept + 1], kept + 1\n",
        ),
        Mistake("needs a draft", "no_drafts_at_all", edit=("    kept = 0\n", "    kept = 0\n    drafts[0]\n")),
    ],
    forbids=("minillm.speculative",),
)
