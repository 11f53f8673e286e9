"""The name of a way to quantize, taken apart: "gptq-int4-g128" is a method, a number format and a group size."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..errors import QuantizationError, short

METHODS = ("rtn", "gptq", "awq", "hqq", "smoothquant")
FORMATS = {  # format -> (bits, whether a group size belongs to its name)
    "int8": (8, True),
    "int4": (4, True),
    "int3": (3, True),
    "fp8": (8, False),
    "fp8-e5m2": (8, False),
    "mxfp4": (4, False),
    "nvfp4": (4, False),
    "ternary": (2, False),
}
BLOCK = {"mxfp4": 32, "nvfp4": 16}  # fixed by the format
GROUPS = (32, 64, 128)
GRANULARITIES = ("tensor", "channel", "block")
FP8_BLOCK = 128  # DeepSeek-V3's: one scale for 128 x 128 weights

EXAMPLES = "int8, int8-dynamic, int4-g128, int4-g32-asym, gptq-int4-g128, awq-int4-g32, fp8, fp8-block, mxfp4, nvfp4"
_NAME = re.compile(
    r"(?P<rotate>hadamard-)?(?:(?P<method>rtn|gptq|awq|hqq|smoothquant)-)?"
    r"(?P<format>int8|int4|int3|fp8-e5m2|fp8|mxfp4|nvfp4|ternary)"
    r"(?:-g(?P<group>[0-9]{1,5}))?(?P<asym>-asym)?(?:-(?P<granularity>tensor|channel|block))?(?P<dynamic>-dynamic)?"
)


@dataclass(frozen=True)
class Scheme:
    """How weights (and, if `dynamic`, activations) are rounded.

    `group` columns of a row share a scale; None means the whole row does. For fp8, `granularity` says what shares
    one: the tensor, a channel (row), or a block of 128 x 128. `own_order`: a group's columns lie anywhere in the
    matrix, as GPTQ with act-order leaves them where scales are those of its order (files of others alone).
    """

    name: str
    format: str
    method: str = "rtn"
    group: int | None = None
    symmetric: bool = True
    dynamic: bool = False
    granularity: str = "channel"
    rotate: bool = False
    own_order: bool = False

    @property
    def bits(self) -> int:
        return FORMATS[self.format][0]

    @property
    def needs_calibration(self) -> bool:
        """Whether it looks at activations, and so at some text, before it rounds."""
        return self.method in ("gptq", "awq", "smoothquant")

    @property
    def keeps_zeros(self) -> bool:
        """Whether a weight that is zero stays zero: a method that moves errors or numbers between weights fills it."""
        return self.method not in ("gptq", "hqq") and not self.rotate

    def with_group(self, group: int | None) -> Scheme:
        return replace(self, group=group)


def parse(name: str | Scheme) -> Scheme:
    """Raises QuantizationError for a name that says nothing, or a combination that makes no sense."""
    if isinstance(name, Scheme):
        return name
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise QuantizationError(f"scheme {short(repr(name))} is not known; write one like {EXAMPLES}")
    part = match.groupdict()
    grouped = FORMATS[part["format"]][1]
    group = int(part["group"]) if part["group"] else BLOCK.get(part["format"])
    scheme = Scheme(
        name,
        part["format"],
        part["method"] or "rtn",
        group,
        symmetric=not part["asym"] and part["method"] != "hqq",
        dynamic=bool(part["dynamic"]),
        granularity=part["granularity"] or "channel",
        rotate=bool(part["rotate"]),
    )
    _check(scheme, part, grouped)
    return scheme


def _check(scheme: Scheme, part: dict, grouped: bool) -> None:
    integer = scheme.format.startswith("int")
    refusals = {
        "only integer formats take a group size": bool(part["group"]) and not grouped,
        f"a group size is one of {', '.join(map(str, GROUPS))}": bool(part["group"])
        and grouped
        and scheme.group not in GROUPS,
        f"give {scheme.format} a group size, such as {scheme.format}-g128": integer
        and scheme.bits < 8
        and not scheme.group,
        "-asym belongs to integer formats": bool(part["asym"]) and not integer,
        "-tensor, -channel and -block belong to fp8": bool(part["granularity"]) and not scheme.format.startswith("fp8"),
        "activations are quantized with int8 weights alone": scheme.dynamic
        and (scheme.format != "int8" or bool(scheme.group) or not scheme.symmetric),
        f"{scheme.method} works on integer formats": scheme.method != "rtn" and not integer,
        "smoothquant moves the activations' difficulty into int8 weights; write smoothquant-int8-dynamic": (
            scheme.method == "smoothquant" and not (scheme.format == "int8" and scheme.dynamic)
        ),
    }
    for reason, holds in refusals.items():
        if holds:
            raise QuantizationError(f"scheme {scheme.name!r}: {reason}")
