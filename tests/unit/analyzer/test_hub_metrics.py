from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.hub.service import Hub
from megatronapp_analyzer.hub.settings import HubSettings, JobIdentity
from megatronapp_common.trace import Kind

COST_NS = 1000.0


def overhead(hub: Hub) -> list[float]:
    families = text_string_to_metric_families(generate_latest(hub.registry).decode())
    return [
        sample.value
        for family in families
        if family.name == "megascan_tracer_overhead_ratio"
        for sample in family.samples
    ]


@pytest.fixture
def hub(ring_header: Any) -> Hub:
    hub = Hub(HubSettings(job=JobIdentity(name="demo", uid="uid-1"), state_dir=None), Detector)
    for rank in (0, 1):
        header = ring_header(rank)
        header["metadata"] |= {"recordCostNs": COST_NS}
        hub.ingest.add_ring(0, header)
    return hub


def test_steps_that_lost_records_say_nothing_of_the_tracers_cost(hub: Hub, step_rows: Any) -> None:
    """A step of which only the end is left would look as if it had cost hardly anything."""
    first = [0, 0]
    for step in range(3):
        for rank in (0, 1):
            rows = step_rows(rank, step)
            rows = rows[rows["kind"] < Kind.METRIC]
            left = rows if step == 1 else rows[-1:]
            header = {"rank": rank, "worker": rank, "first": first[rank] + len(rows) - len(left), "lost": 0}
            if step == 0:
                header["lost"] = header["first"]
            hub.ingest.add_records(0, header, left.tobytes())
            first[rank] += len(rows)
        assert [digest.complete for digest in hub.store.recent(1)] == [step == 1]
        assert overhead(hub) == ([] if step == 0 else pytest.approx([5 * COST_NS / 10_000_000]))
