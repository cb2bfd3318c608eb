"""`python -m megatronapp_analyzer.hub.judge`: judges the steps of one hub, which starts it."""

import argparse
import logging
import signal
import socket
import sys
from collections.abc import Sequence

from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.hub.judge.judging import StepJudging
from megatronapp_analyzer.hub.judge.links import serve
from megatronapp_analyzer.process import reuse_freed_memory


def main(argv: Sequence[str] | None = None) -> int:
    """Judge until the hub ends; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megatronapp_analyzer.hub.judge", description=__doc__)
    parser.add_argument("--descriptor", type=int, required=True, help="open socket to the hub")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s judge %(levelname)s %(message)s")
    # A terminal or a backend sends these to the whole group; the hub then ends this process when it has ended itself.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    reuse_freed_memory()
    with socket.socket(fileno=arguments.descriptor) as sock:
        serve(sock, StepJudging(Detector))
    return 0


if __name__ == "__main__":
    sys.exit(main())
