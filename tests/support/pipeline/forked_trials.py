"""A launcher whose trials of paths are forked from the fork server, without 3 s of imports each.

    python forked_trials.py "PYTHON ARGUMENT..." LAUNCHER_ARGUMENT...

The first argument is `forkserver.python()`, which replaces the interpreter in `python -m MODULE`; see `forked_python`.
"""

import pathlib
import sys
from collections.abc import Mapping, Sequence

from megatronapp_trainer.launch.main import main
from megatronapp_trainer.launch.ranks import process


def install(python: Sequence[str]) -> None:
    """Let this process start modules with another command; programs in files keep the interpreter."""
    spawn = process.spawn

    def spawn_forked(command: Sequence[str], *, environment: Mapping[str, str], log: pathlib.Path) -> int:
        forked = [*python, *command[1:]] if command[1] == "-m" else command
        return spawn(forked, environment=environment, log=log)

    process.spawn = spawn_forked


if __name__ == "__main__":
    install(sys.argv.pop(1).split())
    sys.exit(main())
