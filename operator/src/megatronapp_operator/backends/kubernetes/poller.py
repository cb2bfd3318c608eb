"""Asking a job's hub, and the launcher of its worker 0, how it goes.

They are asked at the addresses of pods that the API server names as this job's, with a token that only this job's can
check. What they answer is a hint for people: it is bounded, and what cannot be read counts as not said.
"""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

import httpx

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
            summary = read_summary(await self._ask(f"http://{hub.address}:{HUB_PORT}/api/v1/summary", token))
        table = before.rank_table
        known = table is not None and table.get("attempt") == attempt
        progress = None
        if first is not None and (summary is None or not known):
            answer = await self._ask(f"http://{first.address}:{STATUS_PORT}/api/v1/launcher", token)
            progress, table = _launcher(answer, table)
        return dataclasses.replace(before, summary=summary, progress=progress, rank_table=table)

    async def _ask(self, url: str, token: str) -> Any:  # noqa: ANN401 - JSON of another process
        """The document at an address; None if nobody answers with one."""
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        try:
            async with self._client.stream("GET", url, headers=headers, timeout=TIMEOUT_S) as answer:
                if not answer.is_success:
                    return None
                body = bytearray()
                async for part in answer.aiter_bytes():
                    body += part
                    if len(body) > MAX_BYTES:
                        return None
            return json.loads(body)
        except (httpx.HTTPError, ValueError):
            return None


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
        return read_progress(answer["progress"]), table if told is None else {**told, "attempt": int(told["attempt"])}
    except UNREADABLE:
        return None, table
