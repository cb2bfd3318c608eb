"""End of a rank's process, with an exit code that can be relied on."""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Run `main` and end this process with the code that it returns; after an error without Python's finalization.

    After an error the process groups of torch still have threads. Up to Python 3.13, one that returns to Python during
    finalization aborts the process ("terminate called without an active exception"), and the launcher would see SIGABRT
    in place of the code that says what happened. An exception that `main` raises is printed and ends with code 1.
    """
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, a reader that has left, a closed stream
            stream.flush()
    if code != 0:
        os._exit(code)
    sys.exit(code)
