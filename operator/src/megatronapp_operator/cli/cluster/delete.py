"""`megatronapp delete` on a cluster."""

import argparse

from megatronapp_common.names import LABEL_JOB_UID
from megatronapp_operator.backends.kubernetes.client.resources import JOBS, PODS
from megatronapp_operator.cli.cluster.connection import Cluster, ClusterJob, opened
from megatronapp_operator.errors import JobNotFoundError


def main(arguments: argparse.Namespace) -> int:
    """Delete a job; its pods stop after it, with time for a checkpoint. Return the exit code."""
    with opened(arguments) as cluster:
        try:
            job = cluster.view(arguments.job)
        except JobNotFoundError:
            if arguments.ignore_not_found:
                return 0
            raise
        delete_job(cluster, job)
        if arguments.force:
            print("stopping at once; no checkpoint is written", flush=True)
            kill_pods(cluster, job)
    print(f'megatronjob.megatronapp.io "{job.name}" deleted')
    return 0


def delete_job(cluster: Cluster, job: ClusterJob) -> None:
    """Delete a job; its pods stop after it, with time for a checkpoint."""
    cluster.delete(JOBS, job.document)


def kill_pods(cluster: Cluster, job: ClusterJob) -> None:
    """End the pods of a job at once, without a checkpoint."""
    for pod in cluster.list_objects(PODS, job.namespace, labelSelector=f"{LABEL_JOB_UID}={job.uid}"):
        cluster.delete(PODS, pod, grace_s=0)
