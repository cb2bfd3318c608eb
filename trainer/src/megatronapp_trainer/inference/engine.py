"""Engine of rank 0: requests in, events out, one step at a time.

    engine = Engine(gang, decode=tokenizer.detokenize, end_tokens={tokenizer.eod})
    engine.submit(GenerationRequest(id="a", prompt=(1, 2, 3), max_new_tokens=20))
    while serving:
        engine.wait_for_work(timeout_s=10)
        for event in engine.step(): ...
        if engine.failure is not None: ...  # end the process
    engine.close()

`submit`, `cancel` and the readings of the queue may be called from any thread; `step` and `close` from one thread only.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megatronapp_trainer.hooks.forward_observer import Segment
from megatronapp_trainer.inference.detokenizer import Decode, TextStream
from megatronapp_trainer.inference.errors import EngineLostError
from megatronapp_trainer.inference.events import Event, FinishedEvent, FinishReason, PromptEvent, TokenEvent
from megatronapp_trainer.inference.model.sampling import SampledOutput
from megatronapp_trainer.inference.patch_sources import source_of_name
from megatronapp_trainer.inference.perturbed_steps import (
    RankRecipes,
    RecipeReservations,
    check_number_of_recipes,
    check_recipes,
)
from megatronapp_trainer.inference.request import GenerationRequest, check_fits, source_requests
from megatronapp_trainer.inference.scheduler import ScheduledRow, ScheduledStep, Scheduler, Sequence
from megatronapp_trainer.inference.step_launcher import StepLauncher
from megatronapp_trainer.inference.step_plan import OutputRequest, SamplingParams, StepPlan
from megatronapp_trainer.inference.worker_group import WorkerGroup
from megatronapp_trainer.parallel.agreement import is_peer_lost_error


class Engine:
    """Generator of tokens for many requests at a time; they join and leave at step boundaries."""

    def __init__(
        self,
        gang: WorkerGroup,
        *,
        decode: Decode | None = None,
        decode_plain: Decode | None = None,
        end_tokens: Iterable[int] = (),
        most_waiting: int = 64,
        admitted: Callable[[str], None] | None = None,
    ) -> None:
        """Create the engine of a gang.

        `decode` gives the text of tokens, for events and stop texts; `decode_plain` that without special tokens, for
        requests with `skip_special`; `end_tokens` end a document. `admitted` receives the id of each request that no
        longer waits, in the thread of `step`.
        """
        self._gang = gang
        self._decode = decode
        self._decode_plain = decode_plain
        self._end_tokens = frozenset(end_tokens)
        self._admitted = admitted
        options = gang.runner.options
        self._scheduler = Scheduler(slots=options.slots, prefill_chunk=options.prefill_chunk, most_waiting=most_waiting)
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._cancelled: set[str] = set()
        self._recipes = RankRecipes(gang.command)
        self._has_unused = False
        """The ranks know a recipe that no request needs, and forget it once no step is in flight."""
        self._launcher = StepLauncher(gang, self._scheduler, self._recipes, self._lock)
        self._reservations = RecipeReservations()
        self.failure: EngineLostError | None = None
        """Error that a rank was lost or failed: the process should end, so that the gang is started again."""

    def submit(self, *requests: GenerationRequest) -> None:
        """Take all of these requests or none; `step` returns their events. Requests of a group are submitted together.

        Raises:
            RequestError: one cannot be served by this engine.
            QueueFullError: too many wait.
            EngineLostError: the engine has failed.
        """
        runner = self._gang.runner
        for request in requests:
            check_fits(
                request,
                capacity=runner.options.capacity,
                vocab_size=runner.vocab_size,
                has_text=self._decode is not None,
            )
        needed = check_recipes(runner.perturbation.check, requests)
        sources = source_requests(runner.perturbation.sources, requests)
        with self._lock:
            if self.failure is not None:
                raise self.failure
            open_digests = self._scheduler.open_digests()
            check_number_of_recipes({request.digest for request in requests} | open_digests)
            self._reservations.reserve(needed, open_digests, lambda: runner.perturbation.capacity_bytes)
            unread = [source for digest, found in sources.items() if digest not in open_digests for source in found]
            self._scheduler.add(*unread, *requests)
            self._work.notify_all()

    def cancel(self, request_id: str) -> bool:
        """End a request at the next step, which gives its FinishedEvent. Returns false if no such request is open."""
        with self._lock:
            if request_id not in self._scheduler.open_ids():
                return False
            self._cancelled.add(request_id)
            return True

    def command(self, topic: str, payload: Any = None) -> None:  # noqa: ANN401 - payload of the handlers
        """Let all ranks handle a command (`WorkerGroup.handle`) before the next step."""
        with self._lock:
            self._launcher.commands.append((topic, payload))
            self._work.notify_all()

    def queue_position(self, request_id: str) -> int | None:
        """Return how many wait before this request; None if it does not wait (any more)."""
        with self._lock:
            ids = [request.id for request in self._scheduler.waiting]
            return ids.index(request_id) if request_id in ids else None

    @property
    def is_busy(self) -> bool:
        """Return true if some request is open."""
        with self._lock:
            return bool(self._scheduler.waiting or self._scheduler.running)

    def warm_up(self) -> None:
        """Do a step of each size, so that on a GPU no request waits for compilation; before the first request.

        Raises RuntimeError, as torch does, where a rank fails.
        """
        runner = self._gang.runner
        for slots in runner.decode_sizes:
            for is_decode in (False, True):
                segments = tuple(Segment(slot=slot, start=0, tokens=(0,)) for slot in range(slots))
                for sampling in (None, SamplingParams(temperature=1.0, top_k=0, top_p=1.0, noise=(0, 0))):
                    outputs = tuple(OutputRequest(row=row, sampling=sampling) for row in range(slots))
                    self._gang.execute(StepPlan(segments=segments, outputs=outputs, decode=is_decode))

    def wait_for_work(self, timeout_s: float) -> bool:
        """Sleep until a request or command is there, at most `timeout_s` (below 30 s between steps); true if one is."""
        with self._lock:
            if self._has_work():
                return True
        with self._gang.idle_window, self._work:
            return self._work.wait_for(self._has_work, timeout_s)

    def defer(self, work: Callable[[], None]) -> None:
        """Run `work` soon in the thread of `step`, when no device waits for that thread."""
        self._gang.idle_window.defer(work)

    def _has_work(self) -> bool:
        return bool(self._scheduler.waiting or self._scheduler.running or self._launcher.commands)

    def step(self) -> list[Event]:
        """Run one step and return its events. Without open requests it returns at once; call it every 30 s or so.

        On a GPU the next decode step is launched before the tokens of this one are read, if nothing but an ending could
        change it (`Scheduler.plan_ahead`), so that the device does not wait for the host. What it computes of requests
        that have ended is discarded.

        If a rank is lost or fails, each open request ends with an EngineLostError and `failure` is set.

        Raises:
            EngineLostError: the engine had failed before.
        """
        if self.failure is not None:
            raise self.failure
        events = self._end_cancelled()
        self._admit()
        try:
            launched = self._launcher.launch()
            if launched is None:
                self._gang.send_heartbeat()
            else:
                if not self._cancelled and not self._has_unused:
                    self._launcher.launch_ahead(launched.scheduled)
                events += self._observe(launched.scheduled, self._launcher.read(launched))
            with self._lock:
                used = self._scheduler.open_digests()
            if not self._launcher.is_ahead:
                self._recipes.keep(used)
            self._has_unused = self._recipes.has_unused(used)
        except Exception as error:  # any error must reach the clients that wait for their tokens
            events += self._fail(error)
        return [event for event in events if source_of_name(event.request_id) is None]

    def close(self) -> None:
        """Let the other ranks return. Open requests get no more events."""
        if self.failure is None:
            try:
                self._launcher.finish()
            finally:
                self._gang.close()

    def _end_cancelled(self) -> list[Event]:
        with self._lock:
            ids, self._cancelled = self._cancelled, set()
            waiting = [request for request in self._scheduler.waiting if request.id in ids]
            for request in waiting:
                self._scheduler.waiting.remove(request)
        running = [sequence for sequence in self._scheduler.running if sequence.request.id in ids]
        events: list[Event] = [_ended_waiting(request, "cancelled") for request in waiting]
        return events + [self._finish(sequence, "cancelled") for sequence in running]

    def _admit(self) -> None:
        with self._lock:
            while self._scheduler.next_admissible():
                request = self._scheduler.next_in_line
                decode = self._decode_plain if request.skip_special else self._decode
                sequence = self._scheduler.admit(None if decode is None else TextStream(decode, request.stop_texts))
                if self._admitted is not None and request.source_of is None:
                    self._admitted(sequence.request.id)

    def _observe(self, planned: ScheduledStep, readings: tuple[SampledOutput, ...]) -> list[Event]:
        """Bring the sequences up to date with a step that has been computed."""
        ends = {segment.request_id: segment.end for segment in planned.plan.segments}
        for sequence in planned.sequences:
            sequence.read = ends[sequence.request.id]
        events: list[Event] = []
        for row, reading in zip(planned.rows, readings, strict=True):
            if row.sequence.ended is None:
                events += self._events(row, reading)
        return events

    def _events(self, row: ScheduledRow, reading: SampledOutput) -> Iterator[Event]:
        sequence, request = row.sequence, row.sequence.request
        last = len(request.prompt) - 1
        if row.position <= last and sequence.reports_prompt:
            yield _prompt_event(request, row.position, reading)
        if row.position < last:
            return
        if request.max_new_tokens == 0:
            yield self._finish(sequence, "length")
            return
        yield self._token_event(sequence, reading)
        over = sequence.stopped(self._end_tokens)
        if over is not None:
            reason, matched = over
            yield self._finish(sequence, reason, matched)

    def _token_event(self, sequence: Sequence, reading: SampledOutput) -> TokenEvent:
        sequence.generated.append(sequence.next_token(reading.token))
        is_end = reading.token in self._end_tokens and not sequence.request.ignore_end
        text = None if sequence.text is None else "" if is_end else sequence.text.feed(reading.token)
        return TokenEvent(
            request_id=sequence.request.id,
            index=len(sequence.generated) - 1,
            token=reading.token,
            logprob=reading.logprob,
            candidates=reading.candidates,
            text=text,
            logits=reading.logits,
            measures=reading.measures,
        )

    def _finish(
        self, sequence: Sequence, reason: FinishReason, matched: int | tuple[int, ...] | str | None = None
    ) -> FinishedEvent:
        sequence.ended = reason, matched
        with self._lock:
            self._scheduler.release(sequence)
            self._cancelled.discard(sequence.request.id)  # another request may have this id
        return FinishedEvent(
            request_id=sequence.request.id,
            reason=reason,
            matched=matched,
            text=None if sequence.text is None else sequence.text.finish(),
            prompt_tokens=len(sequence.request.prompt),
            generated_tokens=len(sequence.generated),
        )

    def _fail(self, error: Exception) -> list[Event]:
        """End all open requests."""
        what = "a rank of the gang was lost" if is_peer_lost_error(error) else f"a step failed ({type(error).__name__})"
        failure = EngineLostError(f"{what}: {error}; the gang must be started again")
        failure.__cause__ = error
        with self._lock:
            self.failure = failure
            open_requests = [sequence.request for sequence in self._scheduler.running] + list(self._scheduler.waiting)
            generated = {sequence.request.id: len(sequence.generated) for sequence in self._scheduler.running}
            self._scheduler.running.clear()
            self._scheduler.waiting.clear()
        return [_ended_waiting(request, "error", failure, generated.get(request.id, 0)) for request in open_requests]


def _prompt_event(request: GenerationRequest, position: int, reading: SampledOutput) -> PromptEvent:
    is_last = position == len(request.prompt) - 1
    return PromptEvent(
        request_id=request.id,
        index=position,
        target=None if is_last else reading.token,
        logprob=None if is_last else reading.logprob,
        candidates=reading.candidates,
        logits=reading.logits,
        measures=reading.measures,
    )


def _ended_waiting(
    request: GenerationRequest, reason: FinishReason, error: EngineLostError | None = None, generated: int = 0
) -> FinishedEvent:
    return FinishedEvent(
        request_id=request.id,
        reason=reason,
        prompt_tokens=len(request.prompt),
        generated_tokens=generated,
        error=error,
    )
