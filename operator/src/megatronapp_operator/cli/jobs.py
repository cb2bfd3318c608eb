"""Jobs as the subcommands see them, wherever they run."""

from collections.abc import Sequence
from typing import Any, Protocol


class JobHandle(Protocol):
    """One job: of this machine, or of a cluster."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def document(self) -> dict[str, Any]:
        """The MegatronJob, status included."""

    @property
    def status(self) -> dict[str, Any]:
        """Its status."""

    @property
    def phase(self) -> str:
        """Its phase."""

    @property
    def ended(self) -> bool:
        """Whether nothing more happens by itself."""


class JobLookup(Protocol):
    """Where jobs are looked up. Both methods raise OperatorError."""

    def view(self, name: str) -> JobHandle:
        """The job of this name, as it is now. Raises JobNotFoundError."""

    def views(self) -> Sequence[JobHandle]:
        """All jobs, by name."""
