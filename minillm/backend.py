"""One switch: which arithmetic a model runs on, torch's operators or the Triton kernels in kernels/.

"triton"  the kernels; needs a CUDA device, or TRITON_INTERPRET=1 set before Python starts (slow, for tests)
"torch"   torch's own operators, on any device
"auto"    Triton on CUDA where it is installed, torch elsewhere

The choice is made here alone. It decides the classes of a model's layers (triton_layers.py), of a step's view of the
paged cache (triton_step.py) and the attention of a cache of one sequence; nothing else asks for the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import nn

from .attention import sdpa_attention
from .errors import EngineError, short
from .paging import PagedStep
from .transformer import Transformer

BACKENDS = ("auto", "triton", "torch")


def choose(backend: str, device: str | torch.device) -> str:
    """ "triton" or "torch", for tensors on `device`. Raises EngineError, or KernelError where kernels cannot run."""
    if backend not in BACKENDS:
        raise EngineError(f"backend {short(repr(backend))} is not known; choose one of {', '.join(BACKENDS)}")
    device = torch.device(device)
    if backend == "torch" or (backend == "auto" and device.type != "cuda"):
        return "torch"  # without importing triton
    try:
        from kernels import launch
    except ImportError:
        if backend == "auto":
            return "torch"
        raise EngineError(
            'backend "triton" needs the folder kernels/ beside minillm/; start Python in the repository, or use "torch"'
        ) from None
    if backend == "auto":
        return "triton" if launch.HAVE_TRITON else "torch"
    if device.type != "cuda" or not launch.HAVE_TRITON:
        launch.use_triton("triton", torch.empty(0))  # says what is missing, unless the interpreter is there
    return "triton"


def with_backend(model: Transformer, backend: str | None) -> Transformer:
    """The model on a backend: itself where nothing changes, else one that shares every weight. None: as it is."""
    chosen = model.backend if backend is None else choose(backend, model.device)
    if chosen == model.backend:
        return model
    from .triton_layers import CLASSES

    return _exchanged(model, CLASSES if chosen == "triton" else {new: old for old, new in CLASSES.items()})


def _exchanged(module: nn.Module, classes: Mapping[type, type]) -> nn.Module:
    """A shallow copy with other classes, all the way down. They hold the same state and differ in `forward`."""
    children = {name: _exchanged(child, classes) for name, child in module.named_children()}
    kind = classes.get(type(module), type(module))
    if kind is type(module) and all(getattr(module, name) is child for name, child in children.items()):
        return module
    new = copy.copy(module)
    new.__class__ = kind
    new._modules = {**module._modules, **children}
    return new


def step_class(model: Transformer) -> type[PagedStep]:
    """How a step of this model sees the paged cache."""
    if model.backend == "torch":
        return PagedStep
    from .triton_step import TritonStep

    return TritonStep


def attention(model: Transformer) -> Callable:
    """What a contiguous cache of this model attends with; arguments as in sdpa_attention."""
    if model.backend == "torch":
        return sdpa_attention
    from .triton_step import flash

    return flash
