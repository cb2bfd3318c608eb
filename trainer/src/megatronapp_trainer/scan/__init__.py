"""MegaScan in the trainer: writes the spans of each step to the rank's ring, and injects faults for demonstrations.

Imported only when tracing is on. Once training runs, nothing here blocks, synchronises a device, or runs a collective.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatronapp_trainer.scan.observer import ScanObserver
    from megatronapp_trainer.scan.run_context import RunContext


def start(context: "RunContext") -> "ScanObserver":
    """Create the ring of this rank and the observer that fills it.

    Raises UsageError for invalid faults.
    """
    from megatronapp_trainer.scan.assemble import assemble

    return assemble(context)
