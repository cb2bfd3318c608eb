"""One job, of this machine or of a cluster."""

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from megatronapp.client.hub import Hub
from megatronapp_common.errors import JobError
from megatronapp_common.job import MegatronJob, Status, load_stored_job, read_status
from megatronapp_common.job.profiles.effective import FieldOrigin, LayeredJob, field_origins
from megatronapp_operator.cli.jobs import JobHandle, JobLookup
from megatronapp_operator.cli.logs import LogSelection
from megatronapp_operator.cli.wait import WaitCondition, named_condition, wait_for
from megatronapp_operator.errors import ManifestError, OperatorError

logger = logging.getLogger("megatronapp.client")


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """Address that logs a browser in once at the page of a job."""

    address: str


class JobPlace(JobLookup, Protocol):
    """Machine or namespace of a cluster that has jobs. Every method raises OperatorError."""

    POLL_S: float

    def submit(self, job: MegatronJob, document: Mapping[str, Any], profiles: Sequence[str]) -> str:
        """Store or start a job, written as `document`, over the profiles of these files; return its name."""

    def layers(self, name: str) -> LayeredJob:
        """Return the layers of the spec of a job."""

    def delete(self, name: str, *, force: bool) -> None:
        """Stop a job and delete it. Raises JobNotFoundError."""

    def log(self, name: str, selection: LogSelection, *, follow: bool) -> Iterator[str]:
        """Yield the lines of a log, with `follow` until the job has ended."""

    def hub(self, name: str) -> AbstractContextManager[Hub]:
        """Connect to the hub of a job."""

    def page(self, name: str) -> AbstractContextManager[Page]:
        """Connect to the page of a job."""

    def close(self) -> None:
        """Close the connection to the place."""


class Job:
    """One job. Properties ask again each time; all raise JobNotFoundError once the job is deleted."""

    def __init__(self, place: JobPlace, name: str) -> None:
        self._place = place
        self.name = name

    def __repr__(self) -> str:
        return f"Job({self.name!r})"

    def _view(self) -> JobHandle:
        return self._place.view(self.name)

    @property
    def document(self) -> dict[str, Any]:
        """MegatronJob as JSON, status included."""
        return self._view().document

    @property
    def manifest(self) -> MegatronJob:
        """MegatronJob without its status, typed. Raises ManifestError for a job that this release cannot read."""
        document = {key: value for key, value in self.document.items() if key != "status"}
        try:
            return load_stored_job(document)[0]
        except JobError as error:
            raise ManifestError(str(error)) from error

    @property
    def fields(self) -> list[FieldOrigin]:
        """All fields of the effective spec, each with its value and its origin: `job`, a profile, or `default`."""
        return field_origins(self._place.layers(self.name))

    @property
    def status(self) -> Status:
        """Status of the job, typed: phase, conditions, progress, slow ranks, failures."""
        return read_status(self._view().status)

    @property
    def phase(self) -> str:
        """Phase of the job, such as Running or Succeeded."""
        return self._view().phase

    @property
    def ended(self) -> bool:
        """True if the job does not change any more by itself."""
        return self._view().ended

    def wait(self, condition: str = "Complete", status: str = "True", *, timeout_s: float | None = None) -> Status:
        """Wait until a condition has a status, and return the status of the job.

        `condition`: Complete, Running, Failed or another type of `status.conditions`, in any case. Raises OperatorError
        if the job ends in another way, or after `timeout_s` seconds. An API server that fails for a while after the
        first request is asked again; the logger `megatronapp.client` warns of it.
        """
        self._wait_for(named_condition(condition, status, place="wait"), timeout_s)
        return self.status

    def wait_deleted(self, *, timeout_s: float | None = None) -> None:
        """Wait until the job is deleted. Raises OperatorError after `timeout_s` seconds."""
        self._wait_for(WaitCondition(""), timeout_s)

    def _wait_for(self, condition: WaitCondition, timeout_s: float | None) -> None:
        if timeout_s is not None and timeout_s < 0:
            raise OperatorError(f"timeout_s={timeout_s:g}: write 0 or more seconds, or None to wait without end")
        limit = -1.0 if timeout_s is None else timeout_s
        wait_for(self._place, self.name, condition, timeout_s=limit, poll_s=self._place.POLL_S, report=logger.warning)

    def logs(
        self,
        *,
        rank: int | None = None,
        worker: int | None = None,
        attempt: int | None = None,
        follow: bool = False,
    ) -> Iterator[str]:
        """Yield the lines of a log: of a rank, by default of the one that reports the loss, or of a worker's launcher.

        With `follow`, until the job has ended, later attempts included. On a cluster the log of an attempt is deleted
        with its pods; attempts restarted in place share the log of their pod, of which `attempt` selects a part. The
        first line raises OperatorError for a rank, worker or attempt that does not exist.
        """
        if rank is not None and worker is not None:
            raise OperatorError("logs: rank and worker select different logs; omit one of them")
        return self._place.log(self.name, LogSelection(rank=rank, worker=worker, attempt=attempt), follow=follow)

    def hub(self) -> AbstractContextManager[Hub]:
        """Connect to the job's hub: verdicts, curves, traces. On a cluster through the gateway, by a forwarded port.

        Raises HubError if the job has no hub now, or the gateway refuses.
        """
        return self._place.hub(self.name)

    def page(self) -> AbstractContextManager[Page]:
        """Connect to the job's page, and return an address that logs a browser in once.

        On a cluster the page is reachable until the context ends. Raises HubError as above.
        """
        return self._place.page(self.name)

    def delete(self, *, force: bool = False) -> None:
        """Stop the job and delete it; its checkpoints stay. With `force`, no checkpoint is written first."""
        self._place.delete(self.name, force=force)
