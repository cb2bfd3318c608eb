"""Prometheus metrics of the checkpoints of a training."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from megatronapp_analyzer.hub.reader import HubReader
from megatronapp_analyzer.hub.state.progress import MemoryCheckpointProgress


def checkpoint_families(hub: HubReader) -> Iterator[Metric]:
    """Yield the families of a job; none of them has values before its first checkpoint."""
    job, progress = hub.identity.name, hub.ranks.progress
    report = None if progress is None else progress.checkpoint
    over = hub.ended is not None or (progress is not None and progress.state == "done")
    step = GaugeMetricFamily(
        "megascan_checkpoint_step", "Newest step whose checkpoint is on the disk.", labels=["job_id"]
    )
    blocked = GaugeMetricFamily(
        "megascan_checkpoint_blocked_seconds",
        "Time for which training waited for the newest checkpoint.",
        labels=["job_id"],
    )
    written = GaugeMetricFamily(
        "megascan_checkpoint_write_seconds",
        "Time from the begin of the newest checkpoint until it was on the disk.",
        labels=["job_id"],
    )
    failures = CounterMetricFamily(
        "megascan_checkpoint_failures",
        "Failed writes of checkpoints in this attempt, which are tried again.",
        labels=["job_id"],
    )
    if report is not None:
        for family, value in (
            (step, report.iteration),
            (blocked, report.blocked_seconds),
            (written, report.write_seconds),
        ):
            if value is not None:
                family.add_metric([job], value)
        failures.add_metric([job], report.failures)
    yield from (step, blocked, written, failures)
    yield from _memory_families(job, None if report is None else report.memory, over=over)


def _memory_families(job: str, report: MemoryCheckpointProgress | None, *, over: bool) -> Iterator[Metric]:
    """Yield the families of checkpoints in memory; none of them has values for a job without these.

    `over`: the training is complete, so that saves which a failure has ended are no reason for an alert any more.
    """
    values = MemoryCheckpointProgress() if report is None else report
    ended = None if report is None or over else float(report.last_failure is not None)
    for name, text, value in (
        ("step", "Newest step that is saved in memory, with its copies.", values.iteration),
        ("resumed_step", "Step in memory that the attempt was resumed from.", values.resumed_iteration),
        ("blocked_seconds", "Time for which training waited for the newest save.", values.blocked_seconds),
        ("write_seconds", "Time from the begin of the newest save until it was copied.", values.write_seconds),
        ("bytes", "Size of the state of the reporting rank.", values.bytes),
        ("ended", "1 once a failure has ended the saves in memory of this attempt.", ended),
    ):
        family = GaugeMetricFamily(f"megascan_memory_checkpoint_{name}", text, labels=["job_id"])
        if value is not None:
            family.add_metric([job], value)
        yield family
