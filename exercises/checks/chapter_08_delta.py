"""Chapter 08, the gated delta rule: against the same recurrence as a product of matrices, in float64.

S_t = e^g (I - beta k kᵀ) S_{t-1} + beta k vᵀ, with the products of all later tokens applied to each write.
"""

from __future__ import annotations

import math

import torch

from exercises import Exercise, Judge, Mistake


def case(seed: int, tokens: int, key: int = 5, value: int = 3, fades: bool = True, begun: bool = True) -> list:
    made = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=made, dtype=torch.float64)  # noqa: E731
    q, k, v = normal(tokens, key), torch.nn.functional.normalize(normal(tokens, key), dim=-1), normal(tokens, value)
    g = -torch.rand(tokens, generator=made, dtype=torch.float64) * (1 if fades else 0)
    beta = 0.2 + 0.8 * torch.rand(tokens, generator=made, dtype=torch.float64)
    return [q, k, v, g, beta, normal(key, value) * (1 if begun else 0)]


def as_products(q, k, v, g, beta, state) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's state written out from the beginning: what is left of every earlier write, added up."""
    unit = torch.eye(k.shape[1], dtype=k.dtype)
    passes = [math.exp(g[t]) * (unit - beta[t] * torch.outer(k[t], k[t])) for t in range(len(q))]
    states = []
    for t in range(len(q)):
        left, total = unit, torch.zeros_like(state)
        for s in range(t, -1, -1):
            total = total + left @ (beta[s] * torch.outer(k[s], v[s]))
            left = left @ passes[s]
        states.append(total + left @ state)
    return torch.stack([states[t].T @ q[t] for t in range(len(q))]), states[-1]


def applied(delta_rule, given: list, judge: Judge, hint: str) -> None:
    got = delta_rule(*given)
    judge.type(got, tuple)
    judge.equal(len(got), 2, "The outputs and the state, in this order.")
    for mine, right, what in zip(got, as_products(*given), ("the outputs", "the state"), strict=True):
        judge.close(mine, right, f"In {what}. Likely mistake: {hint}", rtol=1e-6, atol=1e-8)


def one_token_is_written(delta_rule, judge: Judge) -> None:
    hint = "a token is written before it is read, and the state is (Dk, Dv): k is its rows."
    applied(delta_rule, case(1, 1, fades=False, begun=False), judge, hint)


def the_difference_is_written(delta_rule, judge: Judge) -> None:
    given = case(2, 4, fades=False, begun=False)
    given[1] = given[1][:1].expand(4, -1).clone()  # four values under one key
    hint = "the whole value added, where only the part that the state lacks belongs; and beta scales that difference."
    applied(delta_rule, given, judge, hint)


def goes_on_from_a_state(delta_rule, judge: Judge) -> None:
    applied(delta_rule, case(3, 3, fades=False), judge, "the state that was given is not the one begun from.")


def fades_first(delta_rule, judge: Judge) -> None:
    for seed in range(3):
        hint = "the state fades by exp(g) before it is looked up: u is the difference to what is left."
        applied(delta_rule, case(10 + seed, 1), judge, hint)


def each_token_its_own_gate(delta_rule, judge: Judge) -> None:
    applied(delta_rule, case(4, 7), judge, "one token's g or beta used for all.")


def other_sizes(delta_rule, judge: Judge) -> None:
    for key, value, tokens in ((1, 1, 3), (4, 9, 12), (16, 16, 20)):
        applied(delta_rule, case(tokens, tokens, key, value), judge, "a size written as a number.")


DELTA = Exercise(
    name="delta_rule",
    title="Gated delta rule",
    chapter="08",
    difficulty=3,
    minutes=25,
    checks=[
        one_token_is_written,
        the_difference_is_written,
        goes_on_from_a_state,
        fades_first,
        each_token_its_own_gate,
        other_sizes,
    ],
    mistakes=[
        Mistake(
            "reads before it writes",
            "one_token_is_written",
            source="""
def delta_rule(q, k, v, g, beta, state):
    out = []
    for t in range(len(q)):
        state = g[t].exp() * state
        out.append(state.T @ q[t])
        state = state + torch.outer(k[t], beta[t] * (v[t] - state.T @ k[t]))
    return torch.stack(out), state
""",
        ),
        Mistake("no beta", "one_token_is_written", edit=("beta[t] * (v[t]", "(v[t]")),
        Mistake("the whole value", "the_difference_is_written", edit=("(v[t] - state.T @ k[t])", "v[t]")),
        Mistake(
            "beta on the value alone",
            "the_difference_is_written",
            edit=("beta[t] * (v[t] - state.T @ k[t])", "beta[t] * v[t] - state.T @ k[t]"),
        ),
        Mistake("begins at zero", "goes_on_from_a_state", edit=("out = []", "out, state = [], 0 * state")),
        Mistake(
            "fades after the lookup",
            "fades_first",
            source="""
def delta_rule(q, k, v, g, beta, state):
    out = []
    for t in range(len(q)):
        u = beta[t] * (v[t] - state.T @ k[t])
        state = g[t].exp() * state + torch.outer(k[t], u)
        out.append(state.T @ q[t])
    return torch.stack(out), state
""",
        ),
        Mistake(
            "fades what was just written",
            "fades_first",
            source="""
def delta_rule(q, k, v, g, beta, state):
    out = []
    for t in range(len(q)):
        u = beta[t] * (v[t] - state.T @ k[t])
        state = g[t].exp() * (state + torch.outer(k[t], u))
        out.append(state.T @ q[t])
    return torch.stack(out), state
""",
        ),
        Mistake("never fades", "fades_first", edit=("g[t].exp() * state", "state")),
        Mistake("g is the decay itself", "fades_first", edit=("g[t].exp() * state", "(1 + g[t]) * state")),
        Mistake("the first gate for all", "each_token_its_own_gate", edit=("g[t].exp()", "g[0].exp()")),
        Mistake("the first beta for all", "the_difference_is_written", edit=("beta[t] *", "beta[0] *")),
        Mistake("a dimension squeezed away", "other_sizes", edit=("torch.stack(out)", "torch.stack(out).squeeze(-1)")),
    ],
    forbids=("minillm.delta_rule", "kernels"),
)
