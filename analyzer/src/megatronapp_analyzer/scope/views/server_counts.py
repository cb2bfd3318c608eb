"""Counts and latencies of a model's server, parsed from the metrics of rank 0. Pure."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families

from megatronapp_common.web.problems import HttpError

PREFIX = "megatronapp_serve_"
HISTOGRAMS = {
    "queue": "request_queue_time_seconds",
    "firstToken": "time_to_first_token_seconds",
    "outputToken": "inter_token_latency_seconds",
}


@dataclasses.dataclass(frozen=True, slots=True)
class LatencyQuantiles:
    """Durations in seconds; None without any."""

    count: int
    mean: float | None
    median: float | None
    p95: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class ServerCounts:
    """Counts of one server since its start."""

    waiting: int
    running: int
    refused: int
    ended: dict[str, int]
    latencies: dict[str, LatencyQuantiles]


def read_counts(text: str) -> ServerCounts:
    """Parse metrics in the text format of Prometheus. Raises HttpError 503 if it is not valid."""
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError as error:
        raise HttpError(503, "model-failed", "the model's metrics cannot be read", "See the log of rank 0.") from error
    plain = {sample.name.removeprefix(PREFIX): sample.value for sample in samples if not sample.labels}
    ended = {
        sample.labels["finished_reason"]: int(sample.value)
        for sample in samples
        if sample.name == f"{PREFIX}requests_total"
    }
    latencies = {}
    for name, metric in HISTOGRAMS.items():
        buckets = sorted(
            (float(sample.labels["le"]), sample.value)
            for sample in samples
            if sample.name == f"{PREFIX}{metric}_bucket"
        )
        latencies[name] = _latency(buckets, plain.get(f"{metric}_sum", 0.0))
    return ServerCounts(
        waiting=int(plain.get("num_requests_waiting", 0)),
        running=int(plain.get("num_requests_running", 0)),
        refused=int(plain.get("refused_total", 0)),
        ended=ended,
        latencies=latencies,
    )


def _latency(buckets: Sequence[tuple[float, float]], total: float) -> LatencyQuantiles:
    count = int(buckets[-1][1]) if buckets else 0
    if count == 0:
        return LatencyQuantiles(0, None, None, None)
    return LatencyQuantiles(count, total / count, quantile(buckets, 0.5), quantile(buckets, 0.95))


def quantile(buckets: Sequence[tuple[float, float]], share: float) -> float:
    """Estimate a quantile of cumulative counts by upper bound, as Prometheus does: linear within a bucket."""
    wanted = share * buckets[-1][1]
    for (low, before), (high, count) in itertools.pairwise([(0.0, 0.0), *buckets]):
        if count >= wanted and count > before:
            return low if math.isinf(high) else low + (high - low) * (wanted - before) / (count - before)
    return buckets[-1][0]
