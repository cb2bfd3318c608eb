"""Metrics of the archive of traces."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from megatronapp_analyzer.hub.reader import HubReader


def archive_families(hub: HubReader) -> Iterator[Metric]:
    """Yield size and losses of the archive; nothing of a hub that stores nothing."""
    catalog, archiver = hub.spooled.catalog, hub.spooled.archiver
    if catalog is None:
        return
    size = GaugeMetricFamily("megascan_archive_bytes", "Bytes of archived traces.", labels=["job_id"])
    size.add_metric([hub.identity.name], catalog.bytes)
    limit = GaugeMetricFamily("megascan_archive_limit_bytes", "Bytes that they may have.", labels=["job_id"])
    limit.add_metric([hub.identity.name], catalog.limit_bytes)
    yield from (size, limit)
    damaged = catalog.damaged + (archiver.damaged if archiver else 0)
    for name, text, count in (
        ("megascan_archive_records", "Records moved to the archive.", archiver.records if archiver else 0),
        ("megascan_archive_dropped_records", "Records of old hours that were deleted.", catalog.dropped.records),
        ("megascan_archive_dropped_bytes", "Bytes of old hours that were deleted.", catalog.dropped.bytes),
        ("megascan_archive_damaged_files", "Files and segments that cannot be read in whole.", damaged),
    ):
        family = CounterMetricFamily(name, text, labels=["job_id"])
        family.add_metric([hub.identity.name], count)
        yield family
