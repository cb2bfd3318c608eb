"""`megatronapp wait` on a cluster."""

import argparse

from megatronapp_operator.cli import wait
from megatronapp_operator.cli.cluster.connection import opened

POLL_S = 1.0


def main(arguments: argparse.Namespace) -> int:
    """Wait for a condition of a job; return the exit code."""
    with opened(arguments) as cluster:
        return wait.wait(cluster, arguments, poll_s=POLL_S)
