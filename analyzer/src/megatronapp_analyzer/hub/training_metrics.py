"""Prometheus metrics of a training that obeys orders: pauses, perturbation, and captures of its layers."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from megatronapp_analyzer.hub.reader import HubReader
from megatronapp_analyzer.hub.state.capture_store import CapturedStep


def training_families(hub: HubReader) -> Iterator[Metric]:
    """Yield the families of a job; without values where its training obeys no orders and nothing is captured."""
    job = hub.identity.name
    report = None if hub.ranks.progress is None else hub.ranks.progress.control
    paused = CounterMetricFamily(
        "megascope_training_paused_seconds", "Length of the ended pauses of the newest attempt.", labels=["job_id"]
    )
    if report is not None:
        paused.add_metric([job], report.paused_seconds)
    yield paused
    shown = hub.captures.store.shown()
    newest = shown[-1] if shown else None
    for name, text, value in (
        (
            "megascope_training_paused",
            "1 while the training is paused.",
            None if report is None else report.state == "paused",
        ),
        (
            "megascope_training_perturbed",
            "1 while a perturbation of the training is in force.",
            None if report is None else report.perturbation is not None,
        ),
        (
            "megascope_capture_interval_steps",
            "Steps from one capture of the layers to the next.",
            hub.captures.store.every if report is None else report.capture_every,
        ),
        ("megascope_captured_step", "Newest captured step.", None if newest is None else newest.step),
    ):
        family = GaugeMetricFamily(name, text, labels=["job_id"])
        if value is not None:
            family.add_metric([job], float(value))
        yield family
    counts = GaugeMetricFamily(
        "megascope_captured_not_finite_values",
        "NaN and infinite values of the newest captured step, all layers together.",
        labels=["job_id", "site"],
    )
    for site, count in sorted(_not_finite(newest).items()):
        counts.add_metric([job, site], count)
    rejected = CounterMetricFamily(
        "megascope_rejected_captures", "Frames of captures that were skipped because they are wrong.", labels=["job_id"]
    )
    rejected.add_metric([job], hub.captures.rejected)
    yield from (counts, rejected)


def _not_finite(step: CapturedStep | None) -> Counter[str]:
    """Return the number of values of each site that are NaN or infinite."""
    found: Counter[str] = Counter()
    for row, record in ({} if step is None else step.rows).items():
        found[row.site] += int(record["nan"][0] + record["inf"][0])
    return found
