"""Times in which a process was stopped, and those in which it waited for a processor."""

import ast
import os
import pathlib
import signal
import subprocess
import sys
import time

from megatronapp_native import StopMeter, monotonic_ns, run_queue_ns

STOP_S = 0.15
TRIES = 5
"""Measurements, of which one without a stop of this very process is enough."""
METERED = """
import sys
from megatronapp_native import StopMeter, monotonic_ns
meter = StopMeter()
print("ready", flush=True)
stopped_ns = int(sys.stdin.readline())
stops = []
give_up_ns = monotonic_ns() + 120_000_000_000
while not any(end > stopped_ns for start, end in stops) and monotonic_ns() < give_up_ns:
    stops += meter.take()
print(stops, flush=True)
sys.stdin.readline()
meter.close()
"""
BUSY = "while True: pass"


def threads_of(pid: int) -> list[pathlib.Path]:
    return list(pathlib.Path(f"/proc/{pid}/task").iterdir())


def is_stopped(thread: pathlib.Path) -> bool:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"


def queued_ns_of(pid: int) -> dict[str, int]:
    """Return for how many nanoseconds each thread of a process has waited for a processor."""
    return {thread.name: int((thread / "schedstat").read_text().split()[1]) for thread in threads_of(pid)}


def test_a_stopped_process_knows_for_how_long() -> None:
    with subprocess.Popen([sys.executable, "-c", METERED], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        queued_before_ns = queued_ns_of(process.pid)
        process.send_signal(signal.SIGSTOP)
        while not all(is_stopped(thread) for thread in threads_of(process.pid)):
            time.sleep(0.001)
        stopped_ns = monotonic_ns()
        time.sleep(STOP_S)
        continued_ns = monotonic_ns()
        process.send_signal(signal.SIGCONT)
        process.stdin.write(b"%d\n" % stopped_ns)
        process.stdin.flush()
        stops = ast.literal_eval(process.stdout.readline().decode())
        # On a crowded machine threads wait for a processor before they stop; the meter takes that from the stop.
        queued_ns = max(after - queued_before_ns[thread] for thread, after in queued_ns_of(process.pid).items())
        process.communicate(b"\n")
    within = sum(max(min(end, continued_ns) - max(start, stopped_ns), 0) for start, end in stops)
    assert within >= 0.9 * (continued_ns - stopped_ns) - queued_ns


def wait_for_a_processor() -> tuple[int, int]:
    """Compute until this thread has waited; return for how many nanoseconds, and those of stops that were metered."""
    meter = StopMeter()
    queued_ns, begin_ns = run_queue_ns(), monotonic_ns()
    while run_queue_ns() - queued_ns < 200_000_000 and monotonic_ns() - begin_ns < 20_000_000_000:
        sum(range(1000))
    queued_ns = run_queue_ns() - queued_ns
    stopped_ns = sum(end - start for start, end in meter.take())
    meter.close()
    return queued_ns, stopped_ns


def test_waiting_for_a_processor_is_no_stop() -> None:
    core = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(3)]
    try:
        for process in busy:
            os.sched_setaffinity(process.pid, {core})
        os.sched_setaffinity(0, {core})
        for _ in range(TRIES):
            queued_ns, stopped_ns = wait_for_a_processor()
            if stopped_ns < queued_ns / 4:
                break
    finally:
        os.sched_setaffinity(0, before)
        for process in busy:
            process.kill()
            process.wait()
    assert stopped_ns < queued_ns / 4
