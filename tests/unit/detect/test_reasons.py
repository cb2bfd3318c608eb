"""Reasons of verdicts: what counters of devices and hosts show, and what spans do."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from detect.current import CurrentDetector
from detect.faults import parse
from detect.noise import CPU, GPU, NoiseModel
from detect.simulation import JobSimulation, SimulatedJob
from detect.suite import LAYOUTS
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_analyzer.detect.reasons.device_reasons import ComparedDevices, explain_device
from megatronapp_analyzer.detect.reasons.host_reasons import ComparedHosts, explain_host
from megatronapp_analyzer.detect.reasons.host_spans import host_spans_s
from megatronapp_analyzer.detect.reasons.readings import THROTTLES, CounterSamples, DeviceReading, HostReading
from megatronapp_analyzer.graph.matched_step import MatchedStep
from megatronapp_analyzer.model import RANK_RECORD, Cause, RankRecords, Reason, StepRecords, Verdict
from megatronapp_common.trace import DURATION_UNIT_NS, Counter, RecordKind

HEALTHY = DeviceReading(
    clock_mhz=1980.0, temperature_c=52.0, power_w=650.0, power_limit_w=700.0, memory_mib=60_000.0, memory_busy=0.61
)
OTHERS = (HEALTHY,) * 7
POWER_CAP = ("power cap",)


def device(clock_mhz: float = 1980.0, memory_mib: float = 60_000.0, throttles: tuple[str, ...] = ()) -> DeviceReading:
    return DeviceReading(
        clock_mhz=clock_mhz, temperature_c=88.0, power_w=310.0, power_limit_w=700.0, memory_mib=memory_mib,
        memory_busy=0.97, throttles=throttles,
    )  # fmt: skip


def test_a_lower_clock_is_the_reason_with_what_throttles_it() -> None:
    found = explain_device(
        Cause.COMPUTE, 1.6, ComparedDevices(suspect=device(1200.0, throttles=POWER_CAP), peers=OTHERS, before=HEALTHY)
    )
    assert found.reason is Reason.DOWN_CLOCK
    assert found.lines == (
        "SM clock 1.20 GHz, 1.98 GHz on the other 7 devices, 1.98 GHz before; throttled by: power cap",
        "temperature 88 °C, 52 °C on the others",
        "power 310 W of at most 700 W, 650 W of 700 W on the others",
    )


def test_a_clock_that_makes_up_little_of_the_slowdown_is_not_the_reason() -> None:
    found = explain_device(Cause.COMPUTE, 2.0, ComparedDevices(suspect=device(1850.0), peers=OTHERS))
    assert found.reason is None
    assert found.lines == ("SM clock 1.85 GHz, 1.98 GHz on the other 7 devices",)


def test_a_clock_that_was_as_low_before_is_not_the_reason() -> None:
    """A device that always was 7 % slower has become 12 % slower than that."""
    devices = ComparedDevices(suspect=device(1840.0), peers=OTHERS, before=device(1842.0))
    assert explain_device(Cause.COMPUTE, 1.12, devices).reason is None


def test_devices_whose_clocks_fell_together_are_compared_with_the_time_before() -> None:
    """A job that has become slower as a whole has no peers."""
    found = explain_device(Cause.REGRESSION, 1.25, ComparedDevices(suspect=device(1500.0), suspects=8, before=HEALTHY))
    assert found.reason is Reason.DOWN_CLOCK
    assert found.lines[0] == "SM clock (median of 8 devices) 1.50 GHz, 1.98 GHz before"


def test_throttles_are_the_reason_alone_only_where_no_clock_is_known() -> None:
    unknown = DeviceReading(throttles=("hardware slowdown",))
    assert explain_device(Cause.COMPUTE, 1.5, ComparedDevices(suspect=unknown)).reason is Reason.DOWN_CLOCK
    capped = (DeviceReading(throttles=("hardware slowdown",)),) * 3
    assert explain_device(Cause.COMPUTE, 1.5, ComparedDevices(suspect=unknown, peers=capped)).reason is None
    as_fast = ComparedDevices(suspect=device(1980.0, throttles=POWER_CAP), peers=OTHERS)
    assert explain_device(Cause.COMPUTE, 1.5, as_fast).reason is None


def test_another_process_on_the_device_is_seen_by_the_memory_that_it_takes() -> None:
    def found(now_mib: float, peers_now_mib: float, *, clock_mhz: float = 1980.0) -> Reason | None:
        devices = ComparedDevices(
            suspect=device(clock_mhz, now_mib),
            peers=(device(memory_mib=peers_now_mib),) * 3,
            before=HEALTHY,
            peers_before=(HEALTHY,) * 3,
        )
        return explain_device(Cause.COMPUTE, 1.5, devices).reason

    assert found(60_512.0, 60_000.0) is Reason.CONTENTION
    assert found(60_512.0, 60_512.0) is None, "all ranks took more memory"
    assert found(60_100.0, 60_000.0) is None, "less than a context takes"
    assert found(60_512.0, 60_000.0, clock_mhz=math.nan) is None, "whether the clock is lower is not known"


def test_busy_memory_is_memory_bound_with_its_numbers() -> None:
    found = explain_device(Cause.MEMORY, 1.5, ComparedDevices(suspect=device(), peers=OTHERS))
    assert found.reason is Reason.MEMORY_BOUND
    assert found.lines[1] == "its memory was read or written 97% of the time, 61% on the other 7 devices"


READING = st.builds(
    DeviceReading,
    clock_mhz=st.floats(allow_nan=True, allow_infinity=True),
    memory_mib=st.floats(allow_nan=True, allow_infinity=True),
    temperature_c=st.floats(allow_nan=True, allow_infinity=False),
    power_w=st.floats(allow_nan=True, allow_infinity=False),
    throttles=st.lists(st.sampled_from(list(THROTTLES)), unique=True).map(tuple),
)


@given(
    st.sampled_from([Cause.COMPUTE, Cause.MEMORY, Cause.REGRESSION, Cause.UNDETERMINED]),
    st.floats(allow_nan=True),
    READING,
    st.lists(READING, max_size=3),
    READING,
)
def test_no_reading_of_a_driver_is_refused(
    cause: Cause, slowdown: float, suspect: DeviceReading, peers: list[DeviceReading], before: DeviceReading
) -> None:
    explain_device(cause, slowdown, ComparedDevices(suspect=suspect, peers=peers, before=before))


def test_what_is_set_most_of_the_time_throttles_a_device() -> None:
    bits = [0x04, 0x04 | 0x20, 0x04, math.nan, 0x01, 0x40]
    columns = {(int(Counter.GPU_THROTTLE_REASONS), 2): 0, (int(Counter.GPU_SM_CLOCK_MHZ), 2): 1}
    samples = CounterSamples(columns=columns, values=np.array([[value, 1500.0] for value in bits]))
    reading = DeviceReading.of(samples, 2)
    assert (reading.throttles, reading.clock_mhz) == (POWER_CAP, 1500.0)
    assert math.isnan(DeviceReading.of(samples, 3).clock_mhz)


QUIET_HOST = HostReading(steal=0.0, throttled=0.0, queued=0.01)


@pytest.mark.parametrize(
    ("found", "suspect", "expected", "line"),
    [
        (Reason.CPU_CONTENTION, HostReading(throttled=0.4), Reason.CPU_THROTTLED,
         "the processor limit of its container stopped its threads for 0.40 s per second, "
         "0.00 s on the other 3 workers"),
        (Reason.STOPPED, HostReading(steal=0.18), Reason.CPU_STEAL,
         "the hypervisor withdrew 18% of the processor time of its node, 0% on the other 3 workers"),
        (None, HostReading(queued=0.62), Reason.CPU_CONTENTION,
         "its threads waited for a processor for 0.62 s per second, 0.01 s on the other 3 ranks"),
        (Reason.STOPPED, HostReading(queued=0.62), None, ""),
        (Reason.GARBAGE_COLLECTION, HostReading(throttled=0.4), None, ""),
        (None, HostReading(throttled=0.1, queued=0.1), None, ""),
        (None, HostReading(), None, ""),
    ],
)  # fmt: skip
def test_counters_show_what_took_the_processors_of_a_host(
    found: Reason | None, suspect: HostReading, expected: Reason | None, line: str
) -> None:
    """The fault costs a third of each step."""
    others = (QUIET_HOST,) * 3
    hosts = ComparedHosts(suspect=suspect, ranks=others, workers=others, nodes=others)
    explanation = explain_host(found, 0.33, hosts)
    assert (explanation.reason, explanation.lines) == (expected, (line,) if line else ())


def test_what_takes_the_processors_of_all_hosts_is_no_reason() -> None:
    all_alike = (HostReading(steal=0.3, throttled=0.4, queued=0.6),) * 3
    hosts = ComparedHosts(suspect=all_alike[0], ranks=all_alike, workers=all_alike, nodes=all_alike)
    assert explain_host(None, 0.3, hosts).reason is None


Change = Callable[[int, RankRecords], RankRecords]


def verdicts(faults: str, change: Change = lambda _step, records: records, *, noise: NoiseModel = GPU) -> list[Verdict]:
    """Return what the detector reports of a simulated job, whose records `change` may edit."""
    grid = LAYOUTS["dp4-pp2"]
    job = SimulatedJob(grid=grid, noise=noise, microbatches=8, faults=parse(faults, grid))
    detector = CurrentDetector(grid)._detector
    comms = CurrentDetector(grid)._comms
    found = []
    for trace in JobSimulation(job, 3, 36).traces():
        view = StepRecords(
            attempt=0, step=trace.step, records=change(trace.step, trace.records), comms=comms,
            boot_ids=dict(enumerate(trace.boot_ids)), real_time_s=trace.real_time_s,
        )  # fmt: skip
        found += detector.observe(view)
    return found


def collections_in_stalls(_step: int, records: RankRecords) -> RankRecords:
    """Add a collection of 60 ms to each forward pass of rank 2, in which its host stalls."""
    own = records[(records["kind"] == RecordKind.FORWARD) & (records["rank"] == 2)].copy()
    own["kind"], own["duration"], own["flags"] = RecordKind.GC, 60_000_000 // DURATION_UNIT_NS, 0
    both = np.concatenate([records, own])
    ordered: RankRecords = both[np.lexsort((both["start_ns"], both["rank"]))]
    return ordered


def test_collections_of_garbage_are_the_reason_of_a_stalling_host() -> None:
    stalls = "host rank=2 stall=0.6 from=16"
    plain, collecting = verdicts(stalls), verdicts(stalls, collections_in_stalls)
    assert {verdict.reason for verdict in plain} == {None}
    assert [(each.id, each.state) for each in plain] == [(each.id, each.state) for each in collecting]
    assert {verdict.cause for verdict in collecting} == {Cause.HOST}
    assert {verdict.reason for verdict in collecting} == {Reason.GARBAGE_COLLECTION}
    assert any("Python collected garbage for 60.0 ms" in line for line in collecting[-1].evidence_text)


@pytest.mark.parametrize(("noise", "duty"), [(GPU, 0.3), (CPU, 0.5)], ids=["GPU", "CPU"])
def test_long_collections_in_few_passes_are_named(noise: NoiseModel, duty: float) -> None:
    """A collection lengthens a few of the passes, so that their median does not change."""
    found = verdicts(f"collect rank=2 duty={duty} cycle=0.5 from=10", noise=noise)
    assert {(verdict.cause, verdict.reason) for verdict in found} == {(Cause.HOST, Reason.GARBAGE_COLLECTION)}
    assert {verdict.subject.ranks for verdict in found} == {(2,)}
    assert "ms per microbatch: Python collects garbage since step 1" in found[-1].sentence


def test_a_stopped_process_is_the_reason_of_its_host() -> None:
    found = verdicts("stop rank=2 duty=0.25 cycle=0.5 from=16")
    assert {(verdict.cause, verdict.reason) for verdict in found} == {(Cause.HOST, Reason.STOPPED)}
    assert any("its process was stopped for" in line for line in found[-1].evidence_text)


def test_collections_of_all_ranks_are_no_excess() -> None:
    records = np.zeros(4, RANK_RECORD)
    records["kind"], records["rank"] = RecordKind.GC, [0, 1, 2, 2]
    records["duration"] = 10_000_000 // DURATION_UNIT_NS
    step = MatchedStep(StepRecords(attempt=0, step=0, records=records, comms={}))
    found = host_spans_s(step, RecordKind.GC, np.array([2, 2, 2]))
    assert found == pytest.approx([0.0, 0.0, 0.005])
