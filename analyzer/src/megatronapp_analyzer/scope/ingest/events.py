"""Events of ingest, for services that request more from rank 0."""

from typing import Protocol

from megatronapp_analyzer.scope.store.run import ScopeRun


class ScopeEvents(Protocol):
    """Called on the event loop, after the hub's own state has changed."""

    def engine_started(self) -> None:
        """Rank 0 publishes, for the first time or again."""

    def tokens_missing(self, run: ScopeRun) -> None:
        """The hub has not seen some tokens of a run."""

    def prefill_shown(self, run: ScopeRun) -> None:
        """Pages have the first step of a run."""

    def basis_unknown(self, run: ScopeRun) -> None:
        """Coordinates in the newest basis follow, and pages that watch the run do not have that basis yet."""

    def coordinates_shown(self, run: ScopeRun) -> None:
        """Pages have a step with coordinates, or the run has ended."""


class IgnoredEvents:
    """Events without effect, where no model can be asked."""

    def engine_started(self) -> None:
        pass

    def tokens_missing(self, run: ScopeRun) -> None:
        pass

    def prefill_shown(self, run: ScopeRun) -> None:
        pass

    def basis_unknown(self, run: ScopeRun) -> None:
        pass

    def coordinates_shown(self, run: ScopeRun) -> None:
        pass
