"""What a kernel file hands to the tools, in three lists.

CASES    list[Case]         inputs on which kernel and reference must agree; the tests (interpreter) and gpu run them
COMPILE  list[Compilation]  what aot compiles without a GPU
BENCHES  list[Bench]        what gpu times, against which rivals
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

FRAMEWORK = {"launch", "catalog", "aot", "gpu", "gpu_model", "watch", "__main__"}


@dataclass(frozen=True)
class Trial:
    """One call, three ways. `launcher(*args, backend="triton", **kwargs)` against `reference(*args, **kwargs)`.

    Both return a tensor or a tuple of tensors. A launcher that writes in place returns what it wrote; a reference
    leaves its arguments alone.
    """

    launcher: Callable
    reference: Callable
    args: tuple
    kwargs: dict[str, Any] = field(default_factory=dict)

    def kernel(self) -> tuple[Tensor, ...]:
        return _tuple(self.launcher(*self.args, backend="triton", **self.kwargs))

    def torch(self) -> tuple[Tensor, ...]:
        """The reference at the precision of the arguments."""
        return _tuple(self.reference(*self.args, **self.kwargs))

    def exact(self) -> tuple[Tensor, ...]:
        """The reference with every floating argument in float64."""
        return _tuple(self.reference(*map(_double, self.args), **{k: _double(v) for k, v in self.kwargs.items()}))

    def moved(self, move: Callable[[Tensor], Tensor]) -> Trial:
        """The same call on tensors that `move` has copied elsewhere."""
        each = lambda v: move(v) if isinstance(v, Tensor) else v  # noqa: E731
        return Trial(
            self.launcher, self.reference, tuple(map(each, self.args)), {k: each(v) for k, v in self.kwargs.items()}
        )


@dataclass(frozen=True)
class Case:
    """make(device, dtype, generator) -> Trial. The generator is on the CPU, so that every device gets equal numbers.

    `dtypes` are those the case makes sense in; the interpreter runs float32 and float16 of them, CUDA all but float32.
    """

    name: str
    make: Callable[[str, torch.dtype, torch.Generator], Trial]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Compilation:
    """One kernel with one set of constexprs. An autotuned kernel is compiled in each of its configurations.

    make_args(dtype) -> positional arguments as a launch would pass them, CPU tensors and numbers: the compiler sees
    which are multiples of 16. A bare torch.dtype stands for an aligned pointer to that type.
    """

    name: str
    kernel: Any
    make_args: Callable[[torch.dtype], tuple]
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    min_sm: int = 75  # oldest target it compiles for: 75, 80, 90 or 100
    matrix: str = ""  # "any": some matrix instruction must be found; "native": wgmma on sm_90, tcgen05 on sm_100
    options: dict[str, Any] = field(default_factory=dict)  # further compiler options: maxnreg, num_ctas ...


@dataclass(frozen=True)
class Work:
    """What a Bench times. Rivals do the same job through torch or a library; bytes and flops are the least possible."""

    kernel: Callable[[], Any]
    rivals: dict[str, Callable[[], Any]]
    bytes: int
    flops: int = 0


@dataclass(frozen=True)
class Bench:
    """make(device, dtype, **size) -> Work for each of the sizes, which are named: {"Llama-3-8B": {"d": 4096}}.

    goal: the fraction of measured copy bandwidth (bound "memory") or matmul peak ("compute") it should reach.
    """

    name: str
    make: Callable[..., Work]
    sizes: dict[str, dict[str, Any]]
    bound: str = "memory"
    goal: float | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)


def kernel_files() -> list[ModuleType]:
    """Every module of this package but the framework's own, imported, in alphabetical order."""
    names = sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if m.name not in FRAMEWORK)
    return [importlib.import_module(f"kernels.{name}") for name in names]


def normal(generator: torch.Generator, *shape: int, device: str, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Normally distributed numbers, the same on every device."""
    return (torch.randn(*shape, generator=generator, device="cpu") * scale).to(device, dtype)


def spaced_rows(x: Tensor, gap: int = 16) -> Tensor:
    """Equal to x, its rows `gap` elements further apart, with NaN (integers: the largest) in between."""
    poison = float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max
    wide = torch.full((*x.shape[:-1], x.shape[-1] + gap), poison, dtype=x.dtype, device=x.device)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def swapped(x: Tensor) -> Tensor:
    """Equal to x, with its first two dimensions exchanged in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


@dataclass(frozen=True)
class Error:
    """Root mean square errors against float64 of one output. `ratio` may be at most 2."""

    kernel: float
    torch: float
    ratio: float


def compare(trial: Trial) -> list[Error]:
    """Runs the three and measures each output; integers must be equal, NaN and infinities in the same places.

    Kernel and torch sum in different orders, so torch may be exact by luck; below an eighth of the type's rounding
    step no error counts.
    """
    exact, low = trial.exact(), trial.torch()  # before the kernel, which may write in place
    outputs = trial.kernel()
    if not len(outputs) == len(low) == len(exact):
        raise AssertionError(f"{len(outputs)} outputs from the kernel, {len(low)} from the reference")
    return [_error(*triple) for triple in zip(outputs, low, exact, strict=True)]


def _error(output: Tensor, low: Tensor, exact: Tensor) -> Error:
    if output.shape != low.shape or output.dtype != low.dtype:
        raise AssertionError(f"{output.dtype} {tuple(output.shape)} instead of {low.dtype} {tuple(low.shape)}")
    if not output.is_floating_point():
        wrong = int((output != low).sum())
        return Error(float(wrong), 0.0, float("inf") if wrong else 0.0)
    output, low, exact, step = output.double(), low.double(), exact.double(), torch.finfo(low.dtype).eps
    special = ~(exact.isfinite() & low.isfinite())
    if not torch.equal(output[special].nan_to_num(nan=1.5), low[special].nan_to_num(nan=1.5)):
        return Error(float("inf"), 0.0, float("inf"))
    rms = lambda t: float(t[~special].square().mean().sqrt()) if (~special).any() else 0.0  # noqa: E731
    mine, torchs = rms(output - exact), rms(low - exact)
    if mine != mine:
        return Error(mine, torchs, float("inf"))
    allowed = max(torchs, rms(exact) * step / 8)
    return Error(mine, torchs, mine / allowed if allowed else (float("inf") if mine else 0.0))


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
