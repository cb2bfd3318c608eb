"""`megatronapp logs` on a cluster: the log of a worker's trainer container, by rank.

The launcher writes the lines of its ranks to its own log, each with its rank in front. The log is deleted with the pod:
earlier ones are in the log storage of the cluster, if it has any. A pod that was restarted in place has the lines of
several attempts.
"""

import argparse
import base64
import contextlib
import enum
import functools
import gzip
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from urllib3.response import BaseHTTPResponse

from megatronapp_common.errors import TopologyError
from megatronapp_common.job import MegatronJob, resized
from megatronapp_common.names import RANK_TABLE_FILE
from megatronapp_common.text.terminal import replace_control_characters
from megatronapp_operator.backends.kubernetes.client.errors import ApiError, ForbiddenError
from megatronapp_operator.backends.kubernetes.client.resources import CONFIG_MAPS, PODS, Object
from megatronapp_operator.cli.cluster.connection import Cluster, ClusterJob, opened
from megatronapp_operator.cli.cluster.describe import cluster_layers
from megatronapp_operator.cli.cluster.official_client import unavailable
from megatronapp_operator.cli.cluster.pod_log.attempts import CONTAINER, check_attempt, of_attempt
from megatronapp_operator.cli.cluster.pod_log.position import LogPosition
from megatronapp_operator.cli.follower import reporting_rank
from megatronapp_operator.cli.logs import LogSelection
from megatronapp_operator.cli.wait import Outages, print_warning
from megatronapp_operator.errors import JobNotFoundError, OperatorError

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


def _checked_selection(job: ClusterJob, selection: LogSelection) -> None:
    """Raise OperatorError or TopologyError for a worker or a rank that the gang does not have."""
    sized = _sized_job(job)
    if selection.worker is not None and not 0 <= selection.worker < sized.world.nodes:
        raise OperatorError(f"{job.name} has no worker {selection.worker}; take 0 to {sized.world.nodes - 1}")
    if selection.rank is not None:
        sized.world.placement.worker_of(selection.rank)


def _sized_job(job: ClusterJob) -> MegatronJob:
    """Return the job with the size of its current gang. Raises OperatorError for a spec that cannot be read."""
    whole, size = cluster_layers(job).job, job.status.get("gangSize")
    return whole if size is None else resized(whole, size["data"])


def _worker_of(cluster: Cluster, job: ClusterJob, sized: MegatronJob, rank: int) -> int | None:
    """Return the worker that runs a rank, by the table of the launchers; None while that is not known.

    Raises TopologyError for a rank that the gang does not have, ApiError or OperatorError for a long table that cannot
    be read.
    """
    table, by_index = job.status.get("rankTable") or {}, sized.world.placement.worker_of(rank)
    workers = table.get("workers") or ()
    if not workers and sized.spec.network.rank_order == "Index":  # the table can only say the same
        return by_index
    if not workers and table.get("ref"):
        workers = _long_table(cluster, job, table, rank)
    return next((worker["index"] for worker in workers if rank in worker["ranks"]), None)


def _long_table(cluster: Cluster, job: ClusterJob, table: Object, rank: int) -> list[Object]:
    """Return the workers of a table in a ConfigMap; none while that has another table, such as the last attempt's."""
    try:
        found = cluster.get(CONFIG_MAPS, job.namespace, table["ref"]) or {}
    except ForbiddenError as error:
        pod = f"kubectl -n {job.namespace} logs {_pod_name(job, 0)} -c {CONTAINER}"
        raise OperatorError(
            f"{error}; it says which worker runs rank {rank}. Ask for the right to get configmaps, write --worker N "
            f"for a launcher's log, or look for [rank {rank}] in the logs of the pods, such as {pod}"
        ) from error
    text = found.get("data", {}).get(RANK_TABLE_FILE)
    packed = found.get("binaryData", {}).get(f"{RANK_TABLE_FILE}.gz")
    whole: Object = {}
    if text is not None or packed is not None:
        whole = json.loads(gzip.decompress(base64.b64decode(packed)) if text is None else text)
    return list(whole["workers"]) if whole.get("digest") == table["digest"] else []


def _pod_name(job: ClusterJob, worker: int) -> str:
    """Return the name of the pod of a worker, whose place a former spare may hold."""
    taken = (entry["pod"] for entry in job.status.get("takeovers", ()) if entry["worker"] == worker)
    return str(next(taken, f"{job.name}-worker-{worker}"))


class _PodState(enum.Enum):
    """State of a pod whose log is followed."""

    RUNS = enum.auto()
    """More lines may be written."""
    ENDED = enum.auto()
    """The container has terminated, or what it writes is not of the job any more: one more reading has all."""
    REPLACED = enum.auto()
    """The pod, and with it its log, does not exist any more."""


class WorkerLog:
    """Log of one rank, or of a launcher, in the pod of its worker."""

    def __init__(
        self,
        cluster: Cluster,
        job: ClusterJob,
        *,
        worker: int | None,
        rank: int | None,
        attempt: int | None,
        by_rank: LogSelection | None = None,
        report: Callable[[str], None] = print_warning,
    ) -> None:
        """Select a log. With `by_rank`, rank and worker are found by each state of the job: a restart changes them.

        `report` receives a warning for each outage of the API server while the log is followed.
        """
        self._cluster = cluster
        self.job = job
        self._worker = worker
        self._rank = rank
        self._attempt = attempt
        self._by_rank = by_rank
        self._outages = Outages(report, began=True)

    @property
    def whose(self) -> str:
        """Rank or launcher that has written the log."""
        return f"the launcher of worker {self._worker}" if self._rank is None else f"rank {self._rank}"

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        job: ClusterJob,
        selection: LogSelection,
        report: Callable[[str], None] = print_warning,
    ) -> "WorkerLog":
        """Return the selected log of a job. Raises OperatorError for a worker or rank that does not exist."""
        _checked_selection(job, selection)
        by_rank = selection if selection.worker is None else None
        made = cls(
            cluster,
            job,
            worker=selection.worker,
            rank=selection.rank,
            attempt=selection.attempt,
            by_rank=by_rank,
            report=report,
        )
        made._find_rank()
        return made

    def _find_rank(self) -> None:
        """Find rank and worker by the state of the job; the worker stays unknown while the launchers gather."""
        if self._by_rank is None:
            return
        sized = _sized_job(self.job)
        self._rank = reporting_rank(sized) if self._by_rank.rank is None else self._by_rank.rank
        self._worker = None
        with contextlib.suppress(TopologyError):  # a gang of fewer replicas lacks the rank
            self._worker = _worker_of(self._cluster, self.job, sized, self._rank)

    @property
    def _pod(self) -> str:
        """Name of the worker's pod, as the job was last seen. Raises OperatorError while the worker is not known."""
        if self._worker is None:
            order = _sized_job(self.job).spec.network.rank_order
            raise OperatorError(
                f"{self.job.name}: which worker runs rank {self._rank} is known once the workers of this attempt have "
                f"gathered (spec.network.rankOrder: {order}); try again, or read the log of a launcher until then: "
                f"megatronapp logs {self.job.name} --worker 0"
            )
        return _pod_name(self.job, self._worker)

    def pod(self) -> Object:
        """Return the worker's pod. Raises OperatorError if it does not exist, or belongs to another attempt."""
        pod = self._cluster.get(PODS, self.job.namespace, self._pod)
        if pod is None:
            raise OperatorError(f"pod {self.job.namespace}/{self._pod} does not exist (any more), and so has no log")
        if self._attempt is not None:
            check_attempt(pod, self._attempt)
        return pod

    def lines(self, pod: Object, *, follow: bool = False) -> Iterator[str]:
        """Yield lines of the rank or launcher; with `follow` until the container or the selected attempt has ended.

        Raises ApiError, or OperatorError if the pod's log does not have the selected attempt.
        """
        lines = self._followed(pod) if follow else self._read(pod, self._open(pod, {}))
        yield from select(lines if self._attempt is None else of_attempt(lines, pod, self._attempt), self._rank)

    def _open(self, pod: Object, query: Mapping[str, str]) -> BaseHTTPResponse:
        """Begin to read the log of a pod. Raises ApiError."""
        path = PODS.path(self.job.namespace, pod["metadata"]["name"], "log")
        return self._cluster.client.open(path, {"container": CONTAINER, **query})

    def _read(self, pod: Object, answer: BaseHTTPResponse, *, with_rest: bool = True) -> Iterator[str]:
        """Yield the lines of an answer, by default with a last line that has no end. Raises ApiError."""
        with contextlib.closing(answer), unavailable(f"the log of {pod['metadata']['name']} broke off"):
            # with a size, read1 raises an error where the log ends before its Content-Length
            yield from _lines(functools.partial(answer.read1, CHUNK), with_rest=with_rest)

    def _followed(self, pod: Object) -> Iterator[str]:
        """Yield the lines of a pod until its container has ended, over as many connections as that takes.

        A connection also ends where a kubelet restarts, or a proxy closes one without traffic. So all was read only if
        the container had ended before the last connection began. Raises ApiError if the first one fails.
        """
        position, state, connected = LogPosition(), _state_of(pod), False
        while state is not _PodState.REPLACED:
            ended = state is _PodState.ENDED
            follow = {} if ended else {"follow": "true"}
            try:
                answer = self._open(pod, follow | position.query)
                connected = True
                yield from position.new_lines(self._read(pod, answer, with_rest=ended))
            except ApiError as error:
                if not connected or not _is_late(error):
                    raise
            if ended:
                return
            state = self._outages.answer(functools.partial(self._state, pod)) or _PodState.RUNS
            if state is _PodState.RUNS:
                time.sleep(POLL_S)

    def _state(self, pod: Object) -> _PodState:
        """Return the current state of a pod whose log was read; no more is written if the job or its place is over."""
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        now = self._cluster.get(PODS, self.job.namespace, name)
        if now is None or now["metadata"]["uid"] != uid:
            return _PodState.REPLACED
        state = _state_of(now)
        if state is _PodState.RUNS and (
            self._has_ended() or (self._worker is not None and _pod_name(self.job, self._worker) != name)
        ):
            return _PodState.ENDED
        return state

    def is_complete(self) -> bool:
        """Read the job again, whose worker may have another pod by now; return True if no more lines can follow.

        False while the API server does not answer.
        """
        return bool(self._outages.answer(self._has_ended))

    def _has_ended(self) -> bool:
        try:
            self.job = self._cluster.view(self.job.name)
        except JobNotFoundError:
            return True
        self._find_rank()
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
                    if self._attempt is not None:  # one that the log lacks is refused now, not at the end of the job
                        next(self.lines(pod), None)
                    yield from self.lines(pod, follow=True) if tail is None else _tailed(self, pod, tail)
                    read, tail = pod["metadata"]["uid"], None
            except (OperatorError, ApiError) as error:
                if self._attempt is not None or not _is_late(error):
                    raise
            if self._attempt is not None or self.is_complete():
                return
            time.sleep(POLL_S)


def _state_of(pod: Object) -> _PodState:
    """Return the state of a pod by the status of its trainer container."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    ended = any(status["name"] == CONTAINER and (status.get("state") or {}).get("terminated") for status in statuses)
    return _PodState.ENDED if ended else _PodState.RUNS


def _lines(read: Callable[[], bytes], *, with_rest: bool = True) -> Iterator[str]:
    """Split received chunks into lines; the last one may have no line end, and is omitted without `with_rest`."""
    rest = b""
    while piece := read():
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
    if rest and with_rest:
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
    return not isinstance(error, ApiError) or error.status in {0, 400, 404, 429, 500, 502, 503, 504}


def _print(lines: list[str]) -> None:
    sys.stdout.write(
        "".join(f"{replace_control_characters(line) if sys.stdout.isatty() else line}\n" for line in lines)
    )
    sys.stdout.flush()
