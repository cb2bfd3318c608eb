"""`megatronapp get` on a cluster."""

import argparse
import dataclasses
from collections.abc import Sequence

from megatronapp_operator.cli import get
from megatronapp_operator.cli.cluster.connection import Cluster, ClusterJob, opened
from megatronapp_operator.errors import OperatorError

WATCH_S = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class _AllJobs:
    cluster: Cluster

    def view(self, name: str) -> ClusterJob:
        raise OperatorError(f"a job name belongs to one namespace; write -n NAMESPACE instead of -A with {name}")

    def views(self) -> Sequence[ClusterJob]:
        return self.cluster.views_of(None)


def main(arguments: argparse.Namespace) -> int:
    """Print one job or all; return the exit code."""
    with opened(arguments) as cluster:
        if arguments.all_namespaces:
            return get.show(_AllJobs(cluster), arguments, watch_s=WATCH_S, namespaces=True)
        return get.show(cluster, arguments, watch_s=WATCH_S)
