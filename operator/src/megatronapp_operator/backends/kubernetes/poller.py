"""Asking a job's hub, and the launcher of its worker 0, how it goes.

They are asked at the addresses of pods that the API server names as this job's, with a token that only this job's can
check. What they answer is a hint for people: it is bounded, and what cannot be read counts as not said.
"""

import asyncio
import dataclasses
import json
from collections.abc import Iterable
from typing import Any

import httpx

from megatronapp_common.job import RankTable
from megatronapp_common.names import HUB_PORT, STATUS_PORT, ReplicaType
from megatronapp_common.tokens import Role, derive, job_secret
from megatronapp_operator.backends.kubernetes.observe import Told
from megatronapp_operator.backends.kubernetes.records import PodRecord
from megatronapp_operator.summary import UNREADABLE, read_progress, read_summary

POLL_S = 5.0
TIMEOUT_S = 3.0
MAX_BYTES = 4 << 20
"""Longest answer that is read."""


class Poller:
    """One for all jobs. `key` is the installation's, from which each job's secret follows."""

    def __init__(self, client: httpx.AsyncClient, *, key: str) -> None:
        self._client = client
        self._key = key

    async def poll(self, uid: str, pods: Iterable[PodRecord], before: Told, *, attempt: int) -> Told:
        """What hub and launcher say now. Of a hub that does not answer nothing is kept, of a rank table all is."""
        token = derive(job_secret(self._key, uid), Role.VIEWER)
        hub, first = _hub_of(pods), _first_of(pods, attempt)
        summary = None
        if hub is not None:
            summary = read_summary(await self._ask(f"http://{_host(hub)}:{HUB_PORT}/api/v1/summary", token))
        table = before.rank_table
        progress = None
        if first is not None:  # also beside a hub, whose agent may have died
            answer = await self._ask(f"http://{_host(first)}:{STATUS_PORT}/api/v1/launcher", token)
            progress, table = _launcher(answer, table)
        return dataclasses.replace(before, summary=summary, progress=progress, rank_table=table)

    async def _ask(self, url: str, token: str) -> Any:  # noqa: ANN401 - JSON of another process
        """The document at an address; None if nobody answers with one."""
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json", "Accept-Encoding": "identity"}
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                self._client.stream("GET", url, headers=headers, timeout=TIMEOUT_S) as answer,
            ):
                if not answer.is_success or "content-encoding" in answer.headers:
                    return None
                body = bytearray()
                async for part in answer.aiter_raw():
                    body += part
                    if len(body) > MAX_BYTES:
                        return None
            return json.loads(body)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError, RecursionError):
            return None


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


def _launcher(answer: Any, table: Any) -> tuple[Any, Any]:  # noqa: ANN401 - JSON of another process
    """Progress and rank table of a launcher's answer; the table we have if it tells none."""
    try:
        told = answer["rankTable"]
        return read_progress(answer["progress"]), table if told is None else RankTable.model_validate_json(
            json.dumps(told)
        ).to_dict()
    except UNREADABLE:  # a ValidationError is a ValueError
        return None, table
