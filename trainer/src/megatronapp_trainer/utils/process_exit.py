"""End of a rank's process, with an exit code that can be relied on."""

import os
import sys
from typing import NoReturn


def exit_process(code: int) -> NoReturn:
    """End this process with this exit code; after an error without Python's finalization.

    After an error the process groups of torch still have threads. Up to Python 3.13, one that returns to Python during
    finalization aborts the process ("terminate called without an active exception"), and the launcher would see SIGABRT
    in place of the code that says what happened.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if code != 0:
        os._exit(code)
    sys.exit(code)
