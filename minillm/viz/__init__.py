"""Pictures, tables, the ledger of predictions, and the shipped source: what the notebooks show.

Plain data in, a Figure or `Html` out; nothing here imports torch. `figures` has the pictures, `widgets` the controls.
"""

from . import figures
from .ledger import LedgerError, entries, ledger, predict, reveal, start_chapter
from .show import ShowError, show
from .style import set_style
from .tables import Html, emit, table
from .units import human
from .widgets import RooflineData, RooflineExplorer, explore

__all__ = [
    "Html",
    "LedgerError",
    "RooflineData",
    "RooflineExplorer",
    "ShowError",
    "emit",
    "entries",
    "explore",
    "figures",
    "human",
    "ledger",
    "predict",
    "reveal",
    "set_style",
    "show",
    "start_chapter",
    "table",
]
