"""Prometheus metrics of the hub, made at scrape time from what it holds.

Labels never hold steps, microbatches or times. Per-rank series exist only for suspects, at most TOP_RANKS of them, and
go when they are cleared; the rest is per job or per worker.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector, CollectorRegistry

from megatronapp_analyzer.hub.archive_metrics import archive_families
from megatronapp_analyzer.hub.checkpoint_metrics import checkpoint_families
from megatronapp_analyzer.hub.expert_metrics import expert_families
from megatronapp_analyzer.hub.ingest import step_totals
from megatronapp_analyzer.hub.ingest.digest import stage_groups
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.hub.loss_metrics import loss_families
from megatronapp_analyzer.hub.pipeline_metrics import pipeline_families
from megatronapp_analyzer.hub.reader import HubReader
from megatronapp_analyzer.hub.role_metrics import role_families
from megatronapp_analyzer.hub.state.ranks import kind_name
from megatronapp_analyzer.hub.state.totals import BUCKETS_S, HubTotals
from megatronapp_analyzer.hub.training_metrics import training_families
from megatronapp_analyzer.model import Cause, JobLayout, SubjectType, Verdict
from megatronapp_common.topology import RankRole

TOP_RANKS = 32
RECENT_STEPS = 16
SLOW_RANK_CAUSES = frozenset({Cause.COMPUTE, Cause.MEMORY, Cause.HOST})
SCRAPE_SPANS = 100_000
"""Number of spans that one scrape reads, about 20 ms."""


def build_registry(hub: HubReader) -> CollectorRegistry:
    """Return a registry whose only collector reads `hub`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(HubCollector(hub))
    return registry


def histogram(totals: HubTotals) -> list[tuple[str, float]]:
    """Return cumulative buckets in the form of Prometheus."""
    cumulative = np.cumsum(totals.buckets)
    bounds = [*(str(bound) for bound in BUCKETS_S), "+Inf"]
    return [(bound, float(count)) for bound, count in zip(bounds, cumulative, strict=True)]


def stage_imbalance(table: NDArray[np.float32], layout: JobLayout) -> float | None:
    """Return the slowest pipeline stage over the mean one; with MegaFBD in the role where it is larger.

    `table`: seconds of [step][rank], NaN where a rank has not reported. None without reports.
    """
    heard = np.any(np.isfinite(table), axis=0)
    roles: dict[RankRole, list[float]] = {}
    for group in stage_groups(layout):
        known = group[heard[group]]
        if len(known):
            role = layout.roles[group[0]] if layout.roles else RankRole.ALL
            roles.setdefault(role, []).append(float(np.nanmedian(table[:, known], axis=0).mean()))
    return max((max(stages) / np.mean(stages).item() for stages in roles.values() if max(stages) > 0), default=None)


class HubCollector(Collector):
    """Collector of the metrics of one hub."""

    def __init__(self, hub: HubReader) -> None:
        self._hub = hub
        self._job = hub.identity.name

    def describe(self) -> Iterable[Metric]:
        """Return no metrics in advance, so that registering does not scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all families of metrics."""
        yield from self._steps()
        yield from self._suspects()
        yield from self._links()
        yield self._phases()
        yield from self._tracer()
        yield from self._sums()
        newest = self._newest_whole()
        yield from pipeline_families(self._hub, newest)
        yield from role_families(self._hub, newest)
        yield from training_families(self._hub)
        yield from expert_families(self._hub)
        yield from checkpoint_families(self._hub)
        yield from loss_families(self._hub)

    def _gauge(self, name: str, text: str, value: float | None) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=["job_id"])
        if value is not None:
            family.add_metric([self._job], value)
        return family

    def _steps(self) -> Iterator[Metric]:
        totals = self._hub.totals
        steps = HistogramMetricFamily("megascan_step_duration_seconds", "Length of finished steps.", labels=["job_id"])
        steps.add_metric([self._job], histogram(totals), totals.step_seconds)
        yield steps
        yield self._gauge(
            "megascan_step_slowdown_ratio",
            "Step time over the step time without the confirmed causes.",
            self._slowdown(self._hub.verdicts.slowing()),
        )
        yield self._gauge(
            "megascan_stage_imbalance_ratio",
            "Slowest pipeline stage over the mean stage of its role.",
            self._imbalance(),
        )
        wasted = CounterMetricFamily(
            "megascan_wasted_gpu_seconds",
            "GPU-seconds lost to confirmed causes; of ranks, where none uses a GPU.",
            labels=["job_id", "cause"],
        )
        for cause, seconds in sorted(self._hub.analysis.wasted_s.items()):
            wasted.add_metric([self._job, cause], seconds)
        yield wasted

    def _slowdown(self, slowing: list[Verdict]) -> float | None:
        recent = self._hub.ingest.store.recent(RECENT_STEPS)
        if not recent:
            return None
        step_s = float(np.median([digest.duration_ns for digest in recent])) * 1e-9
        lost_s = max((verdict.seconds_per_step for verdict in slowing), default=0.0)
        return step_s / max(step_s - lost_s, step_s * 0.01) if step_s else None

    def _imbalance(self) -> float | None:
        state = self._hub.ingest.newest
        recent = [d for d in self._hub.ingest.store.recent(RECENT_STEPS) if state and d.values.shape[1] == state.world]
        if state is None or state.layout is None or not recent:
            return None
        return stage_imbalance(np.stack([digest.values[0] for digest in recent]), state.layout)

    def _suspects(self) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            "megascan_suspect_info",
            "1 while a verdict names this rank.",
            labels=["job_id", "rank", "node", "gpu", "cause", "state"],
        )
        confidence = GaugeMetricFamily(
            "megascan_suspect_confidence_ratio", "Confidence of the verdict.", labels=["job_id", "rank", "cause"]
        )
        slowdown = GaugeMetricFamily(
            "megascan_rank_slowdown_ratio", "Time of the rank over the time expected.", labels=["job_id", "rank"]
        )
        for rank, verdict in self._top_ranks():
            node, gpu = self._place(rank)
            label = str(rank)
            info.add_metric([self._job, label, node, gpu, str(verdict.cause), str(verdict.state)], 1)
            confidence.add_metric([self._job, label, str(verdict.cause)], verdict.confidence)
            slowdown.add_metric([self._job, label], verdict.slowdown)
        yield from (info, confidence, slowdown)

    def _top_ranks(self) -> list[tuple[int, Verdict]]:
        """Return the costliest verdict of each named rank, costliest first."""
        named: dict[int, Verdict] = {}
        for verdict in sorted(self._hub.verdicts.active(), key=lambda verdict: verdict.seconds_per_step):
            if verdict.subject.type not in (SubjectType.LINK, SubjectType.JOB):
                named.update(dict.fromkeys(verdict.subject.ranks, verdict))
        return sorted(named.items(), key=lambda item: -item[1].seconds_per_step)[:TOP_RANKS]

    def _place(self, rank: int) -> tuple[str, str]:
        """Return node and GPU of a rank, empty where it has none or is not known."""
        state = self._hub.ingest.newest
        ring = state.rings.get(rank) if state else None
        if ring is None:
            return "", ""
        return ring.node, "" if ring.gpu is None else str(ring.gpu)

    def _links(self) -> Iterator[Metric]:
        links = GaugeMetricFamily(
            "megascan_link_slowdown_ratio",
            "Length of a microbatch of the receiver with the late messages of a named link, over its length without.",
            labels=["job_id", "src_node", "dst_node"],
        )
        worst: dict[tuple[str, str], float] = {}
        for verdict in self._hub.verdicts.active():
            if verdict.subject.type == SubjectType.LINK and len(verdict.subject.ranks) == 2:
                source, destination = (self._place(rank)[0] for rank in verdict.subject.ranks)
                worst[source, destination] = max(verdict.slowdown, worst.get((source, destination), 0.0))
        for (source, destination), ratio in sorted(worst.items(), key=lambda found: -found[1])[:TOP_RANKS]:
            links.add_metric([self._job, source, destination], ratio)
        yield links

    def _sums(self) -> Iterator[Metric]:
        """Yield waits of the TOP_RANKS that impose most; uneven data and cost of tracing in the newest whole steps."""
        waits = CounterMetricFamily(
            "megascan_imposed_wait_seconds",
            "Time that others waited for this rank, outside compute spans.",
            labels=["job_id", "rank", "group_kind"],
        )
        imposed = self._hub.analysis.imposed_s
        by_rank: dict[int, float] = {}
        for (rank, _), seconds in imposed.items():
            by_rank[rank] = by_rank.get(rank, 0.0) + seconds
        top = set(sorted(by_rank, key=lambda rank: -by_rank[rank])[:TOP_RANKS])
        for (rank, kind), seconds in sorted(imposed.items()):
            if rank in top:
                waits.add_metric([self._job, str(rank), kind], seconds)
        yield waits
        whole = self._newest_whole()
        yield self._gauge(
            "megascan_data_skew_correlation",
            "Correlation of forward and backward times over microbatches, without ranks named as slow.",
            step_totals.skew_correlation(whole, self._slow_ranks()),
        )
        state = self._hub.ingest.newest
        costs = {rank: ring.record_cost_ns for rank, ring in state.rings.items()} if state else {}
        yield self._gauge(
            "megascan_tracer_overhead_ratio",
            "Estimated cost of tracing over step time, in the rank where it is largest.",
            step_totals.overhead_ratio(whole, {rank: cost for rank, cost in costs.items() if cost is not None}),
        )

    def _newest_whole(self) -> list[StoredStep]:
        """Return the newest steps that are whole and of the newest attempt, few enough for one scrape."""
        state, newest = self._hub.ingest.newest, self._hub.ingest.store.newest(RECENT_STEPS)
        attempt = None if state is None else state.attempt
        chosen = [step for step in newest if step.digest.complete and step.view.attempt == attempt]
        spans = np.cumsum([len(step.view.records) for step in reversed(chosen)])
        count = max(1, int(np.searchsorted(spans, SCRAPE_SPANS, side="right")))
        return chosen[-count:]

    def _slow_ranks(self) -> set[int]:
        """Return the ranks that a verdict names for long passes of their own."""
        standing = (verdict for verdict in self._hub.verdicts.standing() if verdict.cause in SLOW_RANK_CAUSES)
        return {rank for verdict in standing for rank in verdict.subject.ranks}

    def _pod(self, worker: int) -> str:
        return f"{self._job}-worker-{worker}"

    def _phases(self) -> Metric:
        phases = SummaryMetricFamily(
            "megascan_phase_duration_seconds", "Time in spans of each kind.", labels=["job_id", "pod", "phase"]
        )
        for (worker, kind), (seconds, count) in sorted(self._hub.totals.phases.items()):
            phases.add_metric([self._job, self._pod(worker), kind_name(kind)], count, seconds)
        return phases

    def _clock_residual(self) -> Metric:
        """Return the uncertainty of the workers' clocks, without those that nothing ties to the first one."""
        family = GaugeMetricFamily(
            "megascan_clock_residual_seconds",
            "What times of this worker may be wrong by against the first worker's.",
            labels=["job_id", "pod"],
        )
        worst: dict[int, float] = {}
        if (state := self._hub.ingest.newest) is None:
            return family
        for rank, ring in state.rings.items():
            worst[ring.worker] = max(worst.get(ring.worker, 0.0), state.clock_doubt_s(rank))
        for worker, seconds in sorted(worst.items()):
            if np.isfinite(seconds):
                family.add_metric([self._job, self._pod(worker)], seconds)
        return family

    def _shared_memory(self) -> Iterator[Metric]:
        """Yield size and free bytes of the shared memory of workers whose agent is connected."""
        for name, text, field in (
            ("megascan_shared_memory_bytes", "Size of a worker's shared memory.", "total"),
            ("megascan_shared_memory_free_bytes", "What is left of it for rings, pages and data loaders.", "free"),
        ):
            family = GaugeMetricFamily(name, text, labels=["job_id", "pod"])
            for link in self._hub.links.values():
                if link.shared_memory is not None:
                    family.add_metric([self._job, self._pod(link.worker)], getattr(link.shared_memory, field))
            yield family

    def _lost_time(self) -> Iterator[Metric]:
        """Yield the time that a step lost and the sum of its blame; without values until the first was computed."""
        lost_time = self._hub.totals.lost_time
        yield self._gauge(
            "megascan_step_lost_seconds",
            "Time by which a step was longer than with usual durations: the newest one whose blame was computed.",
            None if lost_time is None else lost_time.lost_s,
        )
        yield self._gauge(
            "megascan_step_blamed_seconds",
            "Sum of the blame of that step: the time that it lost, but for the error of the method.",
            None if lost_time is None else lost_time.blamed_s,
        )

    def _tracer(self) -> Iterator[Metric]:
        analysis = self._hub.analysis
        dropped = CounterMetricFamily(
            "megascan_tracer_dropped_records",
            "Records overwritten in a ring or dropped by an agent.",
            labels=["job_id", "pod"],
        )
        for worker, lost in sorted(self._hub.ingest.lost_by_worker().items()):
            dropped.add_metric([self._job, self._pod(worker)], lost)
        yield dropped
        yield self._gauge(
            "megascan_analyzer_lag_seconds", "End of the newest whole step to its analysis.", analysis.lag_s
        )
        yield from self._lost_time()
        for name, text, count in (
            ("megascan_analyzer_skipped_steps", "Steps that the detector was too slow to judge.", analysis.skipped),
            ("megascan_analyzer_failures", "Steps at which the detector failed.", analysis.failures),
            (
                "megascan_analyzer_restarts",
                "Starts of the detector's process after its first.",
                analysis.restarts,
            ),
            (
                "megascan_store_failed_writes",
                "Frames of traces that the disk did not take, or that were in files which vanished.",
                self._hub.spooled.failed_writes,
            ),
            (
                "megascan_store_dropped_frames",
                "Frames of traces that were dropped because the disk was too slow.",
                self._hub.spooled.dropped_frames,
            ),
            (
                "megascan_store_dropped_segments",
                "Segments of traces that were deleted for space before they were archived.",
                self._hub.spooled.dropped_segments,
            ),
            ("megascan_protocol_errors", "Agents refused or cut off.", self._hub.totals.protocol_errors),
            ("megascan_records", "Records taken in.", self._hub.totals.records),
        ):
            family = CounterMetricFamily(name, text, labels=["job_id"])
            family.add_metric([self._job], count)
            yield family
        yield from archive_families(self._hub)
        yield from self._shared_memory()
        yield self._gauge("megascan_agents", "Agents connected now.", len(self._hub.links))
        newest = self._hub.ingest.newest
        yield self._gauge(
            "megascan_missing_ranks",
            "Ranks that have not reported for long; the others are judged without them.",
            len(newest.missing) if newest else None,
        )
        yield self._clock_residual()
        attempt = InfoMetricFamily("megascan_attempt", "Newest attempt of the job.", labels=["job_id"])
        if newest is not None:
            attempt.add_metric([self._job], {"attempt": str(newest.attempt)})
        yield attempt
