"""`megatronapp run` on a cluster: store the job, then report its events."""

import argparse
import time
from typing import Any

from megatronapp_common.job import MegatronJob
from megatronapp_common.text.terminal import replace_control_characters
from megatronapp_operator.backends.kubernetes.client.resources import JOBS
from megatronapp_operator.cli.cluster.connection import Cluster, ClusterJob, opened
from megatronapp_operator.cli.manifest import BAD_MANIFEST_EXIT_CODE, print_problems, read_manifest
from megatronapp_operator.cli.text.tables import iteration, number
from megatronapp_operator.cli.wait import Outages
from megatronapp_operator.errors import JobConflictError, JobNotFoundError, ManifestError, OperatorError
from megatronapp_operator.plan.policies.report import NAMED_STATES

POLL_S = 2.0
INTERRUPTED_EXIT_CODE = 130


def main(arguments: argparse.Namespace) -> int:
    """Run a job; return the exit code."""
    if arguments.profile:
        raise OperatorError(
            "--profile: on a cluster the operator reads profiles from the cluster; "
            f"write `kubectl apply -f {arguments.profile[0]}`, and spec.profile into the job"
        )
    try:
        job = read_manifest(arguments.file, name=arguments.name)
    except ManifestError as error:
        print_problems(error)
        return BAD_MANIFEST_EXIT_CODE
    with opened(arguments) as cluster:
        _settle_namespace(cluster, job)
        stored, change = store(cluster, job)
        print(f"megatronjob.megatronapp.io/{stored.name} {change}")
        if arguments.detach:
            return 0
        try:
            return _follow(cluster, stored, verbose=arguments.follow)
        except KeyboardInterrupt:
            print(f"\n{stored.name} continues in the cluster; `megatronapp delete {stored.name}` ends it")
            return INTERRUPTED_EXIT_CODE


def _settle_namespace(cluster: Cluster, job: MegatronJob) -> None:
    """Use the namespace of the manifest, or that of the command line; they may not differ. Raises OperatorError."""
    named = job.metadata.namespace if "namespace" in job.metadata.model_fields_set else None
    if named is not None and cluster.selection.namespace not in {None, named}:
        raise OperatorError(f"metadata.namespace is {named!r}, but -n is {cluster.namespace!r}; omit one of them")
    cluster.namespace = named or cluster.namespace


def store(cluster: Cluster, job: MegatronJob) -> tuple[ClusterJob, str]:
    """Store the job in the cluster's namespace; return it with created, configured or unchanged.

    Raises JobConflictError for a job that has ended.
    """
    name = job.metadata.name
    before = cluster.get(JOBS, cluster.namespace, name)
    if before is not None and ClusterJob(before).ended:
        raise JobConflictError(
            f"{cluster.namespace}/{name} has ended ({ClusterJob(before).phase}); remove it with "
            f"`megatronapp delete {name} --cluster` (checkpoints stay) and run it again, or use another name"
        )
    document = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    document["metadata"]["namespace"] = cluster.namespace
    stored = cluster.apply({key: value for key, value in document.items() if key != "status"})
    same = before is not None and before["metadata"]["generation"] == stored.document["metadata"]["generation"]
    return stored, "created" if before is None else "unchanged" if same else "configured"


def _follow(cluster: Cluster, job: ClusterJob, *, verbose: bool) -> int:
    teller, outages = JobReporter(verbose=verbose), Outages(began=True)
    while True:
        try:
            found = outages.answer(lambda: _with_events(cluster, job))
        except JobNotFoundError:
            print(f"{job.name} was deleted")
            return 1
        if found is not None:
            now, events = found
            for line in teller.new_lines(now, events):
                print(replace_control_characters(line), flush=True)
            if now.ended:
                return 0 if now.phase == "Succeeded" else 1
        time.sleep(POLL_S)


def _with_events(cluster: Cluster, job: ClusterJob) -> tuple[ClusterJob, list[dict[str, Any]]]:
    """Return the current state of a job and its events. Raises JobNotFoundError if it was deleted, or made again."""
    now = cluster.view(job.name)
    if now.uid != job.uid:
        raise JobNotFoundError(job.name)
    return now, cluster.events(now)


class JobReporter:
    """Formatter of what is new about a job."""

    def __init__(self, *, verbose: bool) -> None:
        self._verbose = verbose
        self._told: set[str] = set()
        self._phase = ""

    def new_lines(self, job: ClusterJob, events: list[dict[str, str]]) -> list[str]:
        """Return lines that were not printed yet: events, the phase, and (if `verbose`) progress and verdicts."""
        found = [line for event in events for line in self._once(event["uid"] + event["time"], _event_line(event))]
        if self._verbose:
            found += self._details(job)
        if job.phase != self._phase:
            self._phase = job.phase
            found.append(f"{job.name}: {job.phase}")
        return found

    def _details(self, job: ClusterJob) -> list[str]:
        found = []
        progress = job.status.get("progress") or {}
        if "iteration" in progress:
            loss = number(progress.get("loss"), ".4f")
            line = f"step {iteration(progress)}  loss {loss}"
            found += self._once(f"{progress.get('attempt')} {progress['iteration']}", line)
        for verdict in job.status.get("slowRanks", ()):
            if verdict.get("state") in NAMED_STATES:
                found += self._once(f"{verdict.get('id')} {verdict['state']}", f">> {verdict['sentence']}")
        return found

    def _once(self, key: str, line: str) -> list[str]:
        if key in self._told:
            return []
        self._told.add(key)
        return [line]


def _event_line(event: dict[str, str]) -> str:
    return event["message"] if event["type"] == "Normal" else f"warning: {event['message']}"
