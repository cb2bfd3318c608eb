"""`megatronapp` for jobs whose ranks are forked from the fork server, with a real backend, launchers, agents and hub.

`command(forkserver.python())` replaces `python -m megatronapp_common.cli`; see `forked_python` for what differs.
"""

import dataclasses
import sys
from collections.abc import Sequence

from megatronapp_common.cli import main
from megatronapp_common.job import MegatronJob
from megatronapp_operator.backends.process import backend
from megatronapp_operator.backends.process.settings import ProcessCommands
from megatronapp_operator.backends.process.settings_builder import build_commands
from megatronapp_operator.cli import run


def command(python: Sequence[str]) -> list[str]:
    """Return the command to put before the arguments of `megatronapp`."""
    interpreter, *program = python
    return [interpreter, __file__, " ".join(program)]


def with_forked_ranks(job: MegatronJob) -> ProcessCommands:
    """Return the commands of a job, of which the launcher has another program for ranks."""
    commands = build_commands(job)
    flags = commands.launcher.index("--")
    module = "megatronapp_trainer.serve" if job.spec.mode == "serve" else "megatronapp_trainer.pretrain"
    program = f"--program={sys.argv[1]} -m {module}"
    return dataclasses.replace(commands, launcher=(*commands.launcher[:flags], program, *commands.launcher[flags:]))


if __name__ == "__main__":
    backend.TICK_S = 0.1
    run.build_commands = with_forked_ranks  # type: ignore[attr-defined]
    sys.exit(main(sys.argv[2:]))
