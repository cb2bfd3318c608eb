"""Summary for the operator while the detector starts, and while it cannot be started."""

import pytest

from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.hub.http import routes_read
from megatronapp_analyzer.hub.judge.links import LocalJudge
from megatronapp_analyzer.hub.service import Hub
from megatronapp_analyzer.hub.settings import HubSettings, JobIdentity
from megatronapp_analyzer.hub.state import detector_task
from megatronapp_common.web.problems import HttpError


@pytest.mark.asyncio
async def test_of_a_detector_that_cannot_be_started_verdicts_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(HubSettings(job=JobIdentity(name="demo", uid="uid-1"), state_dir=None), LocalJudge(Detector))
    with pytest.raises(HttpError) as starting:
        await routes_read.summary(hub)
    assert (starting.value.status, starting.value.code) == (503, "starting")
    assert "the detector is starting" in str(starting.value), "a new hub has no steps"
    with monkeypatch.context() as patch:
        patch.setattr(detector_task, "OUT_LOSSES", 0)
        out = (await routes_read.summary(hub)).model_dump(by_alias=True)
    assert (out["slowRanks"], out["hungRanks"]) == (None, None)
    hub.analysis.caught_up = True
    known = (await routes_read.summary(hub)).model_dump(by_alias=True)
    assert (known["slowRanks"], known["hungRanks"]) == ([], [])
