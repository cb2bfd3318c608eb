"""Graceful stop: SIGTERM and SIGINT set a flag that the loop checks at step boundaries."""

import signal
from types import FrameType, TracebackType


class StopRequest:
    """Context manager: while it is entered, the signals only set ``requested``. A second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> "StopRequest":
        """Install the signal handlers."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._on_signal)
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

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
