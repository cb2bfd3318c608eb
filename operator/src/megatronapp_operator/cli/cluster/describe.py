"""`megatronapp describe` on a cluster."""

import argparse

from megatronapp_common.errors import JobError
from megatronapp_common.job.profiles.effective import LayeredJob, pinned_layers
from megatronapp_operator.cli import describe
from megatronapp_operator.cli.cluster.connection import opened
from megatronapp_operator.cli.jobs import JobHandle
from megatronapp_operator.errors import OperatorError


def main(arguments: argparse.Namespace) -> int:
    """Print everything about a job; return the exit code."""
    with opened(arguments) as cluster:
        job = cluster.view(arguments.job)
        layered, place = cluster_layers(job), [("Namespace", job.namespace)]
        lines = describe.lines(job, cluster.events(job), place=place, layered=layered, fields=arguments.fields)
        print("\n".join(lines), flush=True)
    return 0


def cluster_layers(job: JobHandle) -> LayeredJob:
    """Return the layers of the spec of a job of a cluster. Raises OperatorError for a spec that cannot be read."""
    try:
        return pinned_layers(job.document)
    except JobError as error:
        raise OperatorError(f"{job.name}: this release cannot read its spec: {error}") from error
