"""Time at which a step's results are reported: tokens in the next idle window, ends at once and after all earlier
tokens."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.device.idle_window import IdleWindow
from megatronapp_trainer.inference.events import Event, FinishedEvent, TokenEvent
from megatronapp_trainer.serve.scope.capture_gateway import CaptureController


class Told:
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
def test_everything_is_told_in_order_and_soon(steps: list[str]) -> None:
    told: Any = Told()
    lull = IdleWindow()
    looking = CaptureController(told, lull.defer)
    happened: list[Event] = []
    for index, step in enumerate(steps):
        if step == "lull":
            with lull:
                assert told.events == happened
        else:
            happened.append(token(index) if step == "token" else end())
            looking.observe(happened[-1:])
            assert (told.events == happened) or step == "token"
    assert told.events == happened[: len(told.events)]
    with lull:
        assert told.events == happened


def test_with_nothing_that_defers_all_is_told_at_once() -> None:
    told: Any = Told()
    CaptureController(told).observe([token(0)])
    assert told.events == [token(0)]
