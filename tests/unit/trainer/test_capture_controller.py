"""Time at which a step's results are reported: tokens in the next idle window, ends at once and after all earlier
tokens."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.device.idle_window import IdleWindow
from megatronapp_trainer.inference.events import Event, FinishedEvent, TokenEvent
from megatronapp_trainer.serve.scope.capture_controller import CaptureController


class RecordingLeader:
    """Fake of rank 0's leader that records what it receives."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def observe(self, events: list[Event]) -> None:
        self.events += events


def token(index: int) -> TokenEvent:
    return TokenEvent(request_id="r-0", index=index, token=1, logprob=0.0, candidates=(), text=None, logits=None)


def end() -> FinishedEvent:
    return FinishedEvent(request_id="r-0", reason="length", prompt_tokens=1, generated_tokens=1)


@given(st.lists(st.sampled_from(["token", "end", "lull"]), max_size=12))
def test_everything_is_reported_in_order_and_by_the_next_idle_window(steps: list[str]) -> None:
    leader: Any = RecordingLeader()
    idle_window = IdleWindow()
    controller = CaptureController(leader, idle_window.defer)
    happened: list[Event] = []
    for index, step in enumerate(steps):
        if step == "lull":
            with idle_window:
                assert leader.events == happened
        else:
            happened.append(token(index) if step == "token" else end())
            controller.observe(happened[-1:])
            assert (leader.events == happened) or step == "token"
    assert leader.events == happened[: len(leader.events)]
    with idle_window:
        assert leader.events == happened


def test_everything_is_reported_at_once_without_an_idle_window() -> None:
    leader: Any = RecordingLeader()
    CaptureController(leader).observe([token(0)])
    assert leader.events == [token(0)]
