"""Settings of the process backend for a job, besides the plan's: programs, addresses, environment."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping

from megatronapp_common.job import World
from megatronapp_common.names import Env
from megatronapp_common.text.run_length import format_run_lengths
from megatronapp_operator.backends.process.spawn import inherited_environment
from megatronapp_operator.backends.process.state.paths import JobPaths, shm_prefix


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessCommands:
    """Programs of a job, as argument lists."""

    launcher: tuple[str, ...]
    agent: tuple[str, ...]
    hub: tuple[str, ...]
    """Arguments before --host, --port, --job-file and --state-dir."""
    check: tuple[str, ...] = ()
    """Check that runs before anything is started; empty: none."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """Settings that stay the same over the attempts of a job."""

    name: str
    uid: str
    world: World
    """Ranks and their distribution over workers."""
    env: Mapping[str, str]
    commands: ProcessCommands
    paths: JobPaths
    shm: pathlib.Path
    analyzer: bool
    """True if the job has agents and a hub."""
    hub_host: str = "127.0.0.1"
    hub_port: int = 0
    """Port of the hub; 0: a free one."""
    serve: tuple[str, int] | None = None
    """Address and port (0: a free one) of the API of a served model; None: the job trains."""


def worker_address(index: int) -> str:
    """Return the loopback address of worker `index`: 127.0.0.2, 127.0.0.3, ... (127.0.0.1 is the hub's)."""
    last = 2 + index
    return f"127.{last >> 16}.{last >> 8 & 255}.{last & 255}"


def base_environment(settings: ProcessSettings) -> dict[str, str]:
    """Return the environment of every process of the job."""
    return {
        **inherited_environment(),
        **settings.env,
        Env.JOB: settings.name,
        Env.JOB_UID: settings.uid,
        Env.SECRET_FILE: str(settings.paths.secret),
        Env.SHM_DIR: str(settings.shm),
        "PYTHONUNBUFFERED": "1",
    }


def worker_environment(
    settings: ProcessSettings, *, index: int, attempt: int, coordinator: str, hub_url: str, serve: str = ""
) -> dict[str, str]:
    """Return the environment of the launcher of worker `index` and its agent; `serve` is host:port of the API."""
    run_dir = settings.paths.run_dir(attempt, index)
    environment = {
        **base_environment(settings),
        Env.ATTEMPT: str(attempt),
        Env.WORKER_INDEX: str(index),
        Env.NUM_WORKERS: str(settings.world.nodes),
        Env.PROC_PER_NODE: format_run_lengths(settings.world.proc_per_node),
        Env.COORDINATOR: coordinator,
        Env.ADDRESS: worker_address(index),
        Env.NODE_NAME: f"node-{index}",
        Env.SHM_PREFIX: shm_prefix(settings.uid, attempt, index),
        Env.RUN_DIR: str(run_dir),
        Env.TERMINATION_LOG: str(run_dir / "termination.json"),
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": ",".join(worker_devices(settings.world, index)),
    }
    if hub_url:
        environment[Env.HUB_URL] = hub_url
    if serve:
        environment[Env.SERVE_ADDRESS] = serve
    return environment


def worker_devices(world: World, index: int) -> list[str]:
    """Return the GPUs of this worker: workers on one machine must not use the same GPU."""
    first = sum(world.group_of(other).gpus_per_node for other in range(index))
    own = slice(first, first + world.group_of(index).gpus_per_node)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return visible.split(",")[own]
    return [str(number) for number in range(own.start, own.stop)]
