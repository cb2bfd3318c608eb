"""MegaScope in the hub: its core, and the services that ask rank 0."""

import contextlib
from collections.abc import AsyncIterator, Sequence

from megatronapp_analyzer.scope.core import ScopeCore
from megatronapp_analyzer.scope.delivery.limits import HUB, MAX_CALLERS, MAX_PAGES, REQUESTS, too_fast, too_many_pages
from megatronapp_analyzer.scope.delivery.session_download import download_limits
from megatronapp_analyzer.scope.probes.analyses import AnalysisService
from megatronapp_analyzer.scope.probes.branch_store import BranchStore
from megatronapp_analyzer.scope.probes.pca_service import PcaService
from megatronapp_analyzer.scope.probes.probe_client import ProbeClient
from megatronapp_analyzer.scope.probes.rank0_client import Rank0Client
from megatronapp_analyzer.scope.probes.scores import ScoreService
from megatronapp_analyzer.scope.probes.token_backfill import TokenBackfill
from megatronapp_analyzer.scope.settings import ScopeSettings
from megatronapp_analyzer.scope.store.run import TURNED, ScopeRun
from megatronapp_analyzer.scope.views import export_values
from megatronapp_common.scope.protocol_requests import Rotary
from megatronapp_common.web.concurrency_limits import ConcurrencyLimits
from megatronapp_common.web.problems import HttpError
from megatronapp_common.web.token_bucket import TokenBuckets


class _ModelRequests:
    """Follows events with requests to rank 0. The services that send them need the core, which needs its events."""

    def __init__(self, service: "ScopeService") -> None:
        self._service = service

    def engine_started(self) -> None:
        self._service.pca.give()
        self._service.backfill.refresh_runs()

    def tokens_missing(self, run: ScopeRun) -> None:
        self._service.backfill.want(run)

    def prefill_shown(self, run: ScopeRun) -> None:
        self._service.pca.after_prefill(run)

    def basis_unknown(self, run: ScopeRun) -> None:
        self._service.pca.introduce(run)

    def coordinates_shown(self, run: ScopeRun) -> None:
        self._service.pca.complete(run)


class ScopeService:
    """MegaScope of one hub. `client` None: no model generates here."""

    def __init__(self, settings: ScopeSettings, client: Rank0Client | None = None) -> None:
        self.core = ScopeCore(settings, events=_ModelRequests(self))
        self.probe_client = ProbeClient(self.core, client)
        self.pca = PcaService(self.probe_client)
        self.scores = ScoreService(self.probe_client)
        self.analyses = AnalysisService(self.probe_client)
        self.comparisons = BranchStore("comparisons", self.probe_client)
        self.sweeps = BranchStore("sweeps", self.probe_client)
        self.backfill = TokenBackfill(self.probe_client)
        self.pages = ConcurrencyLimits(HUB, MAX_PAGES, refuse=too_many_pages)
        self.sessions = download_limits()
        self.requests = REQUESTS
        """Requests of one caller."""
        self._buckets = TokenBuckets(MAX_CALLERS)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run until left; then stop connections and timers."""
        try:
            yield
        finally:
            self.core.ingest.close()
            await self.pca.close()
            await self.scores.close()
            await self.analyses.close()
            await self.comparisons.close()
            await self.sweeps.close()
            await self.backfill.close()
            if self.probe_client.client is not None:
                await self.probe_client.client.close()

    def count_request(self, caller: str, turns: int = 1) -> None:
        """Count a request that costs as much as `turns` plain ones. Raises HttpError 429 for a caller with too many."""
        short = self._buckets.consume({caller: self.requests}, self.core.clock(), turns)
        if short is not None:
            raise too_fast(short.wait_s)

    def whole(self, run: ScopeRun) -> ScopeRun:
        """Return the run if the hub has all its tokens. Raises HttpError 409 or 503 otherwise."""
        self.backfill.check(run)
        return run

    def rotation_of(self, site: str, rotary: Rotary) -> Rotary:
        """Return which of `q` and `k` is meant: without rotary positions both are the same. Raises HttpError 422."""
        if rotary == "before" and site not in TURNED:
            raise HttpError(422, "invalid-request", f"rotary: {site} is not turned", "Leave it out; it is of q and k.")
        model = self.core.publishers.model
        return "after" if model is not None and model["positions"] != "rotary" else rotary

    def check_sample(self, run: ScopeRun, sample: int) -> None:
        """Raise HttpError 404 for a prompt that the run does not have."""
        self._check(run, sample, None, None)

    def check_head(self, run: ScopeRun, sample: int, layer: int, head: int) -> None:
        """Raise HttpError 404 for a sample, layer or head that does not exist."""
        self._check(run, sample, layer, head)

    def _check(self, run: ScopeRun, sample: int, layer: int | None, head: int | None, *, heads: str = "heads") -> None:
        if not run.has_sample(sample):
            raise HttpError(404, "outside", f"there is no prompt {sample}", f"The run has {len(run.tokens)}, from 0.")
        model = self.core.publishers.model
        if model is None:
            return
        for name, value, count in (("layer", layer, model["layers"]), ("head", head, model[heads])):
            if value is not None and value >= count:
                raise HttpError(404, "outside", f"there is no {name} {value}", f"The model has {count}, from 0.")

    def check_site(self, run: ScopeRun, site: str, where: tuple[int, int | None, int | None]) -> None:
        """Raise HttpError for a site that does not exist, or that needs other coordinates."""
        sample, layer, head = where
        if site not in export_values.SITES | self.core.publishers.sites:
            names = ", ".join(sorted(export_values.SITES | self.core.publishers.sites))
            raise HttpError(404, "no-such-site", f"there is no site {site!r}", f"Take one of {names}.")
        self._check(run, sample, layer, head, heads="keyHeads" if site in {"k", "v"} else "heads")
        if site not in export_values.SITES:
            return
        for name, value, needed in (
            ("layer", layer, site not in export_values.LAYERLESS),
            ("head", head, site in export_values.HEADED),
        ):
            if needed != (value is not None):
                word = "needs a" if needed else "has no"
                raise HttpError(
                    422, "invalid-request", f"{name}: {site} {word} {name}", "See docs/scope-protocol.md, 2."
                )

    def check_layers(self, layers: Sequence[int]) -> list[int]:
        """Return the layers without repetition. Raises HttpError 404 for one that does not exist."""
        model = self.core.publishers.model
        if model is not None and max(layers) >= model["layers"]:
            raise HttpError(404, "outside", f"there is no layer {max(layers)}", f"The model has {model['layers']}.")
        return sorted(set(layers))
