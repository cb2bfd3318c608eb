"""Access to `scope.coordinator` under a lock, as the threads of HTTP and of the engine both call it.

Loaded only if there is a hub.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from megatronapp_common import frames
from megatronapp_common.errors import CommonError
from megatronapp_common.scope.protocol_requests import CaptureSettings, ProbeRequest
from megatronapp_common.web.problems import HttpError
from megatronapp_trainer.hooks.errors import CaptureError
from megatronapp_trainer.inference.events import Event, FinishedEvent, TokenEvent
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.scope.coordinator import CaptureCoordinator, TextOf
from megatronapp_trainer.serve.problems import SEE

Defer: TypeAlias = Callable[[Callable[[], None]], None]


class CaptureController:
    """Captures of all ranks. Methods with arguments of users raise HttpError."""

    def __init__(self, leader: CaptureCoordinator, defer: Defer | None = None) -> None:
        """Create the controller; `defer` runs work of the engine's thread later, None: directly."""
        self._leader = leader
        self._defer = defer
        self._lock = threading.RLock()
        self._later: list[Sequence[Event]] = []

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Hold back reports of steps inside the context: a run's first state is sent before its first tokens."""
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
        """Capture a run from its first step on; returns its requests in the form for the engine.

        `ends`: UTF-16 units of each prompt. `text_of`: text of a single token, if there is a tokenizer.
        """
        with self._lock, refused("capture"):
            return self._leader.begin_run(run, capture, requests, ends=ends, text_of=text_of)

    def forget(self, requests: Sequence[GenerationRequest]) -> None:
        """Forget requests that the engine has refused."""
        self.observe(
            [
                FinishedEvent(request_id=request.id, reason="cancelled", prompt_tokens=0, generated_tokens=0)
                for request in requests
            ]
        )

    def change(self, run: str, capture: CaptureSettings) -> None:
        """Change the capture of a run from the next step on."""
        with self._lock, refused("capture"):
            self._leader.change(run, capture)

    def probe(self, body: ProbeRequest) -> tuple[str, list[GenerationRequest]]:
        """Return the id of a new probe, and its requests."""
        with self._lock, refused("sites"):
            return self._leader.probe(body)

    def set_basis(self, data: bytes) -> None:
        """Project on the axes of a frame SCOPE_BASIS."""
        with self._lock, refused("basis"):
            self._leader.set_basis(frames.decode(data))

    def announce(self, header: Mapping[str, Any]) -> None:
        """Send the new state of a run."""
        with self._lock:
            self._leader.run_state(header)

    def observe(self, events: Sequence[Event]) -> None:
        """Send the results of a step. Plain tokens are sent while the next step is computed, ends directly."""
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
def refused(param: str) -> Iterator[None]:
    """Turn an error of what a user asked for into an HttpError that names the parameter."""
    try:
        yield
    except (CaptureError, CommonError) as error:
        raise HttpError(422, "invalid-request", f"{param}: {error}", hint=SEE, param=param) from error
