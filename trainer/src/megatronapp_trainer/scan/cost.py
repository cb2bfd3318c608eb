"""What a span costs the host, measured when a rank begins."""

import statistics
from collections.abc import Callable

from megatronapp_common.trace import RecordKind
from megatronapp_trainer.scan.recorder import Recorder, RecordKey

BLOCKS = 9
SPANS = 32


def span_cost_ns(recorder: Recorder, now_ns: Callable[[], int], settle: Callable[[], None]) -> float:
    """Host time from entering a span to its record, median of BLOCKS of SPANS empty spans.

    `settle` waits for what the recorder left to the device; that wait is not counted, reading the device's times is.
    The records go into `recorder`, which should write into a ring that nobody reads.
    """
    fields = RecordKey(RecordKind.FORWARD, microbatch=0)
    costs = []
    for _ in range(BLOCKS):
        begin = now_ns()
        for _ in range(SPANS):
            recorder.leave(fields, recorder.enter(fields))
        left = now_ns()
        settle()
        settled = now_ns()
        recorder.begin_step(0)
        costs.append((now_ns() - settled + left - begin) / SPANS)
    return statistics.median(costs)
