"""Polls of a job's hub, and of the launcher of its worker 0.

Requests are sent to addresses of pods that the API server lists as this job's, with a token that only this job's pods
can verify. Answers are hints for users: they are bounded, and what cannot be parsed is treated as absent. A pod that
does not answer in time is polled less and less often, so that slow hubs do not delay others.
"""

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

import httpx

from megatronapp_common.job import RankTable
from megatronapp_common.names import HUB_PORT, STATUS_PORT, ReplicaType
from megatronapp_common.web.loopback import authority
from megatronapp_common.web.tokens import TokenRole, derive_token, job_secret
from megatronapp_operator.backends.kubernetes.observe import GatheringStatus, PollHealth, PollResult, ReportedEnd
from megatronapp_operator.backends.kubernetes.pod_record import MAX_RECORD, PodRecord
from megatronapp_operator.keys import KeyRing
from megatronapp_operator.plan import Progress, WorkerOutcome
from megatronapp_operator.plan_io.hub_summary import UNREADABLE, HubSummary, read_progress, read_summary

POLL_S = 5.0
"""Shortest time in seconds between two polls of a job."""
TIMEOUT_S = 3.0
"""Seconds for an answer; a later one counts against the pod."""
LONGEST_PAUSE_S = 60.0
"""Longest pause in seconds after answers that were late."""
RECENT_S = 60.0
"""Seconds by which a hub's progress may differ from our clock; then a living agent has sent it."""
GATHERING = "Gathering"
"""Phase of a launcher that waits for others."""
MAX_REASON = 128
"""Most characters of the reason of an end."""
MAX_MISSING = 64
"""Most missing workers that are read."""
MAX_BYTES = 4 << 20
"""Most bytes of an answer that are read."""


class _TokenRefusedError(Exception):
    """An answer rejects the token as that of another job."""


class _PollTooLargeError(Exception):
    """An answer was late, or too long."""


class HubPoller:
    """Poller for all jobs. `keys` are the installation's, from which each job's secret is derived."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        *,
        keys: KeyRing,
        clock: Callable[[], float] = time.time,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._client = client
        self._keys = keys
        self._clock = clock
        self._timeout_s = timeout_s

    async def poll(
        self,
        uid: str,
        pods: Iterable[PodRecord],
        before: PollResult,
        *,
        key_id: str,
        attempt: int,
        workers: int,
        ranks: int,
    ) -> PollResult:
        """Poll hub and launcher once. A silent hub clears its summary; the last rank table is kept.

        The launcher is polled in parallel with a hub, whose agent may have died. `workers` and `ranks` are the size of
        the gang, and `key_id` names the key that it was started with. Without that key neither is polled: they reject
        the token of another key, and must not receive it.
        """
        key = self._keys.find(key_id)
        if key is None:
            return PollResult(
                unknown_key=key_id, rank_table=before.rank_table, received_at=before.received_at, page=before.page
            )
        token = derive_token(job_secret(key, uid), TokenRole.VIEWER)
        hub, first = _hub_of(pods), _first_of(pods, attempt)
        (summary_answer, at_hub), (answer, at_launcher) = await asyncio.gather(
            self._poll_if_due(hub, HUB_PORT, "summary", token, before.hub),
            self._poll_if_due(first, STATUS_PORT, "launcher", token, before.launcher),
        )
        summary = read_summary(summary_answer)
        known, progress, table = _launcher(answer, before.rank_table, workers, ranks)
        page = _page(summary, attempt)
        known |= page is not None and (self._is_new(page, before.page) or _agents(summary_answer) >= workers)
        return PollResult(
            summary=summary,
            progress=progress,
            rank_table=table,
            gathering=_gathering(answer, attempt, workers),
            launcher_attempt=_attempt(answer),
            ends=_ends(answer, workers),
            received_at=self._clock() if known else before.received_at,
            page=before.page if page is None else max(page, before.page or page),
            hub=at_hub,
            launcher=at_launcher,
        )

    def _is_new(self, page: tuple[int, float], before: tuple[int, float] | None) -> bool:
        """Return True if an agent has sent this progress lately: one that has died leaves its last one with the hub."""
        return (before is not None and page > before) or abs(self._clock() - page[1]) <= RECENT_S

    async def _poll_if_due(
        self, pod: PodRecord | None, port: int, path: str, token: str, contact: PollHealth
    ) -> tuple[Any, PollHealth]:
        """Return the answer of a pod if it is due, and the new state of polling it."""
        if pod is None:
            return None, PollHealth()
        if contact.uid != pod.uid:
            contact = PollHealth(uid=pod.uid)
        if self._clock() < contact.due:
            return None, contact
        try:
            answer = await self._request(f"http://{authority(pod.address or '', port)}/api/v1/{path}", token)
        except _TokenRefusedError:
            return None, PollHealth(uid=pod.uid, refused=True)
        except _PollTooLargeError:
            pause = min(LONGEST_PAUSE_S, POLL_S * 2.0 ** min(contact.misses + 1, 16))
            misses = contact.misses + 1
            return None, dataclasses.replace(contact, misses=misses, due=self._clock() + pause)
        return answer, PollHealth(uid=pod.uid, refused=contact.refused and answer is None)

    async def _request(self, url: str, token: str) -> Any:  # noqa: ANN401 - JSON of another process
        """Return the document at an address; None without one. Raises _TokenRefusedError, _PollTooLargeError."""
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json", "Accept-Encoding": "identity"}
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.stream("GET", url, headers=headers, timeout=self._timeout_s) as answer,
            ):
                if answer.status_code == HTTPStatus.UNAUTHORIZED:
                    raise _TokenRefusedError
                if not answer.is_success or "content-encoding" in answer.headers:
                    return None
                body = bytearray()
                async for part in answer.aiter_raw():
                    body += part
                    if len(body) > MAX_BYTES:
                        raise _PollTooLargeError
            return json.loads(body)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise _PollTooLargeError from error
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, RecursionError):
            return None


def _page(summary: HubSummary | None, attempt: int) -> tuple[int, float] | None:
    """Return attempt and time of a hub's progress of this attempt; None if it has none, or one without a time."""
    page = None if summary is None else summary.progress
    if page is None or page.attempt != attempt or page.updated_at is None:
        return None
    return page.attempt, page.updated_at


def _agents(answer: Any) -> int:  # noqa: ANN401 - JSON of another process
    """Return the number of agents at a hub: if all are connected, old progress means that the gang makes none."""
    try:
        return int(answer["tracer"]["agents"])
    except UNREADABLE:
        return 0


def _hub_of(pods: Iterable[PodRecord]) -> PodRecord | None:
    return next((pod for pod in pods if pod.type is ReplicaType.HUB and pod.ready and pod.address), None)


def _first_of(pods: Iterable[PodRecord], attempt: int) -> PodRecord | None:
    """Return worker 0 of the attempt, if it runs."""
    workers = (
        pod
        for pod in pods
        if pod.type is ReplicaType.WORKER and pod.index == 0 and pod.attempt == attempt and not pod.spare
    )
    return next((worker for worker in workers if worker.main.running and worker.address), None)


def _gathering(answer: Any, attempt: int, workers: int) -> GatheringStatus | None:  # noqa: ANN401 - JSON of another process
    """Return the workers that a launcher of this attempt waits for; indices outside the gang are ignored."""
    try:
        indices = map(int, answer["missing"][:MAX_MISSING])
        missing = tuple(index for index in indices if 0 <= index < workers)
        waits = answer["phase"] == GATHERING and int(answer["attempt"]) == attempt
    except UNREADABLE:
        return None
    return GatheringStatus(attempt=attempt, missing=missing) if waits and missing else None


def _attempt(answer: Any) -> int | None:  # noqa: ANN401 - JSON of another process
    """Return the attempt of a launcher; None without an answer."""
    try:
        return int(answer["attempt"])
    except UNREADABLE:
        return None


def _ends(answer: Any, workers: int) -> dict[int, ReportedEnd]:  # noqa: ANN401 - JSON of another process
    """Return how ranks ended whose launchers still run; empty without an answer."""
    try:
        attempt = int(answer["attempt"])
        found = {int(end["worker"]): _end(end, attempt) for end in answer["ends"]}
    except UNREADABLE:
        return {}
    return {index: end for index, end in found.items() if 0 <= index < workers}


def _end(end: Any, attempt: int) -> ReportedEnd:  # noqa: ANN401 - JSON of another process
    rank, signal = end["rank"], end["signal"]
    outcome = WorkerOutcome(
        code=int(end["code"]),
        reason=str(end["reason"])[:MAX_REASON],
        message=str(end["message"])[:MAX_RECORD],
        rank=None if rank is None else int(rank),
        signal=None if signal is None else int(signal),
    )
    return ReportedEnd(attempt=attempt, outcome=outcome, finished_at=float(end["finishedAt"]))


def _launcher(
    answer: Any,  # noqa: ANN401 - JSON of another process
    table: Any,  # noqa: ANN401 - of the answer before
    workers: int,
    ranks: int,
) -> tuple[bool, Progress | None, Any]:
    """Return True if a launcher has answered, its progress and rank table; the given table if it has none.

    A table for more workers or ranks than the gang has is treated as absent: the operator stores those of all jobs.
    """
    try:
        found, progress = answer["rankTable"], read_progress(answer["progress"])
        if found is not None:
            read = RankTable.model_validate_json(json.dumps(found))
            if len(read.workers) <= workers and sum(len(worker.ranks) for worker in read.workers) <= ranks:
                table = read.to_dict()
    except UNREADABLE:  # a ValidationError is a ValueError
        return False, None, table
    return True, progress, table
