"""Jobs of this user on this machine."""

import contextlib
import json
import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx

from megatronapp.client.hub import Hub
from megatronapp.client.job import Page
from megatronapp_common.job import MegatronJob
from megatronapp_common.job.profiles.effective import LayeredJob
from megatronapp_operator.backends.process.state import registry
from megatronapp_operator.backends.process.state.registry import JobView
from megatronapp_operator.cli.addresses import controller_access, hub_access, page_address
from megatronapp_operator.cli.delete import delete
from megatronapp_operator.cli.describe import local_layers
from megatronapp_operator.cli.logs import LogSelection, OpenLog
from megatronapp_operator.cli.manifest import BAD_MANIFEST_EXIT_CODE
from megatronapp_operator.cli.run import runnable
from megatronapp_operator.cli.ui import wait_ready
from megatronapp_operator.errors import HubError, JobConflictError, ManifestError, OperatorError

ANSWER_S = 120.0
"""Seconds for an answer of the hub, which may have to read its disk."""
logger = logging.getLogger("megatronapp.client")
COMMAND = (sys.executable, "-m", "megatronapp_common.cli")


class LocalJobs:
    """Jobs in the state folder of this user."""

    POLL_S = 0.2

    def view(self, name: str) -> JobView:
        """Return the current state of a job. Raises JobNotFoundError."""
        return registry.view(name)

    def views(self) -> Sequence[JobView]:
        """Return all jobs, by name."""
        return registry.views()

    def layers(self, name: str) -> LayeredJob:
        """Return the layers of the spec of a job. Raises JobNotFoundError or OperatorError."""
        return local_layers(registry.view(name))

    def submit(self, job: MegatronJob, document: Mapping[str, Any], profiles: Sequence[str]) -> str:
        """Start a job in a separate process; return its name, and log the notes and warnings about it.

        Raises ManifestError, JobConflictError (a job of this name, or with this checkpoint folder, is running) or
        OperatorError. The command runs in a new interpreter, because a process with threads, such as a notebook's, must
        not be forked.
        """
        runnable(job)
        name = job.metadata.name
        _require_no_conflict(job)
        given = [option for profile in profiles for option in ("--profile", profile)]
        started = subprocess.run(
            [*COMMAND, "run", "-", "--detach", *given],
            input=json.dumps(document),
            capture_output=True,
            text=True,
            check=False,
        )
        if started.returncode != 0:
            _require_no_conflict(job)  # with a job that began in the meantime
            lines = [line.removeprefix("error: ") for line in started.stderr.splitlines() if line.startswith("error: ")]
            problem = "\n".join(lines) or f"the command to run {name} failed ({started.returncode}): {started.stderr}"
            raise (ManifestError if started.returncode == BAD_MANIFEST_EXIT_CODE else OperatorError)(problem)
        for line in started.stderr.splitlines():
            if line.startswith(("note: ", "warning: ")):
                logger.warning("%s", line)
        return name

    def delete(self, name: str, *, force: bool) -> None:
        """Stop a job and delete it. Raises JobNotFoundError."""
        delete(registry.view(name), force=force)

    def log(self, name: str, selection: LogSelection, *, follow: bool) -> Iterator[str]:
        """Yield the lines of a log, with `follow` until the job has ended. Raises OperatorError."""
        log = OpenLog(registry.view(name), selection)
        if not follow:
            log.require()
            yield from log.lines()
            return
        for lines in log.following():
            yield from lines

    @contextlib.contextmanager
    def hub(self, name: str) -> Iterator[Hub]:
        """Connect to the hub of a job. Raises HubError."""
        url, token = controller_access(registry.view(name).paths)  # it is the caller's own job
        wait_ready(url)
        address = f"{url}/api/v1/"
        headers = {"Authorization": f"Bearer {token}"}
        with httpx.Client(base_url=address, timeout=ANSWER_S, trust_env=False, headers=headers) as client:

            def send(path: str, query: Mapping[str, str]) -> httpx.Response:
                try:
                    return client.get(path, params=query)
                except httpx.HTTPError as error:
                    raise HubError(f"{url}: the hub does not answer: {error}") from error

            yield Hub(send, address=url, token=token)

    @contextlib.contextmanager
    def page(self, name: str) -> Iterator[Page]:
        """Return the address of a job's page, which logs a browser in once. Raises HubError."""
        job = registry.view(name)
        url, _ = hub_access(job.paths)
        wait_ready(url)
        yield Page(page_address(job.paths, mode=job.document["spec"].get("mode")))

    def close(self) -> None:
        """Do nothing: no connection is held."""


def _require_no_conflict(job: MegatronJob) -> None:
    """Raise JobConflictError if a job of the same name, or one that saves to the same folder, is running."""
    name = job.metadata.name
    if any(other.name == name and other.alive and not other.ended for other in registry.views()):
        raise JobConflictError(f'megatronjobs.megatronapp.io "{name}" is running; delete it, or use another name')
    registry.require_own_checkpoints(job)
