"""`megatronapp logs` on a cluster: the log of a worker's trainer container, by rank.

The launcher writes the lines of its ranks to its own log, each with its rank in front. The log is deleted with the pod,
so that only the newest attempt has one; older ones are in the log storage of the cluster, if it has any.
"""

import argparse
import contextlib
import functools
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator

from megatronapp_common.job import MegatronJob, resized
from megatronapp_common.names import LABEL_ATTEMPT
from megatronapp_common.text.terminal import replace_control_characters
from megatronapp_operator.backends.kubernetes.client.errors import ApiError
from megatronapp_operator.backends.kubernetes.client.resources import PODS, Object
from megatronapp_operator.cli.cluster.connection import Cluster, ClusterJob, opened
from megatronapp_operator.cli.cluster.describe import cluster_layers
from megatronapp_operator.cli.cluster.official_client import unavailable
from megatronapp_operator.cli.follower import reporting_rank
from megatronapp_operator.cli.logs import LogSelection
from megatronapp_operator.errors import JobNotFoundError, OperatorError

CONTAINER = "trainer"
CHUNK = 1 << 16
"""Most bytes of a log that are read at a time."""
POLL_S = 2.0
_OF_RANK = re.compile(r"\[rank (\d+)\] ?(.*)")


def main(arguments: argparse.Namespace) -> int:
    """Print a log; return the exit code."""
    with opened(arguments) as cluster:
        log = WorkerLog.of(cluster, cluster.view(arguments.job), LogSelection.of(arguments))
        if arguments.follow:
            for line in log.following(arguments.tail):
                _print([line])
            return 0
        lines = list(log.lines(log.pod()))
        _print(lines if arguments.tail is None else lines[max(0, len(lines) - arguments.tail) :])
        if not lines:
            read = f"the launchers log starts and ends: megatronapp logs {log.job.name} --worker 0"
            print(f"note: {log.whose} has written nothing (yet); {read}", file=sys.stderr)
    return 0


def _selected_log(job: MegatronJob, selection: LogSelection) -> tuple[int, int | None]:
    """Return worker and rank of the selected log (rank None: the launcher)."""
    if selection.worker is not None:
        if not 0 <= selection.worker < job.world.nodes:
            raise OperatorError(
                f"{job.metadata.name} has no worker {selection.worker}; take 0 to {job.world.nodes - 1}"
            )
        return selection.worker, None
    rank = reporting_rank(job) if selection.rank is None else selection.rank
    return job.world.placement.worker_of(rank), rank


def _sized_job(job: ClusterJob) -> MegatronJob:
    """Return the job with the size of its current gang. Raises OperatorError for a spec that cannot be read."""
    whole, size = cluster_layers(job).job, job.status.get("gangSize")
    return whole if size is None else resized(whole, size["data"])


def _pod_name(job: ClusterJob, worker: int) -> str:
    """Return the name of the pod of a worker, whose place a former spare may hold."""
    taken = (entry["pod"] for entry in job.status.get("takeovers", ()) if entry["worker"] == worker)
    return str(next(taken, f"{job.name}-worker-{worker}"))


class WorkerLog:
    """Log of one rank, or of a launcher, in the pod of its worker."""

    def __init__(
        self,
        cluster: Cluster,
        job: ClusterJob,
        *,
        worker: int,
        rank: int | None,
        attempt: int | None,
        reports: bool = False,
    ) -> None:
        """Select a log. `reports`: that of the reporting rank, which is another one in a gang of another size."""
        self._cluster = cluster
        self.job = job
        self._worker = worker
        self._rank = rank
        self._attempt = attempt
        self._reports = reports

    @property
    def whose(self) -> str:
        """Rank or launcher that has written the log."""
        return f"the launcher of worker {self._worker}" if self._rank is None else f"rank {self._rank}"

    @classmethod
    def of(cls, cluster: Cluster, job: ClusterJob, selection: LogSelection) -> "WorkerLog":
        """Return the selected log of a job. Raises OperatorError for a worker or rank that does not exist."""
        worker, rank = _selected_log(_sized_job(job), selection)
        reports = selection.worker is None and selection.rank is None
        return cls(cluster, job, worker=worker, rank=rank, attempt=selection.attempt, reports=reports)

    @property
    def _pod(self) -> str:
        """Name of the worker's pod, as the job was last seen."""
        return _pod_name(self.job, self._worker)

    def pod(self) -> Object:
        """Return the worker's pod. Raises OperatorError if it does not exist, or belongs to another attempt."""
        pod = self._cluster.get(PODS, self.job.namespace, self._pod)
        if pod is None:
            raise OperatorError(f"pod {self.job.namespace}/{self._pod} does not exist (any more), and so has no log")
        found = pod["metadata"].get("labels", {}).get(LABEL_ATTEMPT, "0")
        if self._attempt is not None and str(self._attempt) != found:
            raise OperatorError(
                f"{self._pod} is of attempt {found}; the log of attempt {self._attempt} was deleted with its pod; "
                "look for it in the log storage of the cluster"
            )
        return pod

    def lines(self, pod: Object, *, follow: bool = False) -> Iterator[str]:
        """Yield lines of the rank or launcher; with `follow` until the container has ended. Raises ApiError."""
        path = PODS.path(self.job.namespace, pod["metadata"]["name"], "log")
        query = {"container": CONTAINER} | ({"follow": "true"} if follow else {})
        answer = self._cluster.client.open(path, query)
        with contextlib.closing(answer), unavailable(f"the log of {self._pod} broke off"):
            # with a size, read1 raises an error where the log ends before its Content-Length
            yield from select(_lines(functools.partial(answer.read1, CHUNK)), self._rank)

    def is_complete(self) -> bool:
        """Read the job again, whose worker may have another pod by now; return True if no more lines can follow."""
        try:
            self.job = self._cluster.view(self.job.name)
        except JobNotFoundError:
            return True
        if self._reports:
            self._worker, self._rank = _selected_log(_sized_job(self.job), LogSelection())
        return self.job.ended

    def following(self, tail: int | None = None) -> Iterator[str]:
        """Yield lines until the job has ended; continue with the pod of the next attempt unless an attempt is selected.

        With `tail`, only that many of the lines that exist already. Raises ApiError or OperatorError.
        """
        read = None
        while True:
            try:
                pod = self.pod()
                if pod["metadata"]["uid"] != read:
                    yield from self.lines(pod, follow=True) if tail is None else _tailed(self, pod, tail)
                    read, tail = pod["metadata"]["uid"], None
            except (OperatorError, ApiError) as error:
                if self._attempt is not None or not _is_late(error):
                    raise
            if self.is_complete() or self._attempt is not None:
                return
            time.sleep(POLL_S)


def _lines(read: Callable[[], bytes]) -> Iterator[str]:
    """Split received chunks into lines; the last one may have no line end."""
    rest = b""
    while piece := read():
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
    if rest:
        yield rest.decode(errors="replace")


def select(lines: Iterable[str], rank: int | None) -> Iterator[str]:
    """Yield the lines of one rank without their prefix, or (None) those of the launcher."""
    for line in lines:
        found = _OF_RANK.fullmatch(line)
        if found is None:
            if rank is None:
                yield line
        elif rank is not None and int(found[1]) == rank:
            yield found[2]


def _tailed(log: WorkerLog, pod: Object, count: int) -> Iterator[str]:
    """Yield the last `count` lines so far, then those that follow."""
    known = list(log.lines(pod))
    for number, line in enumerate(log.lines(pod, follow=True)):
        if number >= len(known) - count:
            yield line


def _is_late(error: OperatorError) -> bool:
    """Return True if the pod does not exist yet, or its container has not started."""
    return not isinstance(error, ApiError) or error.status in {0, 400, 404, 500, 502, 503, 504}


def _print(lines: list[str]) -> None:
    sys.stdout.write(
        "".join(f"{replace_control_characters(line) if sys.stdout.isatty() else line}\n" for line in lines)
    )
    sys.stdout.flush()
