"""Requests of an engine: which wait, which have a slot, and what the next step is. Calls no torch."""

import collections
import dataclasses
from collections import deque

from megatronapp_common.scope.perturbation.recipe import Recipe
from megatronapp_trainer.hooks.forward_observer import Segment
from megatronapp_trainer.inference.detokenizer import TextStream
from megatronapp_trainer.inference.errors import QueueFullError, RequestError
from megatronapp_trainer.inference.events import FinishReason
from megatronapp_trainer.inference.model.sampling import noise_keys
from megatronapp_trainer.inference.perturbed_steps import PerturbedStep, RecipeRotation
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.inference.step_plan import OutputRequest, SamplingParams, StepPlan


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Sequence:
    """A request that has a slot."""

    request: GenerationRequest
    slot: int
    text: TextStream | None
    read: int = 0
    """Number of tokens whose keys and values are in the cache."""
    generated: list[int] = dataclasses.field(default_factory=list)

    @property
    def is_prefilling(self) -> bool:
        """Return true while some of the prompt is not read."""
        return self.read < len(self.request.prompt)

    @property
    def reports_prompt(self) -> bool:
        """Return true if each position of the prompt is reported."""
        return self.request.logits or self.request.prompt_logprobs

    def output(self, row: int, position: int) -> OutputRequest | None:
        """Return the requested output for the token at this position, the `row`-th of its plan; None without one."""
        request, following = self.request, position + 1
        in_prompt = following < len(request.prompt)
        if in_prompt and not self.reports_prompt:
            return None
        return OutputRequest(
            row=row,
            sampling=None if in_prompt else self._sampling(following),
            target=request.prompt[following] if in_prompt else None,
            candidates=request.candidates,
            logits=request.logits,
            measures=request.measures,
        )

    def _sampling(self, position: int) -> SamplingParams | None:
        request = self.request
        if request.temperature == 0:
            return None
        return SamplingParams(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            noise=noise_keys(request.seed, position),
        )

    def stopped(self, end_tokens: frozenset[int]) -> tuple[FinishReason, int | tuple[int, ...] | str | None] | None:
        """Return why the generation ends after its newest token, and what matched; None if it continues."""
        request, generated = self.request, self.generated
        if not request.ignore_end and generated[-1] in end_tokens:
            return "stop", generated[-1]
        for stop in request.stop_tokens:
            if tuple(generated[-len(stop) :]) == stop:
                return "stop", stop
        if self.text is not None and self.text.matched is not None:
            return "stop", self.text.matched
        return ("length", None) if len(generated) >= request.max_new_tokens else None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledRow:
    """Sequence and position that an output belongs to."""

    sequence: Sequence
    position: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledStep:
    """A plan and the sequence and position of each of its outputs."""

    plan: StepPlan
    rows: tuple[ScheduledRow, ...]
    recipe: Recipe | None = None
    """Perturbation of the step."""


MOST_AHEAD = 8
"""Number of requests that may overtake one of the background before it is admitted, and of steps that read other
prompts before those of the background.
"""


class Scheduler:
    """Waiting requests in their order, and the sequences that have a slot."""

    def __init__(self, *, slots: int, prefill_chunk: int, most_waiting: int) -> None:
        self.waiting: deque[GenerationRequest] = deque()
        self.running: list[Sequence] = []
        self._slots = slots
        self._free = list(range(slots))
        self._chunk = prefill_chunk
        self._most_waiting = most_waiting
        self._decoded_last: dict[str | None, bool] = {}
        """Recipes, and true for those whose last step decoded."""
        self._rotation = RecipeRotation()
        self._ahead = 0
        """Number of requests that were admitted while one of the background waited."""
        self._most_background = max(1, slots // 2)
        """Most sequences of the background that have a slot."""
        self._steps_ahead = 0
        """Number of steps that read other prompts while one of the background could be read."""

    def add(self, *requests: GenerationRequest) -> None:
        """Append these to the queue, those of the background after all others; or none of them.

        Raises RequestError for an id in use, QueueFullError.
        """
        used = self.open_ids()
        for request in requests:
            if request.id in used:
                raise RequestError("id", f"{request.id} is open already; take another")
            used.add(request.id)
        waiting, count = len(self.waiting), len(requests)
        if waiting + count > self._most_waiting:
            raise QueueFullError(
                f"{waiting} requests wait, {count} came, {self._most_waiting} may wait; try again later"
            )
        for group, members in collections.Counter(request.group for request in requests if request.group).items():
            if members > self._slots:
                raise RequestError("group", f"{members} requests of {group} do not fit {self._slots} slots")
            generate = any(request.is_background and request.max_new_tokens > 0 for request in requests)
            if generate and members > self._most_background:
                raise RequestError(
                    "group", f"{members} requests of {group} do not fit {self._most_background} slots of the background"
                )
        self.waiting = deque(sorted((*self.waiting, *requests), key=lambda request: request.is_background))

    def _groups_prefilling(self) -> set[str]:
        """Return groups of which some have not been read yet."""
        waiting = {request.group for request in list(self.waiting)}
        reading = {sequence.request.group for sequence in self.running if sequence.is_prefilling}
        return (waiting | reading) - {""}

    def open_ids(self) -> set[str]:
        """Return the ids of all requests that have not ended."""
        return {request.id for request in self.waiting} | {sequence.request.id for sequence in self.running}

    def open_digests(self) -> set[str | None]:
        """Return the perturbations of all requests that have not ended."""
        return {request.digest for request in self.waiting} | {sequence.request.digest for sequence in self.running}

    def next_admissible(self) -> bool:
        """Return true if a slot is free for a request that waits."""
        return bool(self._free) and self._next() is not None

    @property
    def next_in_line(self) -> GenerationRequest:
        """Return the request to admit next: the first one, or one of the background that let enough others pass."""
        request = self._next()
        assert request is not None
        return request

    def _next(self) -> GenerationRequest | None:
        """Return the request to admit next; None if none waits, or only those of a background that has its slots."""
        background = None
        if sum(sequence.request.is_background for sequence in self.running) < self._most_background:
            background = next((request for request in self.waiting if request.is_background), None)
        if background is not None and self._ahead >= MOST_AHEAD:
            return background
        first = next(iter(self.waiting), None)
        return background if first is not None and first.is_background else first

    def admit(self, text: TextStream | None) -> Sequence:
        """Give the next request the lowest free slot: the fewer slots are in use, the smaller a decode step is."""
        slot = min(self._free)
        self._free.remove(slot)
        request = self.next_in_line
        self.waiting.remove(request)
        lets_wait = not request.is_background and any(request.is_background for request in self.waiting)
        self._ahead = self._ahead + 1 if lets_wait else 0
        sequence = Sequence(request=request, slot=slot, text=text)
        self.running.append(sequence)
        return sequence

    def release(self, sequence: Sequence) -> None:
        """Take the slot back."""
        self.running.remove(sequence)
        self._free.append(sequence.slot)

    def plan(self) -> ScheduledStep | None:
        """Return the next step; None without work.

        Recipes of perturbations take turns. Within each, reading prompts and generating alternate if both are due.
        """
        due: dict[str | None, list[Sequence]] = {}
        for sequence in self._without_background(self._due()):
            due.setdefault(sequence.request.digest, []).append(sequence)
        if not due:
            return None
        digest = self._rotation.next(due)
        prefilling = [sequence for sequence in due[digest] if sequence.is_prefilling]
        decoding = [sequence for sequence in due[digest] if not sequence.is_prefilling]
        decodes = not prefilling or (bool(decoding) and not self._decoded_last.get(digest, True))
        known = {None, digest, *due}
        self._decoded_last = {other: last for other, last in self._decoded_last.items() if other in known}
        self._decoded_last[digest] = decodes
        return _decode(decoding) if decodes else _prefill(prefilling, self._chunk)

    def _due(self) -> list[Sequence]:
        """Return the sequences of which a token can be read now."""
        prefilling_groups = self._groups_prefilling()
        return [
            sequence
            for sequence in self.running
            if sequence.is_prefilling or sequence.request.group not in prefilling_groups
        ]

    def _without_background(self, due: list[Sequence]) -> list[Sequence]:
        """Remove the background while other prompts are read; after `MOST_AHEAD` steps it is read first, once."""
        has_others = any(sequence.is_prefilling and not sequence.request.is_background for sequence in due)
        has_background = any(sequence.request.is_background for sequence in due)
        if not (has_others and has_background):
            self._steps_ahead = 0
            return due
        if self._steps_ahead < MOST_AHEAD:
            self._steps_ahead += 1
            return [sequence for sequence in due if not sequence.request.is_background]
        self._steps_ahead = 0
        return sorted(due, key=lambda sequence: not sequence.request.is_background)


def _scheduled(
    sequences: list[Sequence],
    segments: list[Segment],
    outputs: list[OutputRequest],
    rows: list[ScheduledRow],
    *,
    decode: bool,
) -> ScheduledStep:
    """Return the step of these sequences, all of one recipe; there is one segment for each, in their order."""
    recipe = sequences[0].request.perturbation
    perturbed = None
    if recipe is not None:
        requests = [sequence.request for sequence in sequences[: len(segments)]]
        perturbed = PerturbedStep(
            digest=recipe.digest,
            samples=tuple(request.sample for request in requests),
            prompt_lengths=tuple(request.prompt_length or len(request.prompt) for request in requests),
        )
    plan = StepPlan(segments=tuple(segments), outputs=tuple(outputs), decode=decode, perturbed=perturbed)
    return ScheduledStep(plan=plan, rows=tuple(rows), recipe=recipe)


def _decode(sequences: list[Sequence]) -> ScheduledStep:
    """Plan the newest token of each sequence."""
    segments: list[Segment] = []
    outputs: list[OutputRequest] = []
    rows: list[ScheduledRow] = []
    for row, sequence in enumerate(sequences):
        segments.append(
            Segment(
                slot=sequence.slot,
                start=sequence.read,
                tokens=(sequence.generated[-1],),
                request_id=sequence.request.id,
            )
        )
        output = sequence.output(row, sequence.read)
        assert output is not None
        outputs.append(output)
        rows.append(ScheduledRow(sequence=sequence, position=sequence.read))
    return _scheduled(sequences, segments, outputs, rows, decode=True)


def _prefill(sequences: list[Sequence], chunk: int) -> ScheduledStep:
    """Plan the next tokens of prompts in the order of admission, `chunk` in all."""
    segments: list[Segment] = []
    outputs: list[OutputRequest] = []
    rows: list[ScheduledRow] = []
    used = 0
    for sequence in sequences:
        tokens = sequence.request.prompt[sequence.read : sequence.read + chunk - used]
        if not tokens:
            break
        segments.append(Segment(slot=sequence.slot, start=sequence.read, tokens=tokens, request_id=sequence.request.id))
        for position in range(sequence.read, sequence.read + len(tokens)):
            output = sequence.output(used + position - sequence.read, position)
            if output is not None:
                outputs.append(output)
                rows.append(ScheduledRow(sequence=sequence, position=position))
        used += len(tokens)
    return _scheduled(sequences, segments, outputs, rows, decode=False)
