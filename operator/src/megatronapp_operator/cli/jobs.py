"""Interfaces of jobs on this machine or a cluster, for the subcommands."""

from collections.abc import Sequence
from typing import Any, Protocol


class JobHandle(Protocol):
    """One job, of this machine or of a cluster."""

    @property
    def name(self) -> str:
        """Name of the job."""

    @property
    def document(self) -> dict[str, Any]:
        """MegatronJob as JSON, status included."""

    @property
    def status(self) -> dict[str, Any]:
        """Status of the job."""

    @property
    def phase(self) -> str:
        """Phase of the job."""

    @property
    def ended(self) -> bool:
        """True if the job does not change any more by itself."""


class JobLookup(Protocol):
    """Source of jobs. Both methods raise OperatorError."""

    def view(self, name: str) -> JobHandle:
        """Return the current state of the job of this name. Raises JobNotFoundError."""

    def views(self) -> Sequence[JobHandle]:
        """Return all jobs, by name."""
