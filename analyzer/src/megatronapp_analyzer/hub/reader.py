"""Protocol of a hub, as views and metrics read it."""

from collections.abc import Mapping
from typing import Protocol

from megatronapp_analyzer.hub.archive.spooled_ingest import SpooledIngest
from megatronapp_analyzer.hub.ingest.ingest import TraceIngest
from megatronapp_analyzer.hub.ingest.pipeline_passes import PassesCache, PlanSamples
from megatronapp_analyzer.hub.ingest.role_passes import RolesCache
from megatronapp_analyzer.hub.ingest.step_graphs import StepGraphs
from megatronapp_analyzer.hub.settings import EndedJob, JobIdentity
from megatronapp_analyzer.hub.state.agent_link import AgentLink
from megatronapp_analyzer.hub.state.answer_cache import AnswerCache
from megatronapp_analyzer.hub.state.captures import TrainingCaptures
from megatronapp_analyzer.hub.state.detector_task import DetectorTask
from megatronapp_analyzer.hub.state.faults import FaultStore
from megatronapp_analyzer.hub.state.lease import ControlLease
from megatronapp_analyzer.hub.state.rank_monitor import RankMonitor
from megatronapp_analyzer.hub.state.totals import HubTotals
from megatronapp_analyzer.hub.state.training_orders import TrainingOrders
from megatronapp_analyzer.hub.state.verdicts import VerdictStore
from megatronapp_analyzer.hub.timeline.columns import ColumnsCache
from megatronapp_analyzer.scope.service import ScopeService


class HubReader(Protocol):
    """State of one job; readers change nothing."""

    @property
    def identity(self) -> JobIdentity: ...

    @property
    def ended(self) -> EndedJob | None: ...

    @property
    def ingest(self) -> TraceIngest: ...

    @property
    def ranks(self) -> RankMonitor: ...

    @property
    def spooled(self) -> SpooledIngest: ...

    @property
    def links(self) -> Mapping[tuple[int, int], AgentLink]: ...

    @property
    def faults(self) -> FaultStore: ...

    @property
    def orders(self) -> TrainingOrders: ...

    @property
    def lease(self) -> ControlLease: ...

    @property
    def captures(self) -> TrainingCaptures: ...

    @property
    def verdicts(self) -> VerdictStore: ...

    @property
    def analysis(self) -> DetectorTask: ...

    @property
    def totals(self) -> HubTotals: ...

    @property
    def passes(self) -> PassesCache: ...

    @property
    def roles(self) -> RolesCache: ...

    @property
    def graphs(self) -> StepGraphs: ...

    @property
    def timelines(self) -> ColumnsCache: ...

    @property
    def answers(self) -> AnswerCache: ...

    @property
    def plan_samples(self) -> PlanSamples: ...

    @property
    def scope(self) -> ScopeService: ...
