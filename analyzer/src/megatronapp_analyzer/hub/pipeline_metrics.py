"""Prometheus metrics of MegaDPP: the plan in force, and what the newest whole steps measured under it."""

import re
import statistics
from collections.abc import Iterator, Sequence

import numpy as np
from prometheus_client.core import GaugeMetricFamily, Metric

from megatronapp_analyzer.hub.ingest.pipeline_passes import Transfers, path_name
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.hub.reader import HubReader


def pipeline_families(hub: HubReader, newest: Sequence[StoredStep]) -> Iterator[Metric]:
    """Yield the families of a job; empty without MegaDPP. `newest`: whole steps of the newest attempt."""
    job, plans, state = hub.identity.name, hub.ranks.plans(), hub.ingest.newest
    plan = plans[-1] if plans else None
    since = 0 if plan is None else plan.from_step
    layout = None if state is None or plan is None else state.layout
    chosen = [step for step in newest if step.view.step >= since]
    steps = [] if layout is None else hub.passes.figures(chosen, layout)
    measured = {step.step for step in steps}
    info = GaugeMetricFamily("megadpp_plan_info", "1 for the plan in force.", labels=["job_id", "schedule", "plan"])
    if plan is not None:
        info.add_metric([job, plan.schedule, _without_times(plan.plan)], 1)
    yield info
    bubbles = [float(np.nanmean(step.bubble)) for step in steps]
    passes = sum(step.count for step in steps)
    early = sum(step.early for step in steps)
    for name, text, value in (
        (
            "megadpp_passes_seconds",
            "Length of the passes of a step, median of the newest steps.",
            statistics.median(step.seconds for step in steps) if steps else None,
        ),
        (
            "megadpp_simulated_passes_seconds",
            "The same as the simulation expected it under the plan in force.",
            None if plan is None else plan.simulated_seconds,
        ),
        (
            "megadpp_static_passes_seconds",
            "The same as simulated under the static order.",
            None if plan is None else plan.static_seconds,
        ),
        (
            "megadpp_bubble_ratio",
            "Share of the passes in which a rank ran none, mean over ranks and newest steps.",
            statistics.mean(bubbles) if bubbles else None,
        ),
        (
            "megadpp_early_passes_ratio",
            "Share of passes that ran before their turn.",
            early / passes if passes else None,
        ),
        (
            "megadpp_memory_cap_chunks",
            "Most chunks whose activations a rank keeps at a time.",
            None if plan is None else float(plan.cap_chunks),
        ),
    ):
        family = GaugeMetricFamily(name, text, labels=["job_id"])
        if value is not None:
            family.add_metric([job], value)
        yield family
    yield from _paths(job, hub.passes.transfers([step for step in chosen if step.view.step in measured]), len(steps))


def _without_times(plan: str) -> str:
    """Return a plan's words without times: they are measured, and would make a new series of each run."""
    return re.sub(r"\d+(\.\d+)? ms\b", "some ms", plan)


def _paths(job: str, pairs: Sequence[Transfers], steps: int) -> Iterator[Metric]:
    """Yield bytes per step and bandwidth of each path, from the transfers of that many steps."""
    transfers = [(path_name(pair.path), pair.size_bytes, pair.seconds) for pair in pairs]
    sizes = GaugeMetricFamily(
        "megadpp_step_transfer_bytes", "Bytes of messages between stages in a step.", labels=["job_id", "path"]
    )
    bandwidths = GaugeMetricFamily(
        "megadpp_transfer_bytes_per_second",
        "Bytes of messages over the time of their copies.",
        labels=["job_id", "path"],
    )
    for path in sorted({path for path, _, _ in transfers}):
        size_bytes = sum(size for name, size, _ in transfers if name == path)
        seconds = sum(length for name, _, length in transfers if name == path)
        sizes.add_metric([job, path], size_bytes / steps)
        if seconds > 0:
            bandwidths.add_metric([job, path], size_bytes / seconds)
    yield from (sizes, bandwidths)
