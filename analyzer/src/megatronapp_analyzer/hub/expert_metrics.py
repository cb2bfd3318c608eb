"""Prometheus metrics of a model with experts: load of each expert, drops, and losses of the routers."""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from megatronapp_analyzer.hub.reader import HubReader


def expert_families(hub: HubReader) -> Iterator[Metric]:
    """Yield the families of a job; none of them has values where its model has no experts."""
    job = hub.identity.name
    experts = None if hub.ranks.progress is None else hub.ranks.progress.experts
    load = GaugeMetricFamily(
        "megascan_expert_load_ratio",
        "Tokens of an expert over the mean of its layer, in the newest step.",
        labels=["job_id", "layer", "expert"],
    )
    losses = GaugeMetricFamily(
        "megascan_router_loss",
        "Mean of a loss of the routers in the newest step, without its coefficient.",
        labels=["job_id", "loss"],
    )
    dropped = GaugeMetricFamily(
        "megascan_dropped_choices_ratio",
        "Share of the routers' choices that had no place in an expert, in the newest step.",
        labels=["job_id"],
    )
    if experts is not None:
        for entry in experts.layers:
            for expert, thousandths in enumerate(entry.load):
                load.add_metric([job, str(entry.layer), str(expert)], thousandths / 1000)
        for name, value in sorted(experts.losses.items()):
            if value is not None:
                losses.add_metric([job, name], value)
        if experts.dropped is not None:
            dropped.add_metric([job], experts.dropped)
    yield from (load, losses, dropped)
