"""The measured cost of a record: host time of a span, without what the device takes."""

import pathlib

import megatronapp_native as native
from megatronapp_trainer.scan.cost import BLOCKS, SPANS, span_cost_ns
from megatronapp_trainer.scan.recorder import Recorder


def test_every_span_is_recorded_and_the_wait_for_the_device_is_not_counted(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "scratch.cost"
    now_ns, ring = 0, native.RingWriter(str(path), 1024, 0, b"{}")

    def tick() -> int:
        nonlocal now_ns
        now_ns += 10
        return now_ns

    def settle() -> None:
        nonlocal now_ns
        now_ns += 1_000_000

    recorder = Recorder(ring, monotonic_ns=tick, run_queue_ns=lambda: 0, on_length=lambda _kind, _flags, _own_ns: None)
    cost_ns = span_cost_ns(recorder, tick, settle)
    _, lost = (reader := native.RingReader(str(path))).read(1)
    assert lost == 0
    assert reader.info().head == BLOCKS * SPANS
    assert 20 <= cost_ns < 30  # two readings of the clock for each span
    ring.close(True)


def test_a_real_span_costs_something(tmp_path: pathlib.Path) -> None:
    ring = native.RingWriter(str(tmp_path / "scratch.cost"), 1024, 0, b"{}")
    recorder = Recorder(
        ring,
        monotonic_ns=native.monotonic_ns,
        run_queue_ns=native.run_queue_ns,
        on_length=lambda _kind, _flags, _own_ns: None,
    )
    assert span_cost_ns(recorder, native.monotonic_ns, lambda: None) > 0
    ring.close(True)
