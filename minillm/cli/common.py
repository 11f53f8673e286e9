"""What the commands share: options, loading, and how results are printed."""

from __future__ import annotations

import argparse
import json
import math
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from dataclasses import fields
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MinillmError, RequestError, short
from ..sampling_params import SamplingParams

if TYPE_CHECKING:
    from ..generate import Chunk, Completion
    from ..tokenizer import Tokenizer
    from ..transformer import Transformer

_PATH = 200  # characters of a path that a message shows
DTYPES = ("auto", "float32", "float16", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "triton", "torch")


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line, like all others here."""

    def error(self, message: str) -> None:
        print(f"minillm: error: {one_line(message)}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def add_command(
    commands, name: str, run, summary: str, examples: str, description: str | None = None
) -> argparse.ArgumentParser:
    """A command with its summary and examples; `run(args)` returns the exit code."""
    description = description or summary[0].upper() + summary[1:] + "."
    parser = commands.add_parser(
        name,
        help=summary,
        description=textwrap.fill(description, 100),
        epilog="examples:\n" + textwrap.indent(examples.strip(), "  "),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object, for a program to read")


def add_model_options(
    parser: argparse.ArgumentParser, weights: bool = True, quantize: str = "optional", offload: bool = False
) -> None:
    """`weights`: whether the command loads them. `quantize`: "optional", or "required" where it is the point.
    `offload`: whether it can run with experts in host memory."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        metavar="NAME",
        help="a .gguf file, a folder with config.json and safetensors, or a hub name (default: SmolLM2-135M-Instruct)",
    )
    if not weights:
        return
    group.add_argument(
        "--dtype", choices=DTYPES, default="auto",
        help="how weights are stored: float32 is exact, auto is the fastest measured here (default: auto)",
    )  # fmt: skip
    group.add_argument(
        "--quantize", metavar="SCHEME", required=quantize == "required",
        help="round the weights first: int8, int8-dynamic, int4-g128, gptq-int4-g128, awq-int4-g32, fp8, mxfp4, nvfp4 "
        "and others; takes the place of --dtype",
    )  # fmt: skip
    group.add_argument(
        "--sparsify", metavar="METHOD-PATTERN",
        help="set weights to zero first: magnitude, wanda or sparsegpt with 2:4, 4:8 or a share, such as wanda-2:4 or "
        "magnitude-0.5; with --quantize, before rounding",
    )  # fmt: skip
    if offload:
        group.add_argument(
            "--offload-experts", type=int, metavar="N",
            help="keep N experts of all layers on the device, the others in host memory, copied when they are chosen",
        )  # fmt: skip
    group.add_argument("--device", choices=DEVICES, default="auto", help="default: cuda where there is one, else cpu")
    group.add_argument(
        "--backend", choices=BACKENDS, default="auto",
        help="the Triton kernels or torch's operators (default: Triton on cuda, torch elsewhere)",
    )  # fmt: skip
    group.add_argument(
        "--compile", action="store_true",
        help="run the small operators as compiled code: faster steps on the CPU, for a minute of g++ the first time",
    )  # fmt: skip
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's own choice)")


def add_kv_cache_dtype(group) -> None:
    group.add_argument(
        "--kv-cache-dtype", default="auto", metavar="NAME",
        help="how keys and values are stored: auto, float32, bfloat16 or float16, or quantized: int8, fp8, int4",
    )  # fmt: skip


def cache_maker(model: Transformer, name: str):
    """tokens -> a cache of one sequence that stores keys and values as --kv-cache-dtype says; None for auto, where each
    command has its own."""
    if name == "auto":
        return None
    from ..backend import attention
    from ..kv_cache import ContiguousCache
    from ..runner import cache_dtype

    dtype = cache_dtype(model, name)
    return lambda tokens: ContiguousCache(model.config, tokens, dtype, model.device, attention(model))


# flag -> (type, metavar, help); the names are those of SamplingParams
_NUMBERS = {
    "temperature": (float, "T", "0 takes the likeliest token; higher draws more freely"),
    "top-k": (int, "K", "draw among the K likeliest; 0 is off"),
    "top-p": (float, "P", "draw among the likeliest that together reach P; 1 is off"),
    "min-p": (float, "P", "draw among those at least P times as likely as the likeliest; 0 is off"),
    "repetition-penalty": (float, "X", "make tokens seen before less likely; 1 is off"),
    "presence-penalty": (float, "X", "lower the logit of tokens already drawn; 0 is off"),
    "frequency-penalty": (float, "X", "the same for each time a token was drawn; 0 is off"),
    "seed": (int, "N", "the same seed draws the same tokens"),
    "min-tokens": (int, "N", "do not end before N tokens"),
}


def add_sampling_options(parser: argparse.ArgumentParser, temperature: float, top_p: float, max_tokens: int) -> None:
    defaults = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens)
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help=f"default: {max_tokens}")
    for flag, (kind, metavar, text) in _NUMBERS.items():
        default = getattr(defaults, flag.replace("-", "_"))
        shown = "" if default is None else f" (default: {default:g})"
        group.add_argument(f"--{flag}", type=kind, default=default, metavar=metavar, help=text + shown)
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; may be repeated")
    group.add_argument(
        "--stop-token-id", dest="stop_token_ids", action="append", type=int, default=[], metavar="ID",
        help="end at this token; may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--logit-bias", action="append", type=_bias, default=[], metavar="ID=X",
        help="add X, from -100 to 100, to a token's logit; may be repeated",
    )  # fmt: skip
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end token")


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    return int(token), float(value)


_bias.__name__ = "ID=X pair"  # argparse names the type in its message


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The options as SamplingParams, with a seed drawn where none was given. Raises RequestError."""
    names = {field.name for field in fields(SamplingParams)}
    return SamplingParams(**{name: value for name, value in vars(args).items() if name in names}).seeded()


def read_text(text: str) -> str:
    """The argument itself, or all of stdin for "-". Raises RequestError for bytes that are not UTF-8."""
    if text != "-":
        return text
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"stdin is not UTF-8 text ({error.reason} at byte {error.start}); convert it first"
        ) from None


def model_name(source: str | None) -> str:
    """What to call the model of --model."""
    if source is None:
        return "SmolLM2-135M-Instruct"
    path = Path(source)
    return (path.stem if path.is_file() else path.resolve().name) if path.exists() else source


def prepare(args: argparse.Namespace) -> str:
    """Sets torch's threads and returns the device to use. Raises RequestError for one that is not there, and
    MinillmError for a backend that cannot run on it or a --kv-cache-dtype that is not known."""
    import torch

    if args.threads is not None:
        if not 1 <= args.threads <= 1024:
            raise RequestError(f"threads is {args.threads}; it must be a whole number from 1 to 1024")
        torch.set_num_threads(args.threads)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise RequestError("torch sees no CUDA device; leave --device out to use the CPU, or see the doctor command")
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    from ..backend import choose

    choose(args.backend, device)
    if hasattr(args, "kv_cache_dtype"):
        from ..runner import check_cache_dtype

        check_cache_dtype(args.kv_cache_dtype)
    return device


def load(args: argparse.Namespace) -> tuple[Transformer, Tokenizer]:
    """Model and tokenizer as the options ask. Raises MinillmError."""
    device, resident = prepare(args), getattr(args, "offload_experts", None)
    if args.sparsify is not None or args.quantize is not None:
        model, tokenizer = _load_changed(args, device)
        if resident is not None:
            from ..moe_offload import offload_experts

            offload_experts(model, resident, device)
    else:
        from .. import checkpoint

        model, tokenizer = checkpoint.load(args.model, args.dtype, device, args.backend, offload_experts=resident)
    return (compile_model(model) if args.compile else model), tokenizer


def refuse_compile(args: argparse.Namespace, reason: str) -> None:
    """Where --compile would change nothing. Raises RequestError."""
    if args.compile:
        raise RequestError(f"{args.command} {reason}; leave --compile out")


def compile_model(model: Transformer) -> Transformer:
    """The model on compiled code, with a line on what that took. Raises CompilationError."""
    from ..compilation import compiled

    model = compiled(model)
    done = model.report
    say(f"compile: {done.made} pieces made and {done.found} found in {done.seconds:.1f} s")
    return model


def _load_changed(args: argparse.Namespace, device: str) -> tuple[Transformer, Tokenizer]:
    """Sparsified, quantized, or the one after the other."""
    if args.quantize is not None and args.dtype != "auto":
        raise RequestError(f"--dtype {args.dtype} and --quantize {args.quantize} say different things; leave one out")
    if args.sparsify is not None and args.quantize is None and args.dtype not in ("auto", "float32"):
        raise RequestError(f"--sparsify works in float32; leave --dtype {args.dtype} out")
    if args.sparsify is None:
        from ..quantization.loading import load_quantized

        model, tokenizer, report = load_quantized(args.model, args.quantize, device, backend=args.backend)
    else:
        from ..sparsity.loading import load_sparse

        model, tokenizer, sparse, report = load_sparse(
            args.model, args.sparsify, device, args.quantize, backend=args.backend
        )
        say(f"{sparse.sparsity.name}: {sparse.fraction:.1%} of {sparse.weights / 1e6:.1f} million weights are zero")
    if report is not None:
        say(f"{report.scheme}: {size_text(report.stored_bytes)} of weights, {report.bits_per_weight:.2f} bits each")
    return model, tokenizer


def load_tokenizer(source: str | None) -> Tokenizer:
    """The tokenizer alone; the weights of the model stay unread. Raises MinillmError."""
    from ..fetch import locate
    from ..gguf_header import read_gguf
    from ..tokenizer import Tokenizer

    path = locate(source)  # none of these needs torch, so the answer comes at once
    return Tokenizer.from_gguf(read_gguf(path)[0]) if path.is_file() else Tokenizer.from_file(path)


def collect(chunks: Iterable[Chunk], answer: Completion, started: float) -> Iterator[str]:
    """Passes on the text of each chunk and notes token and time in `answer`; `started` is of time.perf_counter."""
    for chunk in chunks:
        answer.token_times.append(time.perf_counter() - started)
        answer.tokens.append(chunk.token)
        answer.text += chunk.text
        answer.finish_reason, answer.stop_reason = chunk.finish_reason, chunk.stop_reason
        yield chunk.text


def show(texts: Iterable[str]) -> None:
    """Prints pieces of text as they come."""
    for text in texts:
        sys.stdout.write(text)
        sys.stdout.flush()


def completion_values(completion: Completion) -> dict[str, Any]:
    """One answer as plain values. Times are seconds."""
    values = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "prompt_tokens": len(completion.prompt_token_ids),
        "output_tokens": len(completion.token_ids),
        "ttft_s": completion.ttft_s,
        "tpot_s": completion.tpot_s,
        "prompt_token_ids": completion.prompt_token_ids,
    }
    if completion.tokens and completion.tokens[0].logprob is not None:
        values["logprobs"] = [
            {"token_id": token.id, "logprob": token.logprob, "top": [list(pair) for pair in token.top_logprobs]}
            for token in completion.tokens
        ]
    return values


def print_json(values: dict[str, Any]) -> None:
    """One object, indented; a number that JSON has no word for becomes null."""
    print(json.dumps(_finite(values), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_rows(title: str, rows: Iterable[tuple[str, str, str]], width: int = 28) -> None:
    """A titled block of (label, value, remark), values aligned on the right."""
    print(title)
    for label, value, remark in rows:
        print(f"  {label:<{width}}{value:>14}  {remark}".rstrip())


def say(text: str) -> None:
    """A message beside the result: on stderr, so that stdout is the result alone."""
    print(text, file=sys.stderr, flush=True)


def size_text(count: float) -> str:
    """Bytes in decimal units: 98362432 -> "98.4 MB"."""
    if abs(count) >= 1e18:
        return f"{Decimal(count) / 10**12:.2e} TB"  # an integer may be too large for a float
    for unit, power in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= power:
            return f"{count / power:.2f} {unit}" if power >= 1e9 else f"{count / power:.1f} {unit}"
    return f"{count:.0f} B"


def time_text(seconds: float | None) -> str:
    """Seconds as a reader says them: 0.0182 -> "18.2 ms"."""
    if seconds is None:
        return "-"
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{seconds * 1e3:.3g} ms"
        if seconds >= 1e-3
        else f"{seconds * 1e6:.3g} us"
    )


def error_line(error: BaseException) -> str | None:
    """What went wrong in one printable line; None for an error that is minillm's own fault and needs its traceback."""
    text = str(error)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in text):
        text = "not enough memory; try a smaller model, fewer --max-tokens or --dtype float16, or close other programs"
    elif isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("minillm"):
        text = f"the package {error.name} is not installed; pip install -r requirements.txt, or ask the doctor command"
    elif isinstance(error, OSError) and error.strerror:
        names = [short(name, _PATH) for name in (error.filename, error.filename2) if name is not None]
        text = ": ".join([*names, error.strerror])
    elif not isinstance(error, MinillmError | OSError):
        return None
    return one_line(text)


def one_line(text: object, limit: int = 1000) -> str:
    """The text as a message may show it. Names from damaged files end up there: no line breaks, nothing that a
    terminal would obey, and no more than `limit` characters."""
    line = " ".join(str(text).split())
    line = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in line)
    return short(line, limit)
