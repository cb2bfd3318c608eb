"""Calls that may block for long, in threads that the end of the command does not wait for."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def start_in_daemon_thread(function: Callable[[], Result]) -> Future[Result]:
    """Call a function in a new thread; return the future of its result."""
    result: Future[Result] = Future()

    def call() -> None:
        if result.set_running_or_notify_cancel():
            try:
                result.set_result(function())
            except Exception as error:
                result.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return result
