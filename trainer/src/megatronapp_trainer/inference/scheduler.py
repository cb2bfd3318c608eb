"""Requests of an engine: which wait, which have a slot, and what the next step is. Calls no torch."""

import collections
import collections.abc
import dataclasses
from collections import deque
from collections.abc import Collection

from megatronapp_common.scope.perturbation.recipe import Recipe
from megatronapp_trainer.hooks.forward_observer import ComparedRow, Segment
from megatronapp_trainer.inference.detokenizer import TextStream
from megatronapp_trainer.inference.errors import QueueFullError, RequestError
from megatronapp_trainer.inference.events import FinishReason
from megatronapp_trainer.inference.model.sampling import noise_keys
from megatronapp_trainer.inference.patch_sources import PatchSource
from megatronapp_trainer.inference.perturbed_steps import PerturbedStep, RecipeRotation
from megatronapp_trainer.inference.request import GenerationRequest, digests_with_sources
from megatronapp_trainer.inference.step_plan import OutputRequest, SamplingParams, StepPlan

Ending = tuple[FinishReason, int | tuple[int, ...] | str | None]
"""Reason why a generation ended, and what matched."""
Tokens = collections.abc.Sequence[int]
StepKey = tuple[str | None, str]
"""Requests with equal keys share steps: digest of the perturbation, and name of the comparison."""


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Sequence:
    """A request that has a slot."""

    request: GenerationRequest
    slot: int
    text: TextStream | None
    read: int = 0
    """Number of tokens whose keys and values are in the cache."""
    generated: list[int] = dataclasses.field(default_factory=list)
    """Generated tokens; of a branch that is forced, those that it reads instead."""
    reference: "Sequence | None" = None
    """Sequence that this one is compared with, in the same group."""
    branch: "Sequence | None" = None
    """Sequence that is compared with this one."""
    ended: "Ending | None" = None

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

    def next_token(self, chosen: int) -> int:
        """Return the token that is read after one was chosen: that one, or the reference's in a forced branch."""
        branch, place = self.request.compared, len(self.generated)
        if branch is None or not (branch.forced or branch.is_forced):
            return chosen
        tokens = self._reference_tokens
        return tokens[place] if place < len(tokens) else chosen

    @property
    def _reference_tokens(self) -> "Tokens":
        branch = self.request.compared
        assert branch is not None
        return branch.forced or (() if self.reference is None else self.reference.generated)

    def compared_row(self, output: int, position: int, in_flight: "Collection[Sequence]" = ()) -> ComparedRow | None:
        """Return what is compared of an output at this position; None: nothing, as branches have read other tokens.

        `in_flight`: sequences of the step before, whose tokens have not been read.
        """
        branch, index = self.request.compared, position + 1 - len(self.request.prompt)
        if branch is None or index < 0:
            return None
        if branch.number == 0:
            return None if self._has_diverged else ComparedRow(name=branch.name, branch=0, index=index, output=output)
        tokens = self._reference_tokens
        known = len(tokens) + (self.reference in in_flight)
        if index >= known or list(tokens[:index]) != self.generated[:index]:
            return None
        token = tokens[index] if index < len(tokens) else None
        return ComparedRow(name=branch.name, branch=branch.number, index=index, output=output, token=token)

    @property
    def _has_diverged(self) -> bool:
        """Return true if the branch that is compared with this one has read other tokens: no later row is compared."""
        if self.branch is None:
            return False
        return any(mine != other for mine, other in zip(self.generated, self.branch.generated, strict=False))

    def depends_on(self, in_flight: "Collection[Sequence]") -> bool:
        """Return true if what is compared of this sequence depends on tokens of these: a branch may diverge."""
        branch = self.branch
        if branch is None or branch not in in_flight:
            return False
        return branch.request.compared is None or not branch.request.compared.is_forced

    def stopped(self, end_tokens: frozenset[int]) -> "Ending | None":
        """Return why the generation ends after its newest token, and what matched; None if it continues."""
        request, generated, reference = self.request, self.generated, self.reference
        if reference is not None and request.compared is not None and request.compared.is_forced:
            return reference.ended if len(generated) == len(reference.generated) else None
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
    sequences: tuple[Sequence, ...]
    """Sequence of each segment."""
    recipe: Recipe | None = None
    """Perturbation of the step."""
    sources: tuple[PatchSource, ...] = ()
    """Sources of patches that the step reads."""


PLAIN: StepKey = (None, "")
"""Key of requests without perturbation."""
MOST_AHEAD = 8
"""Number of requests that may overtake one of the background before it is admitted, and of steps of others before one
of the background.
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
        self._decoded_last: dict[StepKey, bool] = {}
        """Keys, and true for those whose last step decoded."""
        self._rotation = RecipeRotation[StepKey]()
        self._ahead = 0
        """Number of requests that were admitted while one of the background waited."""
        self._most_background = max(1, slots // 2)
        """Most sequences of the background that have a slot."""
        self._steps_ahead = 0
        """Number of steps of others while one of the background was due."""

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
                f"{waiting} requests wait, {count} are new, {self._most_waiting} may wait; try again later"
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
        """Return the perturbations of all requests that have not ended, of those that read sources, too."""
        open_requests = self._open_requests()
        return {request.digest for request in open_requests} | digests_with_sources(open_requests)

    def _open_requests(self) -> list[GenerationRequest]:
        return [*self.waiting, *(sequence.request for sequence in self.running)]

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
            unread = digests_with_sources(self._open_requests())  # in a slot they would wait for sources without one
            able = (request for request in self.waiting if request.is_background and request.digest not in unread)
            background = next(able, None)
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
        if request.compared is not None and request.compared.number and request.group:
            sequence.reference = next((other for other in self.running if other.request.group == request.group), None)
            if sequence.reference is not None:
                sequence.reference.branch = sequence
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
        due = _by_key(self._without_background(self._due()))
        if not due:
            return None
        key = self._rotation.next(due)
        prefilling = [sequence for sequence in due[key] if sequence.is_prefilling]
        decoding = [sequence for sequence in due[key] if not sequence.is_prefilling]
        decodes = not prefilling or (bool(decoding) and not self._decoded_last.get(key, True))
        known = {PLAIN, key, *due}
        self._decoded_last = {other: last for other, last in self._decoded_last.items() if other in known}
        self._decoded_last[key] = decodes
        return _decode(decoding, self._least_slots(decoding)) if decodes else _prefill(prefilling, self._chunk)

    def plan_ahead(self, step: ScheduledStep) -> ScheduledStep | None:
        """Return a step that can follow a decode step before the tokens of that one have been read.

        Of other sequences, if any are due, whose tokens are known; otherwise of the same ones, unless one of them will
        have all of its tokens. None where prompts are due, or requests of the background and others.
        """
        if not step.plan.decode or self.next_admissible():
            return None
        due, in_flight = self._due(), set(step.sequences)
        if any(sequence.is_prefilling for sequence in due):
            return None
        if len({sequence.request.is_background for sequence in due}) > 1:
            return None
        others = [sequence for sequence in due if sequence not in in_flight]
        if not others:
            return _continued(step) if due == list(step.sequences) else None
        known = {key: found for key, found in _by_key(others).items() if not found[0].depends_on(in_flight)}
        if not known:
            return None
        key = self._rotation.next(known)
        self._decoded_last[key] = True
        return _decode(known[key], self._least_slots(known[key]), in_flight=in_flight)

    def _least_slots(self, sequences: list[Sequence]) -> int:
        """Return the least number of slots of a decode step: equal for all branches of a comparison."""
        request = sequences[0].request
        if request.compared is None:
            return 0
        if not request.group:
            return self._slots
        members = [other for other in self.running if other.request.group == request.group]
        ended = [member.reference for member in members if member.reference is not None]
        return 1 + max(member.slot for member in (*members, *ended))

    def _due(self) -> list[Sequence]:
        """Return the sequences of which a token can be read now."""
        prefilling_groups = self._groups_prefilling()
        waiting_groups = {request.group for request in list(self.waiting)}
        unread = digests_with_sources(self._open_requests())
        return [
            sequence
            for sequence in self.running
            if sequence.request.digest not in unread
            and (
                sequence.request.group not in waiting_groups
                if sequence.request.is_branch_of_pair
                else sequence.is_prefilling or sequence.request.group not in prefilling_groups
            )
        ]

    def _without_background(self, due: list[Sequence]) -> list[Sequence]:
        """Remove the background while others are due; after `MOST_AHEAD` steps it is due as well, once."""
        has_others = any(not sequence.request.is_background for sequence in due)
        has_background = any(sequence.request.is_background for sequence in due)
        if not (has_others and has_background):
            self._steps_ahead = 0
            return due
        if self._steps_ahead < MOST_AHEAD:
            self._steps_ahead += 1
            return [sequence for sequence in due if not sequence.request.is_background]
        self._steps_ahead = 0
        return sorted(due, key=lambda sequence: not sequence.request.is_background)


def _by_key(due: list[Sequence]) -> dict[StepKey, list[Sequence]]:
    """Return which sequences can share a step; of the branches of a comparison only the one that has read least."""
    found: dict[StepKey, list[Sequence]] = {}
    for sequence in due:
        request = sequence.request
        name = "" if request.compared is None else request.compared.name
        found.setdefault((None if request.is_branch_of_pair else request.digest, name), []).append(sequence)
    return {
        key: sequences if not key[1] else [min(sequences, key=lambda sequence: sequence.read)]
        for key, sequences in found.items()
    }


def _scheduled(
    sequences: list[Sequence],
    segments: list[Segment],
    outputs: list[OutputRequest],
    rows: list[ScheduledRow],
    *,
    decode: bool,
    least_slots: int = 0,
    in_flight: Collection[Sequence] = (),
    reads_chosen: bool = False,
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
    compared = (row.sequence.compared_row(place, row.position, in_flight) for place, row in enumerate(rows))
    plan = StepPlan(
        segments=tuple(segments),
        outputs=tuple(outputs),
        decode=decode,
        perturbed=perturbed,
        compared=tuple(row for row in compared if row is not None),
        least_slots=least_slots,
        is_ahead=bool(in_flight),
        reads_chosen=reads_chosen,
    )
    planned = tuple(sequences[: len(segments)])
    read = tuple(sequence.request.source_of for sequence in planned if sequence.request.source_of is not None)
    return ScheduledStep(plan=plan, rows=tuple(rows), sequences=planned, recipe=recipe, sources=read)


def _decode(
    sequences: list[Sequence], least_slots: int = 0, *, in_flight: Collection[Sequence] = (), reads_chosen: bool = False
) -> ScheduledStep:
    """Plan the newest token of each sequence; `reads_chosen`: the one that the step in flight chooses."""
    segments: list[Segment] = []
    outputs: list[OutputRequest] = []
    rows: list[ScheduledRow] = []
    for row, sequence in enumerate(sequences):
        position = sequence.read + reads_chosen
        segments.append(
            Segment(
                slot=sequence.slot,
                start=position,
                tokens=(0 if reads_chosen else sequence.generated[-1],),
                request_id=sequence.request.id,
            )
        )
        output = sequence.output(row, position)
        assert output is not None
        outputs.append(output)
        rows.append(ScheduledRow(sequence=sequence, position=position))
    return _scheduled(
        sequences,
        segments,
        outputs,
        rows,
        decode=True,
        least_slots=least_slots,
        in_flight=in_flight,
        reads_chosen=reads_chosen,
    )


def _continued(step: ScheduledStep) -> ScheduledStep | None:
    """Plan the tokens that a decode step in flight chooses; None if one of its sequences will have all of them."""
    sequences = list(step.sequences)
    for sequence in sequences:
        request = sequence.request
        if request.compared is not None or len(sequence.generated) + 1 >= request.max_new_tokens:
            return None
    return _decode(sequences, in_flight=set(sequences), reads_chosen=True)


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
