"""`megatronapp describe` on a cluster."""

import argparse

from megatronapp_operator.cli import describe
from megatronapp_operator.cli.cluster.connection import opened


def main(arguments: argparse.Namespace) -> int:
    """Print everything about a job; return the exit code."""
    with opened(arguments) as cluster:
        job = cluster.view(arguments.job)
        lines = describe.lines(job, cluster.events(job), place=[("Namespace", job.namespace)])
        print("\n".join(lines), flush=True)
    return 0
