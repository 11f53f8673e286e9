"""What the tests of changes that are made whole or not at all share."""

from __future__ import annotations

import torch

from minillm.analysis.quality import window_logits
from tests import tiny

CALIBRATION = torch.randint(2, tiny.VOCAB, (40,), generator=torch.Generator().manual_seed(0)).tolist()


class Kept:
    """What a model was: which objects, and copies of their numbers (buffers that no file holds among them)."""

    def __init__(self, model):
        self.model, self.layout = model, model.layout
        self.modules = dict(model.named_modules())
        self.attributes = {name: set(vars(module)) for name, module in self.modules.items()}
        self.tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        self.numbers = {name: tensor.clone() for name, tensor in self.tensors.items()}
        self.logits = window_logits(model, CALIBRATION)

    def check(self):
        modules, tensors = dict(self.model.named_modules()), dict(self.model.named_parameters(remove_duplicate=False))
        tensors |= dict(self.model.named_buffers())
        assert modules.keys() == self.modules.keys()
        assert all(module is self.modules[name] for name, module in modules.items())
        assert all(set(vars(module)) == self.attributes[name] for name, module in modules.items())
        assert tensors.keys() == self.tensors.keys()
        assert all(tensor is self.tensors[name] for name, tensor in tensors.items())
        assert all(torch.equal(tensor, self.numbers[name]) for name, tensor in tensors.items())
        assert self.model.layout == self.layout
        assert torch.equal(window_logits(self.model, CALIBRATION), self.logits)
        assert not any(module._forward_pre_hooks for module in self.model.modules())


def stop_at(monkeypatch, owner, name: str, call: int, error: type[BaseException], after: bool = False) -> None:
    """The function raises in its n-th call, before or after its work."""
    work, calls = getattr(owner, name), [0]

    def broken(*arguments, **options):
        calls[0] += 1
        if calls[0] == call and not after:
            raise error("stop")
        done = work(*arguments, **options)
        if calls[0] == call:
            raise error("stop")
        return done

    monkeypatch.setattr(owner, name, broken)
