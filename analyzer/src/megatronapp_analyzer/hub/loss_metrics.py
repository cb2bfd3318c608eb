"""Prometheus metrics of losses by corpus, and by validation set."""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from megatronapp_analyzer.hub.reader import HubReader


def loss_families(hub: HubReader) -> Iterator[Metric]:
    """Yield the families of a job; none of them has values where the training reports only its mean loss."""
    job, progress = hub.identity.name, hub.ranks.progress
    for name, text, label, losses in (
        (
            "megascan_source_loss",
            "Loss of a corpus of a blend in the newest step.",
            "source",
            {} if progress is None else progress.source_losses,
        ),
        (
            "megascan_validation_set_loss",
            "Loss of one of several validation sets in the newest evaluation.",
            "set",
            {} if progress is None else progress.validation_losses,
        ),
    ):
        family = GaugeMetricFamily(name, text, labels=["job_id", label])
        for key, loss in sorted(losses.items()):
            if loss is not None:
                family.add_metric([job, key], loss)
        yield family
