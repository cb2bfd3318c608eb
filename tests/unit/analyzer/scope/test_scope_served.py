"""Page of a server: the counts that rank 0 exposes, and quantiles as Prometheus computes them."""

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from megatronapp_analyzer.scope.probes.rank0_client import Rank0Client
from megatronapp_analyzer.scope.views.server_counts import LatencyQuantiles, quantile, read_counts
from megatronapp_common.web.problems import HttpError

BOUNDS = (0.1, 0.5, 1.0, 5.0)
COUNTS = """\
megatronapp_serve_num_requests_waiting 3.0
megatronapp_serve_num_requests_running 2.0
megatronapp_serve_requests_total{finished_reason="stop"} 5.0
megatronapp_serve_requests_total{finished_reason="error"} 1.0
megatronapp_serve_refused_total 4.0
"""


def exposed(durations: list[float]) -> str:
    registry = CollectorRegistry()
    metric = Histogram("megatronapp_serve_time_to_first_token_seconds", "x", buckets=BOUNDS, registry=registry)
    for duration in durations:
        metric.observe(duration)
    return generate_latest(registry).decode()


def test_counts_are_those_of_rank_zero() -> None:
    counts = read_counts(COUNTS + exposed([0.2, 0.4, 3.0]))
    assert (counts.waiting, counts.running, counts.refused) == (3, 2, 4)
    assert counts.ended == {"stop": 5, "error": 1}
    first = counts.latencies["firstToken"]
    assert first.count == 3
    assert first.mean == pytest.approx(1.2)
    assert counts.latencies["queue"] == LatencyQuantiles(0, None, None, None)


@given(durations=st.lists(st.floats(0, 4.9), min_size=1, max_size=40), quantile_level=st.sampled_from([0.5, 0.95]))
def test_a_quantile_lies_in_the_bucket_of_its_value(durations: list[float], quantile_level: float) -> None:
    bounds = (*BOUNDS, float("inf"))
    buckets = [(bound, float(sum(duration <= bound for duration in durations))) for bound in bounds]
    expected = sorted(durations)[max(0, -(-int(quantile_level * 100) * len(durations) // 100) - 1)]
    found = quantile(buckets, quantile_level)
    upper = next(bound for bound in BOUNDS if expected <= bound)
    lower = max([0.0, *(bound for bound in BOUNDS if bound < upper)])
    assert lower <= found <= upper + 1e-9


def test_a_value_above_all_bounds_is_reported_as_the_last_bound() -> None:
    assert quantile([(1.0, 0.0), (float("inf"), 3.0)], 0.5) == 1.0


@pytest.mark.asyncio
async def test_a_server_that_answers_something_else_is_a_problem() -> None:
    client = Rank0Client("http://model", "token", transport=httpx.MockTransport(lambda _: httpx.Response(500)))
    with pytest.raises(HttpError, match="500"):
        await client.metrics()
    with pytest.raises(HttpError, match="cannot be read"):
        read_counts("megatronapp_serve_num_requests_running two")
