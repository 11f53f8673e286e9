"""Stop strings, stop ids and limits: the stream agrees with a definition that sees the whole text at once."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import stopping
from minillm.errors import RequestError
from minillm.sampling_params import SamplingParams
from minillm.stopping import StopChecker, find_stop, held_length

WORD = 7  # a token that ends nothing
EOS = 2


def run(checker, pieces, rest="", ids=None):
    """Feeds pieces until the checker ends; returns the texts emitted and how many tokens were taken."""
    emitted, taken = [], 0
    for token, piece in zip(ids or [WORD] * len(pieces), pieces, strict=True):
        step = checker.push(token, piece)
        emitted.append(step.text)
        taken += 1
        if step.finish_reason:
            break
    return [*emitted, checker.flush(rest).text], taken


def by_definition(text, stops, exempt, include):
    """One character at a time: the first position at which a stop string ends, longest first. (output, end, stop)."""
    for end in range(exempt + 1, len(text) + 1):
        for start in range(end):
            if text[start:end] in stops:
                return text[: end if include else start], end, text[start:end]
    return text, None, None


def check_against_definition(stops, pieces, min_tokens=0, include=False):
    params = SamplingParams(stop=stops, min_tokens=min_tokens, max_tokens=1000, include_stop_str_in_output=include)
    checker = StopChecker(params)
    emitted, taken = run(checker, pieces)
    exempt = len("".join(pieces[:min_tokens]))
    expected, end, stop = by_definition("".join(pieces), stops, exempt, include)
    lengths = list(itertools.accumulate(map(len, pieces)))
    steps = len(pieces) if end is None else next(i for i, n in enumerate(lengths) if n >= end) + 1
    so_far = list(itertools.accumulate(emitted))
    assert so_far[-1] == expected
    assert all(expected.startswith(text) for text in so_far)
    assert taken == steps
    assert (checker.finish_reason, checker.stop_reason) == ((None, None) if stop is None else ("stop", stop))
    for shown, n in zip(so_far, lengths[: steps - 1], strict=False):  # and no more was held than had to be
        held = "".join(pieces)[len(shown) : n]
        assert not held or any(s.startswith(held) and s != held for s in stops)


words = st.text("ab", min_size=1, max_size=4)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(words, max_size=4),
    st.lists(st.text("abc", max_size=5), max_size=12),
    st.integers(0, 4),
    st.booleans(),
)
def test_any_stops_any_segmentation(stops, pieces, min_tokens, include):
    check_against_definition(stops, pieces, min_tokens, include)


@settings(max_examples=100, deadline=None)
@given(st.text(min_size=1, max_size=3), st.lists(st.text(max_size=4), max_size=8))
def test_any_unicode(stop, pieces):
    check_against_definition([stop], [*pieces, stop[:1], stop[1:]])


STOP_LISTS = (["a"], ["ab"], ["aab"], ["abab"], ["ab", "b"], ["abba", "bb"], ["aba", "ab"], ["bbb", "ba", "aaa"])


def exhaustive():
    """Every text of up to five letters in every segmentation, against each list of stops."""
    for n, stops in itertools.product(range(6), STOP_LISTS):
        for letters, cuts in itertools.product(
            itertools.product("ab", repeat=n), itertools.product((0, 1), repeat=max(n - 1, 0))
        ):
            pieces = [""]
            for letter, cut in zip(letters, (0, *cuts), strict=False):
                pieces = [*pieces, letter] if cut else [*pieces[:-1], pieces[-1] + letter]
            check_against_definition(stops, pieces)


def test_every_short_text_in_every_segmentation():
    exhaustive()


def _nothing_held(text, stops):
    return 0


def _shortest_tail(text, stops):
    tails = (text[-n:] for n in range(1, len(text) + 1))
    return next((len(t) for t in tails if any(s.startswith(t) and s != t for s in stops)), 0)


def _earliest_begin(text, stops, exempt=0):
    found = [stopping.Match(text.find(s), text.find(s) + len(s), s) for s in stops if s in text]
    return min(found, default=None)


def _first_listed(text, stops, exempt=0):
    return next((stopping.Match(text.find(s), text.find(s) + len(s), s) for s in stops if s in text), None)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("held_length", _nothing_held),
        ("held_length", _shortest_tail),
        ("find_stop", _earliest_begin),
        ("find_stop", _first_listed),
    ],
)
def test_the_check_catches_planted_mistakes(monkeypatch, name, mistake):
    monkeypatch.setattr(stopping, name, mistake)
    with pytest.raises(AssertionError):
        exhaustive()


def test_stop_string_in_pieces_is_never_streamed():
    """vllm#3574, #3672."""
    emitted, taken = run(StopChecker(SamplingParams(stop="DEFGHIJ")), ["ABC", "D", "EF", "GHI", "JK", "L"])
    assert emitted == ["ABC", "", "", "", "", ""]
    assert taken == 5


def test_held_text_is_released_when_the_stop_fails():
    emitted, _ = run(StopChecker(SamplingParams(stop="DEFGHIJ")), ["ABC", "D", "EF", "X", "DE"])
    assert emitted == ["ABC", "", "", "DEFX", "", "DE"]


def test_earliest_in_the_text_wins_not_first_in_the_list():
    checker = StopChecker(SamplingParams(stop=["B", "A"]))
    assert "".join(run(checker, ["xx A yy B"])[0]) == "xx "
    assert checker.stop_reason == "A"


def test_earliest_end_wins_over_earliest_begin_and_ties_go_to_the_longest():
    assert find_stop("abcd", ["abcd", "bc"]) == (1, 3, "bc")
    assert find_stop("abcd", ["bc", "abc", "c"]) == (0, 3, "abc")
    assert find_stop("abc", ["x"]) is None


def test_stop_string_before_min_tokens_is_ignored_until_then():
    """vllm#21987."""
    emitted, taken = run(StopChecker(SamplingParams(stop="X", min_tokens=2)), ["aX", "bX", "c", "dXe", "f"])
    assert "".join(emitted) == "aXbXcd"
    assert taken == 4


def test_stop_string_that_begins_before_min_tokens_and_ends_after_counts():
    emitted, taken = run(StopChecker(SamplingParams(stop="END", min_tokens=2)), ["aEND", "bEN", "D", "c"])
    assert emitted == ["aEND", "b", "", ""]
    assert taken == 3


def test_what_follows_the_stop_in_its_token_is_dropped_even_if_the_stop_is_included():
    params = SamplingParams(stop="stop", include_stop_str_in_output=True)
    assert "".join(run(StopChecker(params), ["a st", "op b"])[0]) == "a stop"


def test_held_length_examples():
    assert held_length("xxab", ["abc"]) == 2
    assert held_length("xxabc", ["abc"]) == 0  # whole, hence not a beginning
    assert held_length("aab", ["abc", "aabb"]) == 3
    assert held_length("anything", []) == 0


def test_end_token_ends_and_its_text_is_dropped():
    checker = StopChecker(SamplingParams(), eos_ids=[EOS])
    emitted, taken = run(checker, ["a", "<end>", "b"], ids=[WORD, EOS, WORD])
    assert (emitted, taken) == (["a", "", ""], 2)
    assert (checker.finish_reason, checker.stop_reason) == ("stop", None)  # as vLLM has it


def test_stop_token_id_releases_what_a_stop_string_held_back():
    checker = StopChecker(SamplingParams(stop="abc", stop_token_ids=[5]))
    assert run(checker, ["xab", "c"], ids=[WORD, 5])[0] == ["x", "", "ab"]
    assert checker.stop_reason == 5


def test_stop_token_text_is_kept_on_request():
    checker = StopChecker(SamplingParams(stop="abc", stop_token_ids=[5], include_stop_str_in_output=True))
    assert run(checker, ["xab", "!"], ids=[WORD, 5])[0] == ["x", "ab!", ""]


def test_ignore_eos_goes_on_but_stop_token_ids_still_stop():
    params = SamplingParams(ignore_eos=True, stop_token_ids=[5])
    emitted, taken = run(StopChecker(params, eos_ids=[EOS]), ["a", "b", "c", "d"], ids=[WORD, EOS, 5, WORD])
    assert ("".join(emitted), taken) == ("ab", 3)


def test_end_token_among_the_first_min_tokens_does_not_stop():
    checker = StopChecker(SamplingParams(min_tokens=2), eos_ids=[EOS])
    assert run(checker, ["a", "b", "c", "d"], ids=[EOS, EOS, EOS, WORD])[1] == 3


def test_max_tokens_ends_with_length_and_releases_the_rest():
    checker = StopChecker(SamplingParams(max_tokens=2, stop="abc"))
    assert run(checker, ["xa", "b", "c"], rest="?")[0] == ["x", "", "ab?"]
    assert (checker.finish_reason, checker.stop_reason) == ("length", None)


def test_stop_completed_by_the_last_allowed_token_is_a_stop():
    checker = StopChecker(SamplingParams(max_tokens=2, stop="ab"))
    run(checker, ["a", "b"])
    assert checker.finish_reason == "stop"


def test_stop_completed_by_the_detokenizers_rest():
    checker = StopChecker(SamplingParams(max_tokens=1, stop="a\ufffd"))
    assert run(checker, ["xa"], rest="\ufffd")[0] == ["x", ""]
    assert (checker.finish_reason, checker.stop_reason) == ("stop", "a\ufffd")


def test_min_tokens_that_cannot_be_reached_ends_with_length():
    """vllm#51299: a context of 16, min = max = 100."""
    params = SamplingParams(min_tokens=100, max_tokens=100, stop="a")
    checker = StopChecker(params, eos_ids=[EOS], max_model_len=16, prompt_tokens=6)
    emitted, taken = run(checker, ["a"] * 50, ids=[EOS] * 50)
    assert ("".join(emitted), taken, checker.finish_reason) == ("a" * 10, 10, "length")


def test_no_limit_without_max_tokens_and_max_model_len():
    checker = StopChecker(SamplingParams(max_tokens=None))
    assert run(checker, ["a"] * 500)[1] == 500
    assert checker.finish_reason is None


def test_a_token_after_the_end_is_refused():
    checker = StopChecker(SamplingParams(max_tokens=1))
    checker.push(WORD, "a")
    with pytest.raises(RequestError, match="token 9 came after"):
        checker.push(9, "b")


def test_flush_twice_gives_nothing_the_second_time():
    checker = StopChecker(SamplingParams(stop="ab"))
    checker.push(WORD, "xa")
    assert checker.flush().text == "a"
    assert checker.flush("more").text == ""
