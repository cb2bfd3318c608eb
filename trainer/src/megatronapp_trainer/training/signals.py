"""Graceful stop: SIGTERM and SIGINT set a flag that the loop checks at step boundaries, and `END_AT_CHECKPOINT` sets
another, which it checks at those where a checkpoint is due. `SAVE` asks for a checkpoint at the next boundary.
"""

import signal
from types import FrameType, TracebackType

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
        self.at_checkpoint = True

    def _on_save(self, _number: int, _frame: FrameType | None) -> None:
        self.save = True

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
