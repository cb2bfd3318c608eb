"""Hub for the stored state of a job that has ended."""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence

from megatronapp_common.names import Env
from megatronapp_common.processes import terminate
from megatronapp_common.state import jobs_dir
from megatronapp_common.web.loopback import V4
from megatronapp_operator.backends.process.ports import ReservedPort
from megatronapp_operator.backends.process.spawn import inherited_environment, spawn
from megatronapp_operator.backends.process.state.registry import JobView

STOP_S = 8.0
"""Seconds for the hub to end after SIGTERM."""


@contextlib.contextmanager
def stored_hub(job: JobView, command: Sequence[str]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a hub on a free port within the context; yield its address and its process."""
    paths = job.paths
    port = ReservedPort(V4, pages=True)
    arguments = (
        *("--host", V4, "--port", str(port.number), "--job-file", str(paths.manifest)),
        *("--state-dir", str(paths.hub_state), "--status-file", str(paths.status), "--jobs-dir", str(jobs_dir())),
    )
    own = {Env.JOB: job.name, Env.SECRET_FILE: str(paths.secret), "PYTHONUNBUFFERED": "1"}
    with contextlib.closing(port):
        process = spawn((*command, *arguments), environment={**inherited_environment(), **own}, log=paths.hub_log)
        try:
            yield f"http://{V4}:{port.number}", process
        finally:
            terminate(process, STOP_S)
