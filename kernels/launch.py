"""What every launcher needs: triton where it exists, the choice of backend, and checks that explain themselves.

Triton has wheels for Linux alone. Elsewhere `triton` and `tl` are stand-ins, so that every kernel file imports, its
torch reference runs, and asking for the kernel itself is one clear error.
"""

from __future__ import annotations

import contextlib
import inspect
import os

import torch
from torch import Tensor

from minillm.errors import MinillmError

# 3.9 warns until someone decides whether a · b + c may become one instruction. Yes: it is what cuBLAS does.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
BACKENDS = ("auto", "triton", "torch")


class KernelError(MinillmError):
    """Arguments that a kernel cannot run on, or a kernel where there is nothing to run it."""


class UnsupportedError(KernelError):
    """This GPU is older than what the kernel is made of."""


class _Absent:
    """Stands for triton, triton.language and everything in them: decorators and constants work, launching does not."""

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):  # or inspect, copy and pickle believe that it has every protocol
            raise AttributeError(name)
        return self

    def __call__(self, *args, **kwargs) -> _Absent:
        made = _Absent()
        if args and inspect.isfunction(args[0]):  # @triton.jit: keep what was written, for `show`
            made.fn = args[0]
        return made

    def __getitem__(self, grid) -> _Absent:
        raise KernelError('triton is not installed; pip install triton (Linux only), or use backend="torch"')

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)

    @staticmethod
    def next_power_of_2(n: int) -> int:
        return 1 << (n - 1).bit_length() if n > 1 else 1


try:
    import triton
    import triton.language as tl

    HAVE_TRITON = True
    # triton.jit reads this when a kernel is defined, so what counts is its value now.
    INTERPRETED = bool(triton.knobs.runtime.interpret)
except ImportError:
    triton = tl = _Absent()
    HAVE_TRITON = INTERPRETED = False


def use_triton(backend: str, *tensors: Tensor) -> bool:
    """True to launch the kernel, False for the torch reference.

    "auto" is Triton on CUDA tensors and torch elsewhere. "triton" needs CUDA tensors, or TRITON_INTERPRET=1 set
    before kernels is imported. Raises KernelError when that cannot be, and when the tensors are on several devices.
    """
    if backend not in BACKENDS:
        raise KernelError(f"backend is {backend!r}; use one of {', '.join(BACKENDS)}")
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        raise KernelError(f"the arguments are on {' and '.join(sorted(map(str, devices)))}; move them to one device")
    on_cuda = tensors[0].is_cuda
    if backend == "auto":
        return on_cuda and HAVE_TRITON
    if backend == "torch":
        return False
    if not HAVE_TRITON:
        raise KernelError('backend="triton", but triton is not installed (Linux only); use backend="torch"')
    if not on_cuda and not INTERPRETED:
        raise KernelError(
            f'backend="triton" with tensors on {tensors[0].device}; use CUDA tensors, backend="torch", or set '
            "TRITON_INTERPRET=1 before Python starts"
        )
    return True


def on_device(tensor: Tensor):
    """Triton launches on the current GPU, whichever one the tensors are on; `with on_device(x):` makes them agree."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def check_capability(tensor: Tensor, needed: tuple[int, int], what: str, remedy: str) -> None:
    """The GPU that a tensor is on has this compute capability or a later one: `check_capability(x, (8, 9), ...)`."""
    if tensor.is_cuda and (have := torch.cuda.get_device_capability(tensor.device)) < needed:
        names = ["sm_{}{}".format(*numbers) for numbers in (needed, have)]
        raise UnsupportedError(f"{what} needs a GPU of {names[0]} or later, and this one is {names[1]}; {remedy}")


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type a reference computes in: float64 for float64, which is how tests ask for exactness; else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def require(condition: bool, message: str) -> None:
    """Raises KernelError(message) unless the condition holds. The message names argument, value and remedy."""
    if not condition:
        raise KernelError(message)


def check_dtype(allowed: tuple[torch.dtype, ...] = FLOATS, **tensors: Tensor) -> None:
    """All tensors have one and the same of the allowed types: `check_dtype(x=x, weight=weight)`.

    A launch takes a few microseconds, and so would wording an error that nobody meets: that is done afterwards.
    """
    (first, reference), *others = tensors.items()
    dtype = reference.dtype
    if dtype not in allowed:
        raise KernelError(f"{first} is {_name(dtype)}; convert it to one of {', '.join(map(_name, allowed))}")
    for name, t in others:
        if t.dtype != dtype:
            raise KernelError(f"{name} is {_name(t.dtype)} but {first} is {_name(dtype)}; convert one of them")


def check_shape(name: str, tensor: Tensor, *shape: int | None) -> None:
    """The tensor has this shape; None stands for any size. `check_shape("weight", weight, x.shape[-1])`."""
    have = tensor.shape
    if len(have) != len(shape) or any(want is not None and want != size for want, size in zip(shape, have)):  # noqa: B905
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise KernelError(f"{name} has shape {tuple(tensor.shape)}; ({wanted}) is needed")


def check_contiguous_rows(**tensors: Tensor) -> None:
    """The last dimension is contiguous, so that neighbouring threads read neighbouring bytes; others may stride."""
    for name, t in tensors.items():
        if t.dim() and t.stride(-1) != 1 and t.shape[-1] > 1:
            raise KernelError(f"{name} has stride {t.stride(-1)} in its last dimension; call {name}.contiguous()")


def check_multiple(name: str, value: int, of: int) -> None:
    """`check_multiple("K", 100, of=group_size)`."""
    require(value % of == 0, f"{name} is {value}, not a multiple of {of}; pad it or choose another size")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
