"""`python -m megatronapp_analyzer.hub.judge`: judges the steps of one hub, which starts it."""

import argparse
import functools
import logging
import signal
import socket
import sys
from collections.abc import Sequence

from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.graph.part_threads import use_threads
from megatronapp_analyzer.hub.judge.judging import StepJudging
from megatronapp_analyzer.hub.judge.links import serve
from megatronapp_analyzer.process import available_threads, reuse_freed_memory, thread_count


def main(argv: Sequence[str] | None = None) -> int:
    """Judge until the hub ends; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megatronapp_analyzer.hub.judge", description=__doc__)
    parser.add_argument("--descriptor", type=int, required=True, help="open socket to the hub")
    parser.add_argument(
        "--threads",
        type=thread_count,
        help="threads that judge a large step (default: the processors of this process, at most 4)",
    )
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s judge %(levelname)s %(message)s")
    # A terminal or a backend sends these to the whole group; the hub then ends this process when it has ended itself.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    reuse_freed_memory()
    threads = use_threads(arguments.threads or available_threads())
    with socket.socket(fileno=arguments.descriptor) as sock:
        serve(sock, StepJudging(functools.partial(Detector, threads=threads), threads))
    return 0


if __name__ == "__main__":
    sys.exit(main())
