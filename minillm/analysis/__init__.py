"""What a step costs and how fast it could be: FLOPs, bytes, roofline, memory budget, profile.

`costs` counts, `hardware` and `ceilings` know the two roofs, `roofline` joins the two, `memory` says what fits,
`models` names real configs, `profile` compares with the clock. Importing this package does not load torch.
"""

from .ceilings import measure, this_machine
from .costs import OPERATORS, OpCost, Precision, Step, distinct_experts, step_costs, total, visible_pairs
from .formats import Format, bytes_per_element, format_of
from .hardware import HARDWARE, Hardware, find_hardware
from .kv_size import kv_bytes, kv_bytes_per_token, kv_row_bytes
from .memory import MemoryBudget, MemoryPlan, budget
from .models import MODELS, ModelEntry, find_model, model_config
from .parameters import ParameterCount, parameter_count, weight_bytes, weight_table
from .profile import ProfileTable, profile_step
from .roofline import (
    Pair,
    Point,
    Prediction,
    StepTime,
    critical_batch,
    join,
    point,
    predict,
    predict_op,
    predict_step,
    roof,
    step_time,
)

__all__ = [
    "HARDWARE", "MODELS", "OPERATORS", "Format", "Hardware", "MemoryBudget", "MemoryPlan", "ModelEntry", "OpCost",
    "Pair", "ParameterCount", "Point", "Precision", "Prediction", "ProfileTable", "Step", "StepTime", "budget",
    "bytes_per_element", "critical_batch", "distinct_experts", "find_hardware", "find_model", "format_of", "join",
    "kv_bytes", "kv_bytes_per_token", "kv_row_bytes", "measure", "model_config", "parameter_count", "point", "predict",
    "predict_op", "predict_step", "profile_step", "roof", "step_costs", "step_time", "this_machine", "total",
    "visible_pairs", "weight_bytes", "weight_table",
]  # fmt: skip
