"""Cost of a span for the host, measured when a rank begins."""

import statistics
from collections.abc import Callable

from megatronapp_common.trace import RecordKind
from megatronapp_trainer.scan.recorder import Recorder, RecordKey

BLOCKS = 9
SPANS = 32


def span_cost_ns(recorder: Recorder, now_ns: Callable[[], int], settle: Callable[[], None]) -> float:
    """Return the host time from entering a span to its record in ns, median of BLOCKS of SPANS empty spans.

    `settle` waits for work that the recorder deferred to the device; that wait is not counted, reading the device's
    times is. The records go to `recorder`, which should write to a ring without readers.
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
