"""MegaScope in one hub without its HTTP interface: from frames of ranks to frames for pages."""

import time
from collections.abc import Callable

from megatronapp_analyzer.scope.delivery.viewer_feed import ViewerFeed
from megatronapp_analyzer.scope.ingest.events import IgnoredEvents, ScopeEvents
from megatronapp_analyzer.scope.ingest.frame_ingest import FrameIngest
from megatronapp_analyzer.scope.parts.probe_tracker import ProbeTracker
from megatronapp_analyzer.scope.settings import ScopeSettings
from megatronapp_analyzer.scope.store.memory_budget import MemoryBudget
from megatronapp_analyzer.scope.store.pca_versions import PcaVersions
from megatronapp_analyzer.scope.store.publishers import PublisherRegistry
from megatronapp_analyzer.scope.store.run_store import RunStore


class ScopeCore:
    """Creates the parts and connects them. `clock` gives seconds."""

    def __init__(
        self,
        settings: ScopeSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        events: ScopeEvents | None = None,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.publishers = PublisherRegistry()
        self.runs = RunStore(settings.runs, MemoryBudget(settings.ring_bytes))
        self.probes = ProbeTracker()
        self.pca = PcaVersions()
        self.feed = ViewerFeed(settings, self.publishers, self.runs)
        self.ingest = FrameIngest(
            publishers=self.publishers,
            probes=self.probes,
            feed=self.feed,
            pca=self.pca,
            clock=clock,
            events=events or IgnoredEvents(),
        )
