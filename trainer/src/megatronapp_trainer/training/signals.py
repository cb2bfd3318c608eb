"""Graceful stop: SIGTERM and SIGINT set a flag that the loop checks at step boundaries, and `END_AT_CHECKPOINT` sets
another, which it checks at those where a checkpoint is due. `SAVE` asks for a checkpoint at the next boundary.

An order to end with a checkpoint may be withdrawn. The launcher sends the same signal then, and the order is read where
the launcher has read it: of two signals that arrive while a step computes, Python runs one handler.
"""

import os
import pathlib
import signal
from collections.abc import Mapping
from types import FrameType, TracebackType

from megatronapp_common.attempt_order import ends_at_checkpoint
from megatronapp_common.names import Env
from megatronapp_trainer.parallel.peer_loss import END_AT_CHECKPOINT, SAVE


class StopRequest:
    """Context manager: while it is entered, the signals only set flags. A second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.requested = False
        self.at_checkpoint = False
        """True if the training is to end with its next checkpoint."""
        self.save = False
        """True if a checkpoint is to be written at the next boundary; the loop resets it."""
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> "StopRequest":
        """Install the signal handlers."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._on_signal)
        self._previous[END_AT_CHECKPOINT] = signal.signal(END_AT_CHECKPOINT, self._on_end_at_checkpoint)
        self._previous[SAVE] = signal.signal(SAVE, self._on_save)
        for number in (END_AT_CHECKPOINT, SAVE):
            signal.siginterrupt(number, False)  # training goes on, so no system call of a library may fail
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the previous handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def request(self) -> None:
        """Ask to stop, as a signal does."""
        self.requested = True

    def _on_end_at_checkpoint(self, _number: int, _frame: FrameType | None) -> None:
        self.at_checkpoint = _is_ordered(os.environ)

    def _on_save(self, _number: int, _frame: FrameType | None) -> None:
        self.save = True

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True


def _is_ordered(environment: Mapping[str, str]) -> bool:
    """Return True if this attempt is to end with its next checkpoint; without a file of orders the signal says so."""
    path, attempt = environment.get(Env.ATTEMPT_FILE), environment.get(Env.ATTEMPT)
    return path is None or attempt is None or ends_at_checkpoint(pathlib.Path(path), attempt=int(attempt))
