"""Conversion of a MegatronJob to the settings of the process backend."""

import os
import pathlib
import sys
from typing import Any

from megatronapp_common.job import FbdRanks, MegatronJob, Serve, megatron_arguments
from megatronapp_common.state import jobs_dir
from megatronapp_operator.backends.process.settings import ProcessCommands, ProcessSettings
from megatronapp_operator.backends.process.state.paths import JobPaths, shm_dir

FRONTEND_ENV = "MEGATRONAPP_FRONTEND"
CHECKOUT = pathlib.Path(__file__).parents[5]


def build_commands(job: MegatronJob) -> ProcessCommands:
    """Return the commands of the other distributions for this job."""
    python = (sys.executable, "-m")
    rank = ("--program=-m megatronapp_trainer.serve",) if job.spec.mode == "serve" else ()
    check = "megatronapp_trainer.serve.check" if job.spec.mode == "serve" else "megatronapp_trainer.training.check"
    private = job.spec.analyzer.host.startswith("127.")
    allow = ("--jobs-dir", str(jobs_dir())) if private else ("--allow-remote",)
    arguments, ranks = megatron_arguments(job), str(job.world.world_size)
    return ProcessCommands(
        check=(*python, check, "--world-size", ranks, "--", *arguments),
        launcher=(*python, "megatronapp_trainer.launch", *rank, "--", *arguments),
        agent=(*python, "megatronapp_analyzer.agent"),
        hub=(*hub_command(), *allow),
    )


def hub_command() -> tuple[str, ...]:
    """Return the command of a hub, with the page if it is built."""
    return (sys.executable, "-m", "megatronapp_analyzer.hub", *frontend_arguments())


def frontend_arguments() -> tuple[str, ...]:
    """Return the hub's flag for the built page: that of the environment, or of the checkout of this package."""
    folder = pathlib.Path(os.environ.get(FRONTEND_ENV) or CHECKOUT / "frontend" / "dist")
    return ("--frontend", str(folder)) if (folder / "index.html").exists() else ()


def build_settings(job: MegatronJob, *, uid: str, paths: JobPaths, commands: ProcessCommands) -> ProcessSettings:
    """Return the settings of the process backend for a job."""
    return ProcessSettings(
        name=job.metadata.name,
        uid=uid,
        world=job.world,
        env={entry.name: entry.value for entry in job.spec.env},
        commands=commands,
        paths=paths,
        shm=shm_dir(),
        analyzer=job.spec.analyzer.enabled,
        hub_host=job.spec.analyzer.host,
        hub_port=job.spec.analyzer.port,
        serve=serve_place(job),
    )


def serve_place(job: MegatronJob) -> tuple[str, int] | None:
    """Return address and port of the API of a job that serves; None if it trains."""
    if job.spec.mode != "serve":
        return None
    given = job.spec.serve or Serve()
    return given.host, given.port


def build_facts(job: MegatronJob) -> dict[str, Any]:
    """Return the part of the status that follows from the spec alone."""
    world = job.world
    return {
        "world_size": world.world_size,
        "data_parallel_size": world.data_parallel_size,
        "fbd": FbdRanks.of(world.fbd),
    }
