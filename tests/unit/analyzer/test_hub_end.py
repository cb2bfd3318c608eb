"""End of a hub: traces are stored first, and before any backend kills it."""

import asyncio
import threading

import pytest

from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.hub.http.server import SHUTDOWN_S
from megatronapp_analyzer.hub.ingest import spool
from megatronapp_analyzer.hub.judge.links import LocalJudge
from megatronapp_analyzer.hub.service import Hub
from megatronapp_analyzer.hub.settings import HubSettings, JobIdentity
from megatronapp_operator.backends.kubernetes.render import hub as hub_pod
from megatronapp_operator.backends.process import hub as hub_process

DEADLINE_S = 120.0


class LateJudge(LocalJudge):
    """Detector whose end waits for an event."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__(Detector)
        self._event = event
        self.in_time = False

    def close(self) -> None:
        self.in_time = self._event.wait(DEADLINE_S)


async def serve_nothing() -> None:
    await asyncio.Event().wait()


@pytest.mark.asyncio
async def test_traces_are_stored_while_the_detector_ends() -> None:
    stored = threading.Event()
    judge = LateJudge(stored)
    hub = Hub(HubSettings(job=JobIdentity(name="demo", uid="uid-1"), state_dir=None), judge)
    hub.spooled.close = stored.set  # type: ignore[method-assign]
    async with hub.running(serve_nothing):
        while not hub.analysis.caught_up:
            await asyncio.sleep(0)
    assert judge.in_time


def test_backends_give_a_hub_the_time_that_its_end_takes() -> None:
    longest_s = SHUTDOWN_S + spool.CLOSE_S
    assert longest_s < hub_process.STOP_S < hub_pod.GRACE_S
