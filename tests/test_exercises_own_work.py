"""What counts as the learner's own work: a ready-made answer is found under any honest name, and nothing else is."""

import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F

from exercises import Failed, registry
from exercises.checks.chapter_02_ready_made import WithoutReadyMade
from exercises.child import execute
from exercises.core import FAILED, OWN_WORK
from exercises.grade import grade
from exercises.own_work import must_be_own_work

DOUBLE = dataclasses.replace(
    registry.find("02", "causal_mask"), name="double", entry="double", forbids=("minillm.attention", "json", "io")
)

READY_MADE = {
    "an attribute chain": "import minillm.attention\ndef double(q):\n    return minillm.attention.causal_mask(q, q)",
    "the package alone": "import minillm\ndef double(q):\n    return minillm.attention.causal_mask(q, q)",
    "a module's name": "from minillm import attention as a\ndef double(q):\n    return a.causal_mask(q, q)",
    "a function's name": "from minillm.attention import causal_mask as f\ndef double(q):\n    return f(q, q)",
    "through another module": "from minillm import kv_cache as c\ndef double(q):\n    return c.sdpa_attention(q, q, q)",
    "by way of a local": "import minillm\ndef double(q):\n    m = minillm\n    return m.attention.causal_mask(q, q)",
    "imported within": "def double(q):\n    from minillm import attention\n    return attention.causal_mask(q, q)",
    "imported within, whole": "def double(q):\n    import minillm.attention as a\n    return a.causal_mask(q, q)",
    "in a helper": "import json\ndef helper(q):\n    return json.dumps(q)\ndef double(q):\n    return helper(q)",
    "in a cached helper": "import functools, json\n@functools.cache\ndef helper(q):\n    return json.dumps(q)\n"
    "def double(q):\n    return helper(q)",
    "in an inner function": "import json\ndef double(q):\n    return (lambda: json.dumps(q))()",
    "a cached entry": "import functools, json\n@functools.cache\ndef double(q):\n    return json.dumps(q)",
    "a partial": "import functools, json\ndouble = functools.partial(json.dumps, indent=1)",
    "a subclass": "import json\nclass double(json.JSONEncoder):\n    pass",
    "a class's member": "import json\nclass double:\n    push = json.dumps",
    "a method": "import json\nclass double:\n    @staticmethod\n    def push(q):\n        return json.dumps(q)",
    "a property": "import json\nclass double:\n    @property\n    def push(self):\n        return json.dumps(1)",
    "the checks": "from exercises.checks.chapter_02_mask import by_positions as f\ndef double(q):\n    return f(q)",
    "the checks, by attributes": "import exercises.checks.chapter_02_mask\ndef double(q):\n"
    "    return exercises.checks.chapter_02_mask.by_positions(q)",
}

OWN = {
    "an attribute called like a module": "class double:\n    def push(self):\n        return self.json, self.check",
    "a local called like a module": "def double(q):\n    json = io = q\n    return json + io",
    "a check in another cell": "from exercises import check\ndef double(q):\n    return q.check",
    "another module of the package": "import minillm.config\ndef double(q):\n    return minillm.config.ModelConfig",
    "torch": "import torch\nimport torch.nn.functional as F\ndef double(q):\n    return F.softmax(torch.cat([q]), -1)",
    "a plain cache": "import functools\n@functools.cache\ndef double(q):\n    return 2 * q",
}


def entry_of(source):
    namespace, errors = execute([source])
    assert errors == {}
    return namespace["double"]


@pytest.mark.parametrize("source", READY_MADE.values(), ids=READY_MADE)
def test_ready_made_answers_are_found(source):
    with pytest.raises(Failed, match="the exercise is to"):
        must_be_own_work(DOUBLE, entry_of(source))


@pytest.mark.parametrize("source", OWN.values(), ids=OWN)
def test_own_work_is_left_alone(source):
    must_be_own_work(DOUBLE, entry_of(source))


USES = "def f(text, n):\n    return {}.anything(text, n)"


@pytest.mark.parametrize("module", ["minillm.bpe_training", "minillm.vocabulary", "minillm.tokenizer", "tiktoken"])
def test_chapter_one_forbids_every_home_of_its_answers(module):
    outcome = grade(registry.find("01", "train_merges"), execute([f"import {module}\n{USES.format(module)}"])[0]["f"])
    assert (outcome.status, outcome.check) == (FAILED, OWN_WORK)
    assert module in outcome.message


def norms():
    x, w = torch.ones(2, 4), torch.ones(4)
    return {
        "torch": lambda: torch.rms_norm(x, (4,), w, 1e-5),
        "functional": lambda: F.rms_norm(x, (4,), w, 1e-5),
        "module": lambda: torch.nn.RMSNorm(4)(x),
        "operator": lambda: torch.ops.aten.rms_norm(x, (4,), w, 1e-5),
        "overload": lambda: torch.ops.aten.rms_norm.default(x, (4,), w, 1e-5),
    }


def attentions():
    q = torch.ones(1, 2, 3, 4)
    return {
        "functional": lambda: F.scaled_dot_product_attention(q, q, q),
        "bound earlier": functools.partial(F.scaled_dot_product_attention, q, q, q),
        "core": lambda: torch._C._nn.scaled_dot_product_attention(q, q, q),
        "operator": lambda: torch.ops.aten.scaled_dot_product_attention(q, q, q),
    }


@pytest.mark.parametrize(
    ("name", "call"),
    [("rms_norm", call) for call in norms().values()]
    + [("scaled_dot_product_attention", call) for call in attentions().values()],
)
def test_torchs_own_answer_is_refused_by_any_name(name, call):
    call()
    with pytest.raises(Failed, match=name), WithoutReadyMade(name):
        call()


def test_everything_else_of_torch_is_as_it_was():
    with WithoutReadyMade("rms_norm"):
        assert (torch.ones(2, 2) @ torch.eye(2)).softmax(dim=-1).tolist() == [[0.5, 0.5], [0.5, 0.5]]
