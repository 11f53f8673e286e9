"""One matrix, several layouts: how a weight is stored decides how fast a CPU multiplies by it.

Decode multiplies every matrix by one row and is bound by the bytes it reads; prefill multiplies by hundreds and is
bound by arithmetic. The layouts below hold the same numbers:

float32    as loaded; exact, 4 bytes a weight
float16    FBGEMM's packed blocks, float32 arithmetic; 2 bytes, 11 bits of mantissa
bfloat16   oneDNN's packed blocks; 2 bytes, 8 bits of mantissa, and the CPU's matrix units where it has them
int4       a file's own 4-bit codes, left as they are (groups of 32, scale and minimum in bfloat16); 5 bits a weight

`choose_layouts` times them on this machine, for few rows and for many, since the best differs from one CPU to the
next. Everything but float32 rounds: `python -m minillm bench` says what that changed.
"""

from __future__ import annotations

import datetime
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import CheckpointError, short
from .layers import Linear
from .storage import remembered

GROUP = 32  # of GGUF's Q4_0 and Q4_1


@dataclass(frozen=True)
class GroupedInt4:
    """A (rows, columns) matrix of 4-bit codes: w = scale · code + minimum, one pair for each 32 columns of a row.

    codes (rows, columns) uint8 below 16; scale and minimum (rows, columns / 32) float32.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def dequantize(self) -> Tensor:
        rows, columns = self.shape
        codes = self.codes.view(rows, columns // GROUP, GROUP).to(torch.float32)
        return (codes * self.scale[..., None] + self.minimum[..., None]).view(rows, columns)

    def map(self, change: Callable[[Tensor], Tensor]) -> GroupedInt4:
        """Applies a change of rows to codes, scale and minimum alike."""
        return GroupedInt4(change(self.codes), change(self.scale), change(self.minimum))


Weight = Tensor | GroupedInt4


def stack_rows(parts: list[Weight]) -> Weight:
    """Several matrices of one width as one, by rows; 4-bit only if all of them are."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(p, GroupedInt4) for p in parts):
        fields = ((getattr(p, name) for p in parts) for name in ("codes", "scale", "minimum"))
        return GroupedInt4(*(torch.cat(list(field)) for field in fields))
    return torch.cat([as_float(p) for p in parts])


def as_float(weight: Weight) -> Tensor:
    """Its numbers. Takes a matrix of any kind that can say them (`dequantize`)."""
    return weight if isinstance(weight, Tensor) else weight.dequantize()


class Float32:
    """y = x Wᵀ + b as loaded: where nothing else is faster for many rows, beside 4-bit codes for few."""

    input_dtype = torch.float32

    def __init__(self, weight: Weight, bias: Tensor | None) -> None:
        self.weight, self.bias = as_float(weight), bias
        self.weight_bytes = self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Float16:
    """y = x Wᵀ + b with W in FBGEMM's blocks; x and y float32."""

    input_dtype = torch.float32

    def __init__(self, weight: Weight, bias: Tensor | None) -> None:
        weight = as_float(weight)
        if weight.abs().max() > torch.finfo(torch.float16).max:
            raise CheckpointError("a weight exceeds 65504, the range of float16; load with --dtype float32")
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        self.weight_bytes = 2 * weight.numel()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic_fp16.default(x, self.packed)


class BFloat16:
    """The same through oneDNN, which rounds x to bfloat16 too and accumulates in float32. y is of x's type."""

    input_dtype = torch.bfloat16

    def __init__(self, weight: Weight, bias: Tensor | None) -> None:
        weight = as_float(weight).to(torch.bfloat16)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        self.bias = None if bias is None else bias.to(torch.bfloat16)
        self.weight_bytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.ops.mkldnn._linear_pointwise.default(x.to(torch.bfloat16), self.packed, self.bias, "none", [], "")
        return y.to(x.dtype)


class Int4:
    """The same with 4-bit codes expanded inside the kernel, next to the multiply: a quarter of the bytes to read."""

    input_dtype = torch.bfloat16

    def __init__(self, weight: GroupedInt4, bias: Tensor | None) -> None:
        # torch's kernel computes (code - 8) · scale + zero
        zero = weight.minimum + 8 * weight.scale
        pairs = torch.stack([weight.scale.t(), zero.t()], dim=-1)  # (columns / 32, rows, 2)
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.to(torch.int32), 1)
        self.scale_and_zero = pairs.to(torch.bfloat16).contiguous()
        self.bias = bias
        self.weight_bytes = self.packed.nbytes + self.scale_and_zero.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        x16 = x.to(torch.bfloat16)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu.default(x16, self.packed, GROUP, self.scale_and_zero)
        y = y.to(x.dtype)
        return y if self.bias is None else y + self.bias


LAYOUTS = {"float32": Float32, "float16": Float16, "bfloat16": BFloat16, "int4": Int4}


@dataclass(frozen=True)
class Choice:
    """Layout for up to `turn` rows, and the one for more."""

    few: str
    many: str
    turn: int

    def __str__(self) -> str:
        return self.few if self.few == self.many else f"{self.few} up to {self.turn} rows, {self.many} above"


class PackedLinear(nn.Module):
    """A linear layer held in one or two layouts. x (T, d_in) float32 or its `input_dtype` -> (T, d_out) of x's type."""

    def __init__(self, weight: Weight, bias: Tensor | None, choice: Choice) -> None:
        super().__init__()
        few = choice.few if choice.few != "int4" or _fits_int4(weight) else choice.many
        self.out_features, self.in_features = weight.shape
        self.turn = choice.turn
        self.many = LAYOUTS[choice.many](weight, bias)
        self.few = self.many if few == choice.many else LAYOUTS[few](weight, bias)

    @property
    def weight_bytes(self) -> int:
        """Bytes that a step of one row reads."""
        return self.few.weight_bytes

    def input_dtype(self, rows: int) -> torch.dtype:
        """What it rounds its input to, so that whoever makes the input need not keep more."""
        return (self.few if rows <= self.turn else self.many).input_dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.few(x) if x.shape[0] <= self.turn else self.many(x)


def _fits_int4(weight: Weight) -> bool:
    return isinstance(weight, GroupedInt4) and weight.shape[0] % 16 == 0  # the kernel's tile is 16 rows of W


def linear_maker(dtype: str, int4_codes: bool) -> tuple[Callable[[list[Weight], Tensor | None], nn.Module], str]:
    """How matrices are stored for `dtype` on this CPU, and its name: float32, float16, bfloat16 or auto."""
    if dtype == "float32":
        return lambda parts, bias: Linear(as_float(stack_rows(parts)), bias), "float32"
    choice = choose_layouts(int4_codes) if dtype == "auto" else Choice(dtype, dtype, 0)
    if choice.few == choice.many == "float32":
        return linear_maker("float32", int4_codes)
    if choice.many not in available():
        raise CheckpointError(f"dtype {dtype} has no fast kernel on this CPU; use --dtype float32 or --dtype auto")
    return lambda parts, bias: PackedLinear(stack_rows(parts), bias, choice), str(choice)


def available() -> list[str]:
    """Layouts whose kernels this build of torch has for this CPU, found by multiplying a small matrix."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(32, 4)  # (32, 64)
    small = GroupedInt4(codes, torch.ones(32, 2), torch.zeros(32, 2))
    found = []
    for name, layout in LAYOUTS.items():
        try:
            y = layout(small, None)(torch.ones(1, 64))
        except (RuntimeError, NotImplementedError, AttributeError):
            continue
        if torch.allclose(y, small.dequantize().sum(1)[None], rtol=0.01):
            found.append(name)
    return found


def choose_layouts(int4_codes: bool) -> Choice:
    """The fastest layout for one row and for 256 rows here, by measurement, remembered for this machine."""
    key = {
        "machine": platform.processor() or platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "int4": int4_codes,
    }
    name = f"layouts{'-int4' if int4_codes else ''}-{key['threads']}-threads.json"
    for fresh in (False, True):  # a choice that cannot be believed is measured again
        value = remembered(name, key, lambda: _measure(int4_codes), fresh)
        if (choice := _believed(value, int4_codes)) is not None:
            return choice
    raise CheckpointError(f"the layouts measured here make no sense: {short(value)}; use --dtype float32")


def _believed(value: dict, int4_codes: bool) -> Choice | None:
    """The choice that a cache holds, or None if it is none that this machine and these weights allow."""
    few, many, turn, date = (value.get(name) for name in ("few", "many", "turn", "date"))
    usable = [name for name in available() if name != "int4" or int4_codes]
    if few not in usable or many not in usable or many == "int4" or type(turn) is not int or turn < 0:
        return None
    try:
        age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(date)
        steady = float(value["spread"]) <= _STEADY
    except (KeyError, TypeError, ValueError):
        return None
    return Choice(few, many, turn) if steady or age < datetime.timedelta(hours=1) else None


ROWS = (1, 2, 4, 8, 256)
_ROUNDS = 5
_STEADY = 2.0  # a median round this many times the fastest says that something else was running


@torch.inference_mode()
def _measure(int4_codes: bool) -> dict:
    """Times every layout at every number of rows, round after round, so that a disturbance hits all of them alike."""
    names = [name for name in available() if name != "int4" or int4_codes]
    generator = torch.Generator().manual_seed(0)
    shape, copies = (3072, 576), 8  # a SmolLM2 gate_up matrix, and enough of them to leave the cache
    codes = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    scale = torch.rand((shape[0], shape[1] // GROUP), generator=generator)
    weight = GroupedInt4(codes, scale, -8 * scale)
    layers = {name: [LAYOUTS[name](weight, None) for _ in range(copies)] for name in names}
    inputs = {rows: torch.randn(rows, shape[1], generator=generator) for rows in ROWS}
    rounds = [{(n, r): _time(layers[n], inputs[r]) for n in names for r in ROWS} for _ in range(_ROUNDS)]
    times = {cell: [one[cell] for one in rounds[1:]] for cell in rounds[0]}  # the first round is warm-up
    seconds = {name: {rows: min(times[name, rows]) for rows in ROWS} for name in names}
    few, many, turn = _choose(seconds)
    return {
        "few": few,
        "many": many,
        "turn": turn,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "spread": statistics.median(statistics.median(t) / min(t) for t in times.values()),
        "microseconds": {n: {str(r): round(s * 1e6, 1) for r, s in by.items()} for n, by in seconds.items()},
    }


def _choose(seconds: dict[str, dict[int, float]]) -> tuple[str, str, int]:
    """(few, many, turn): one layout for everything, and a second one for few rows if that pays for its memory."""
    many = min((name for name in seconds if name != "int4"), key=lambda name: _decode_and_prefill(seconds[name]))
    few = min(seconds, key=lambda name: seconds[name][1])
    few = few if seconds[few][1] < 0.9 * seconds[many][1] else many
    turn = max((rows for rows in ROWS if seconds[few][rows] < seconds[many][rows]), default=0)
    return few, many, turn


def _decode_and_prefill(seconds: dict[int, float]) -> float:
    """A request of 256 prompt and 64 output tokens, in units of one layer: what the single layout must be good at."""
    return seconds[256] + 64 * seconds[1]


def _time(layers: list, x: Tensor) -> float:
    """Seconds of one layer."""
    start = time.perf_counter()
    for layer in layers:
        layer(x)
    return (time.perf_counter() - start) / len(layers)
