"""Asking a job's hub, and the launcher of its worker 0, how it goes.

They are asked at the addresses of pods that the API server names as this job's, with a token that only this job's can
check. What they answer is a hint for people: it is bounded, and what cannot be read counts as not said. Whoever does
not answer in time is asked less and less often, so that slow hubs do not keep others waiting.
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
from megatronapp_common.web.tokens import TokenRole, derive_token, job_secret
from megatronapp_operator.backends.kubernetes.observe import GatheringStatus, PollHealth, PollResult
from megatronapp_operator.backends.kubernetes.pod_record import PodRecord
from megatronapp_operator.keys import KeyRing
from megatronapp_operator.plan import Progress
from megatronapp_operator.plan_io.hub_summary import UNREADABLE, HubSummary, read_progress, read_summary

POLL_S = 5.0
TIMEOUT_S = 3.0
LONGEST_PAUSE_S = 60.0
"""After many answers that did not come in time."""
RECENT_S = 60.0
"""A hub's page that differs no more from our clock was brought by an agent that lives."""
GATHERING = "Gathering"
"""Phase of a launcher that waits for others."""
MAX_MISSING = 64
"""So many that it waits for are taken over."""
MAX_BYTES = 4 << 20
"""Longest answer that is read."""


class _TokenRefusedError(Exception):
    """An answer that says that the token is not the job's."""


class _PollTooLargeError(Exception):
    """An answer that took too long, or was."""


class HubPoller:
    """One for all jobs. `keys` are the installation's, from which each job's secret follows."""

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
        self, uid: str, pods: Iterable[PodRecord], before: PollResult, *, key_id: str, attempt: int, workers: int
    ) -> PollResult:
        """What hub and launcher say now. Of a hub that does not answer nothing is kept, of a rank table all is.

        The launcher is asked beside a hub, too, whose agent may have died. `workers` is the size of the gang,
        `key_id` names the key that it was started with. Without that key neither is asked: they refuse the token of
        another key, and it is not theirs to see.
        """
        key = self._keys.find(key_id)
        if key is None:
            return PollResult(
                unknown_key=key_id, rank_table=before.rank_table, received_at=before.received_at, page=before.page
            )
        token = derive_token(job_secret(key, uid), TokenRole.VIEWER)
        hub, first = _hub_of(pods), _first_of(pods, attempt)
        (said, at_hub), (answer, at_launcher) = await asyncio.gather(
            self._poll_if_due(hub, f":{HUB_PORT}/api/v1/summary", token, before.hub),
            self._poll_if_due(first, f":{STATUS_PORT}/api/v1/launcher", token, before.launcher),
        )
        summary = read_summary(said)
        known, progress, table = _launcher(answer, before.rank_table)
        page = _page(summary, attempt)
        known |= page is not None and (self._is_new(page, before.page) or _agents(said) >= workers)
        return PollResult(
            summary=summary,
            progress=progress,
            rank_table=table,
            gathering=_gathering(answer, attempt, workers),
            received_at=self._clock() if known else before.received_at,
            page=before.page if page is None else max(page, before.page or page),
            hub=at_hub,
            launcher=at_launcher,
        )

    def _is_new(self, page: tuple[int, float], before: tuple[int, float] | None) -> bool:
        """Whether an agent has brought this page lately: one that has died leaves its last page with the hub."""
        return (before is not None and page > before) or abs(self._clock() - page[1]) <= RECENT_S

    async def _poll_if_due(
        self, pod: PodRecord | None, path: str, token: str, contact: PollHealth
    ) -> tuple[Any, PollHealth]:
        """The answer of a pod if it is its turn, and how it went."""
        if pod is None:
            return None, PollHealth()
        if contact.uid != pod.uid:
            contact = PollHealth(uid=pod.uid)
        if self._clock() < contact.due:
            return None, contact
        try:
            answer = await self._request(f"http://{_host(pod)}{path}", token)
        except _TokenRefusedError:
            return None, PollHealth(uid=pod.uid, refused=True)
        except _PollTooLargeError:
            pause = min(LONGEST_PAUSE_S, POLL_S * 2.0 ** min(contact.misses + 1, 16))
            misses = contact.misses + 1
            return None, dataclasses.replace(contact, misses=misses, due=self._clock() + pause)
        return answer, PollHealth(uid=pod.uid, refused=contact.refused and answer is None)

    async def _request(self, url: str, token: str) -> Any:  # noqa: ANN401 - JSON of another process
        """The document at an address; None if nobody answers with one. Raises _TokenRefusedError, _TooLongError."""
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
    """Attempt and time of a hub's page of this attempt; None: it has none, or one that does not say when it was."""
    page = None if summary is None else summary.progress
    if page is None or page.attempt != attempt or page.updated_at is None:
        return None
    return page.attempt, page.updated_at


def _agents(answer: Any) -> int:  # noqa: ANN401 - JSON of another process
    """How many agents are with a hub: if all are, an old page says that the gang stands still."""
    try:
        return int(answer["tracer"]["agents"])
    except UNREADABLE:
        return 0


def _host(pod: PodRecord) -> str:
    """A pod's address as it stands in a URL."""
    address = pod.address or ""
    return f"[{address}]" if ":" in address else address


def _hub_of(pods: Iterable[PodRecord]) -> PodRecord | None:
    return next((one for one in pods if one.type is ReplicaType.HUB and one.ready and one.address), None)


def _first_of(pods: Iterable[PodRecord], attempt: int) -> PodRecord | None:
    """Worker 0 of the attempt, if it runs."""
    workers = (one for one in pods if one.type is ReplicaType.WORKER and one.index == 0 and one.attempt == attempt)
    return next((one for one in workers if one.main.running and one.address), None)


def _gathering(answer: Any, attempt: int, workers: int) -> GatheringStatus | None:  # noqa: ANN401 - JSON of another process
    """Whom a launcher of this attempt waits for; whoever is not of the gang is not believed."""
    try:
        told = map(int, answer["missing"][:MAX_MISSING])
        missing = tuple(index for index in told if 0 <= index < workers)
        waits = answer["phase"] == GATHERING and int(answer["attempt"]) == attempt
    except UNREADABLE:
        return None
    return GatheringStatus(attempt=attempt, missing=missing) if waits and missing else None


def _launcher(answer: Any, table: Any) -> tuple[bool, Progress | None, Any]:  # noqa: ANN401 - JSON of another process
    """Whether a launcher has answered, its progress and rank table; the table we have if it tells none."""
    try:
        told, progress = answer["rankTable"], read_progress(answer["progress"])
        if told is not None:
            table = RankTable.model_validate_json(json.dumps(told)).to_dict()
    except UNREADABLE:  # a ValidationError is a ValueError
        return False, None, table
    return True, progress, table
