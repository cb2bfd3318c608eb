"""MegaScope in front of the engine: `scope.leader` behind a lock, as HTTP's thread and the engine's both call it.

Loaded only where there is a hub to look for.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from megatronapp_common import frames
from megatronapp_common.errors import CommonError
from megatronapp_common.scope.protocol_requests import CaptureSettings, ProbeRequest
from megatronapp_trainer.hooks.errors import CaptureError
from megatronapp_trainer.inference.events import Event, FinishedEvent, TokenEvent
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.scope.capture.coordinator import CaptureCoordinator, TextOf
from megatronapp_trainer.serve.problems import SEE, ApiError

Defer: TypeAlias = Callable[[Callable[[], None]], None]


class CaptureController:
    """What all ranks look at. Methods that take something of people raise ApiError."""

    def __init__(self, leader: CaptureCoordinator, defer: Defer | None = None) -> None:
        """`defer`: what does work of the engine's thread later; None: nothing is put off."""
        self._leader = leader
        self._defer = defer
        self._lock = threading.RLock()
        self._later: list[Sequence[Event]] = []

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Nothing of a step is told meanwhile: a run's first state comes before its first tokens."""
        with self._lock:
            yield

    def begin(
        self,
        run: str,
        capture: CaptureSettings,
        requests: Sequence[GenerationRequest],
        ends: Sequence[int],
        text_of: TextOf | None,
    ) -> list[GenerationRequest]:
        """Look at a run from its first step on; its requests, as they must go to the engine.

        `ends`: UTF-16 units of each prompt. `text_of`: of a token alone, where there is a tokenizer.
        """
        with self._lock, _refused("capture"):
            return self._leader.begin_run(run, capture, requests, ends=ends, text_of=text_of)

    def forget(self, requests: Sequence[GenerationRequest]) -> None:
        """The engine has not taken these."""
        self.observe(
            [
                FinishedEvent(request_id=one.id, reason="cancelled", prompt_tokens=0, generated_tokens=0)
                for one in requests
            ]
        )

    def change(self, run: str, capture: CaptureSettings) -> None:
        """Look at something else from the next step on."""
        with self._lock, _refused("capture"):
            self._leader.change(run, capture)

    def probe(self, wanted: ProbeRequest) -> tuple[str, list[GenerationRequest]]:
        """A probe's id, and the requests that bring it."""
        with self._lock, _refused("sites"):
            return self._leader.probe(wanted)

    def set_basis(self, data: bytes) -> None:
        """Project on the axes of a frame SCOPE_BASIS."""
        with self._lock, _refused("basis"):
            self._leader.set_basis(frames.decode(data))

    def announce(self, header: Mapping[str, Any]) -> None:
        """A run has another state."""
        with self._lock:
            self._leader.run_state(header)

    def observe(self, events: Sequence[Event]) -> None:
        """What a step of the engine gave. Mere tokens are told when the next step is under way, ends at once."""
        with self._lock:
            self._later.append(events)
            if self._defer is None or not events or not all(isinstance(event, TokenEvent) for event in events):
                self._broadcast()
            elif len(self._later) == 1:
                self._defer(self._broadcast)

    def _broadcast(self) -> None:
        with self._lock:
            later, self._later = self._later, []
            for events in later:
                self._leader.observe(events)


@contextlib.contextmanager
def _refused(param: str) -> Iterator[None]:
    try:
        yield
    except (CaptureError, CommonError) as error:
        raise ApiError(422, "invalid-request", f"{param}: {error}", hint=SEE, param=param) from error
