"""Prometheus metrics of MegaFBD: mode and ratio in force, and what the newest whole steps measured of both roles."""

from collections.abc import Iterator, Sequence

import numpy as np
from prometheus_client.core import GaugeMetricFamily, Metric

from megatronapp_analyzer.hub.ingest.pipeline_passes import Transfers, path_name
from megatronapp_analyzer.hub.ingest.role_passes import ROLES, RolePasses, ranks_of, shipments
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.hub.reader import HubReader
from megatronapp_analyzer.model import JobLayout
from megatronapp_common.topology import RankRole


def role_families(hub: HubReader, newest: Sequence[StoredStep]) -> Iterator[Metric]:
    """Yield the families of a job; empty without MegaFBD. `newest`: whole steps of the newest attempt."""
    job, state, attempt = hub.identity.name, hub.ranks.forward_backward(), hub.ingest.newest
    layout = None if attempt is None or attempt.layout is None or not attempt.layout.roles else attempt.layout
    steps = [] if layout is None else hub.roles.figures(newest, layout)
    info = GaugeMetricFamily("megafbd_ship_info", "1 for the mode of shipping in force.", labels=["job_id", "ship"])
    ratio = GaugeMetricFamily(
        "megafbd_backward_per_forward_ratio",
        "Replicas of backward ranks that a forward rank serves.",
        labels=["job_id"],
    )
    size = GaugeMetricFamily(
        "megafbd_microbatch_shipment_bytes",
        "Bytes of the saved tensors of a microbatch, from a forward to a backward rank.",
        labels=["job_id"],
    )
    if state is not None:
        info.add_metric([job, state.ship], 1)
        ratio.add_metric([job], state.backward_per_forward)
        size.add_metric([job], state.ship_bytes)
    yield from (info, ratio, size)
    for name, text, field in (
        ("megafbd_busy_ratio", "Share of the passes' length in which a rank of the role ran passes.", "busy"),
        ("megafbd_microbatch_passes_seconds", "Passes of a microbatch on a rank of the role.", "pass_seconds"),
        (
            "megafbd_step_wait_seconds",
            "Wait in a step: of backward ranks for shipments, of forward ranks for credits.",
            "wait_seconds",
        ),
    ):
        family = GaugeMetricFamily(name, f"{text[:-1]}, mean over ranks and newest steps.", labels=["job_id", "role"])
        for role, value in [] if layout is None else _role_means(steps, field, layout):
            family.add_metric([job, str(role)], value)
        yield family
    measured = {step.step for step in steps}
    stored = [step for step in newest if step.view.step in measured]
    yield from _paths(job, [] if layout is None else shipments(hub.passes.transfers(stored), layout), len(steps))


def _role_means(steps: Sequence[RolePasses], field: str, layout: JobLayout) -> Iterator[tuple[RankRole, float]]:
    """Yield the mean of a figure over ranks and steps, for each role of which it is known."""
    for role in ROLES:
        values = np.concatenate([getattr(step, field)[ranks_of(role, layout)] for step in steps] or [np.empty(0)])
        known = values[np.isfinite(values)]
        if len(known):
            yield role, float(known.mean())


def _paths(job: str, pairs: Sequence[Transfers], steps: int) -> Iterator[Metric]:
    """Yield bytes per step and bandwidth of each path, from the shipments of that many steps."""
    sizes = GaugeMetricFamily("megafbd_step_shipment_bytes", "Bytes of shipments in a step.", labels=["job_id", "path"])
    bandwidths = GaugeMetricFamily(
        "megafbd_shipment_bytes_per_second",
        "Bytes of shipments over the time of their copies.",
        labels=["job_id", "path"],
    )
    for path in sorted({pair.path for pair in pairs}):
        chosen = [pair for pair in pairs if pair.path == path]
        size_bytes, seconds = sum(pair.size_bytes for pair in chosen), sum(pair.seconds for pair in chosen)
        sizes.add_metric([job, path_name(path)], size_bytes / steps)
        if seconds > 0:
            bandwidths.add_metric([job, path_name(path)], size_bytes / seconds)
    yield from (sizes, bandwidths)
