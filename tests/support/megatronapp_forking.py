"""`megatronapp` for jobs whose ranks, agents and hub are forked from the fork server; backend and launchers are real.

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


def forked_commands(job: MegatronJob) -> ProcessCommands:
    """Return the commands of a job with another program for agents, for the hub and, by the launcher, for ranks."""
    commands = build_commands(job)
    flags = commands.launcher.index("--")
    module = "megatronapp_trainer.serve" if job.spec.mode == "serve" else "megatronapp_trainer.pretrain"
    program = f"--program={sys.argv[1]} -m {module}"
    launcher = (*commands.launcher[:flags], program, *commands.launcher[flags:])
    python = (sys.executable, *sys.argv[1].split())
    hub, agent = (*python, *commands.hub[1:]), (*python, *commands.agent[1:])
    return dataclasses.replace(commands, launcher=launcher, hub=hub, agent=agent)


if __name__ == "__main__":
    backend.TICK_S = 0.1
    run.build_commands = forked_commands  # type: ignore[attr-defined]
    sys.exit(main(sys.argv[2:]))
