"""Answers of an operator's liveness probe, and the refusals of an API server that show that a namespace ends."""

import dataclasses
import time

import pytest
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from megatronapp_operator.backends.kubernetes.client.errors import (
    TERMINATING,
    ForbiddenError,
    NamespaceTerminatingError,
    api_error_for,
)
from megatronapp_operator.controller.probes import create_app
from megatronapp_operator.controller.service import LOOP_LATE_S, STUCK_S, ControllerHealth


def health(*, oldest_s: float = 0.0, finished_ago_s: float = 0.0, turned_ago_s: float = 0.0) -> ControllerHealth:
    now = time.monotonic()
    return ControllerHealth(
        synced=True,
        leads=True,
        finished_at=now - finished_ago_s,
        oldest_s=lambda: oldest_s,
        turned_at=lambda: now - turned_ago_s,
    )


LATE_S = STUCK_S + 1


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        ({}, None),
        ({"oldest_s": LATE_S}, None),  # reconciliations end: there is much to do
        ({"finished_ago_s": LATE_S}, None),  # nothing is to do
        ({"oldest_s": LATE_S, "finished_ago_s": LATE_S}, "jobs wait"),
        ({"turned_ago_s": LOOP_LATE_S + 1}, "watches"),
    ],
)
def test_an_operator_is_stuck_if_jobs_wait_idle_or_its_watches_stall(
    found: dict[str, float], cause: str | None
) -> None:
    app = create_app(CollectorRegistry(), alive=health(**found).stuck, ready=lambda: None)
    with TestClient(app) as client:
        answer = client.get("/healthz")
    assert answer.status_code == (200 if cause is None else 503)
    assert (cause or "ok") in answer.text


def test_who_waits_for_the_lease_or_still_lists_everything_is_not_stuck() -> None:
    waiting = health(oldest_s=LATE_S, finished_ago_s=LATE_S, turned_ago_s=LOOP_LATE_S + 1)
    assert dataclasses.replace(waiting, leads=False).stuck() is None
    listing = health(oldest_s=LATE_S, finished_ago_s=LATE_S)
    assert dataclasses.replace(listing, synced=False).stuck() is None


def test_a_terminating_namespace_is_known_by_its_cause() -> None:
    document = {"reason": "Forbidden", "message": 'pods "a" is forbidden: because it is being terminated'}
    assert type(api_error_for(403, document, "POST /pods")) is ForbiddenError
    cause = {"reason": "NamespaceTerminating", "field": "metadata.namespace"}
    ending = api_error_for(403, document | {"details": {"causes": [cause]}}, "POST /pods")
    assert isinstance(ending, NamespaceTerminatingError) and "being terminated" in str(ending)
    assert (ending.code, api_error_for(403, document, "POST /pods").code) == (TERMINATING, "403")
