"""`python -m minillm quantize`: writes a quantized model to a folder."""

from __future__ import annotations

import argparse

from ..storage import new_folder
from . import common

EXAMPLES = """
python -m minillm quantize --quantize gptq-int4-g128 --out smollm2-int4
python -m minillm quantize --quantize int8 --model path/to/model --out model-int8
"""


def add_parser(commands) -> None:
    parser = common.add_command(
        commands,
        "quantize",
        run,
        "write a quantized model to a folder",
        EXAMPLES,
        description="Quantize a model and write it as safetensors in compressed-tensors' naming, with config.json and "
        "tokenizer.json: a folder that --model takes.",
    )
    parser.add_argument("--out", metavar="FOLDER", required=True, help="a folder that is new or empty")
    common.add_model_options(parser, quantize="required")


def run(args: argparse.Namespace) -> int:
    folder = new_folder(args.out, "--out")
    common.refuse_compile(args, "writes weights, which compiling does not change")
    model, tokenizer = common.load(args)
    from ..quantization.saving import save_quantized

    size = save_quantized(model, folder, tokenizer)
    print(f"{folder}: {common.size_text(size)}; python -m minillm chat --model {folder}")
    return 0
