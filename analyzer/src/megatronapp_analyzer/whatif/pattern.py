"""Find which operations of a step wait for which others: the dependency model of the what-if analysis.

A stage has a stream of computation, one for each direction of transfers between stages, and one for the collectives of
its replicas. Operations of a stream follow each other; streams meet where a pass needs what was received, a transfer
needs what was computed, and at the end of the step. The rules are those of the artifact of the paper (see the package);
with the same rules the published results are reproduced.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.errors import WhatIfError
from megatronapp_analyzer.whatif.recording import Recording

FORWARD, BACKWARD = "forward-compute", "backward-compute"
PARAMETERS, GRADIENTS, SEPARATE = "params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"
LAYERNORM, EMBEDDING = "layernorm-grads-all-reduce", "embedding-grads-all-reduce"
COLLECTOR, CLIP, OPTIMIZER = "gc", "optimizer-clip-main-grad", "optimizer"
TRANSFERS = ("forward-send", "forward-recv", "backward-send", "backward-recv")
COMMUNICATION = frozenset({*TRANSFERS, PARAMETERS, GRADIENTS, SEPARATE, LAYERNORM, EMBEDDING, CLIP})
"""Kinds whose ideal duration is a median; that of all others, which compute, is a mean."""
KINDS = COMMUNICATION | {FORWARD, BACKWARD, COLLECTOR, OPTIMIZER}
_OF_REPLICAS = frozenset({PARAMETERS, GRADIENTS, SEPARATE, CLIP})
"""Kinds that wait for all replicas."""
_TOLERANCE_S = 5e-5
"""Error of clocks when it is decided whether a transfer belongs to a pass."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPattern:
    """The dependencies of N operations, and G groups of those that transfer together."""

    dependencies: tuple[tuple[int, ...], ...]
    """For each operation those that must end before it starts."""
    groups: tuple[tuple[int, ...], ...]
    """Operations of all groups; those that are in none compute alone."""
    spans_replicas: tuple[bool, ...]
    """For each group whether it waits for the same group of all replicas."""

    def flat(self) -> dict[str, NDArray[np.int32]]:
        """Return the arguments of `StepReplay` that describe the pattern."""

        def lists(values: Sequence[Sequence[int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
            begin = np.cumsum([0, *map(len, values)], dtype=np.int32)
            return begin, np.fromiter((number for part in values for number in part), dtype=np.int32)

        dependency_begin, dependencies = lists(self.dependencies)
        group_begin, members = lists(self.groups)
        return {
            "dependency_begin": dependency_begin,
            "dependencies": dependencies,
            "group_begin": group_begin,
            "members": members,
            "spans_replicas": np.array(self.spans_replicas, dtype=np.int32),
        }


def pattern_of(recording: Recording) -> StepPattern:
    """Derive the pattern from the order of the first replica's operations in the first step.

    Raises WhatIfError for kinds of operations that are not known, stages without passes, and transfers without a peer.
    """
    operations = recording.operations
    unknown = sorted(set(operations.kinds) - KINDS)
    if unknown:
        raise WhatIfError(
            f"operations of kind {', '.join(unknown)} are not known; known are {', '.join(sorted(KINDS))}"
        )
    is_pass = np.isin(operations.kinds, (FORWARD, BACKWARD))
    if min(operations.chunks_N[is_pass].min(initial=0), operations.model_chunks_N[is_pass].min(initial=0)) < 0:
        raise WhatIfError(f"some {FORWARD} or {BACKWARD} has no chunk (mc, gmc); give that of the model")
    chunks = (int(operations.chunks_N.max()) + 1) * (int(operations.stages_N.max()) + 1)
    if int(operations.model_chunks_N.max()) >= chunks:
        raise WhatIfError(
            f"gmc (chunk in the whole model) is up to {operations.model_chunks_N.max()}, and by mc and stage there are "
            f"{chunks} chunks; it must be below"
        )
    return _PatternBuilder(recording).build()


class _PatternBuilder:
    """The dependencies found so far."""

    def __init__(self, recording: Recording) -> None:
        operations = recording.operations
        self._kinds = operations.kinds
        self._numbers = operations.numbers_N.tolist()
        self._chunks = operations.chunks_N.tolist()
        self._model_chunks = operations.model_chunks_N.tolist()
        self._starts = recording.starts_NRT[:, 0, 0].tolist()
        self._ends = recording.ends_NRT[:, 0, 0].tolist()
        self._stages = int(operations.stages_N.max()) + 1
        self._most_chunks = (int(operations.chunks_N.max()) + 1) * self._stages
        self._dependencies: list[list[int]] = [[] for _ in self._kinds]
        self._groups: list[tuple[int, ...]] = []
        self._of: dict[tuple[str, int], list[int]] = {}
        """Operations of each kind and stage, by number."""
        stages = operations.stages_N.tolist()
        for place in np.lexsort((operations.numbers_N, operations.stages_N)).tolist():
            self._of.setdefault((self._kinds[place], stages[place]), []).append(place)
        self._with_peer: dict[tuple[str, int], list[int]] = {}
        """Transfers of each kind and stage that have a peer, in the order of their starts."""

    def build(self) -> StepPattern:
        """Return the pattern that all rules together give."""
        for stage in range(self._stages):
            passes = self._by_start(stage, FORWARD, BACKWARD)
            for kind in (FORWARD, BACKWARD):
                if (kind, stage) not in self._of:
                    raise WhatIfError(f"stage {stage} has no {kind}; each stage must have both passes")
            self._chain(passes)
            for direction, ahead in (("forward", 1), ("backward", -1)):
                self._add_transfers(stage, direction, "send", ahead)
                self._add_transfers(stage, direction, "recv", -ahead)
            self._add_first_backward(stage, passes)
            self._add_collectives(stage, passes)
            self._add_end_of_step(stage, passes)
        self._pair_transfers()
        for kind, stages in ((EMBEDDING, (0, self._stages - 1)), (CLIP, range(self._stages))):
            group = dict.fromkeys(place for stage in stages for place in self._of.get((kind, stage), [])[:1])
            if group:
                self._groups.append(tuple(group))
        return StepPattern(
            dependencies=tuple(map(tuple, self._dependencies)),
            groups=tuple(self._groups),
            spans_replicas=tuple(self._kinds[group[0]] in _OF_REPLICAS for group in self._groups),
        )

    def _by_start(self, stage: int, *kinds: str) -> list[int]:
        """Operations of these kinds in the order in which they started."""
        places = [place for kind in kinds for place in self._of.get((kind, stage), [])]
        return sorted(places, key=lambda place: (self._starts[place], self._numbers[place], self._kinds[place]))

    def _chain(self, places: Iterable[int], after: Iterable[int] = ()) -> None:
        """Let each wait for the one before it, the first for those of `after`."""
        last = list(after)
        for place in places:
            self._dependencies[place] += last
            last = [place]

    def _add_transfers(self, stage: int, direction: str, way: str, ahead: int) -> None:
        """Connect a stage's transfers of one kind with the passes that send or need what they carry.

        Records of transfers before the first pass and after the last one were never launched; they belong to no pass.
        The first stage may lack the record of the first transfer that it does not need. At both ends of the model
        transfers have no peer.
        """
        kind = f"{direction}-{way}"
        transfers = self._by_start(stage, kind)
        self._chain(transfers)
        passes = self._of[f"{direction}-compute", stage]
        if way == "recv":
            last_start = max(self._starts[place] for place in passes) + _TOLERANCE_S
            launched = [place for place in transfers if self._starts[place] <= last_start]
        else:
            first_end = min(self._ends[place] for place in passes) - _TOLERANCE_S
            launched = [place for place in transfers if self._ends[place] >= first_end]
        without = len(passes) - len(launched)
        needs = any(0 <= self._model_chunks[place] + ahead < self._most_chunks for place in passes)
        allowed = {0, 1} if stage in {0, self._stages - 1} else {0}
        if without not in (allowed if needs else {*allowed, len(passes)}):
            raise WhatIfError(
                f"stage {stage} has {len(launched)} operations {kind} for {len(passes)} passes; each pass must have one"
            )
        skipped = 1 if way == "recv" and without == 1 else 0
        peered = self._with_peer[kind, stage] = []
        for number, place in enumerate(launched, start=skipped):
            if 0 <= self._model_chunks[passes[number]] + ahead < self._most_chunks:
                peered.append(place)
            if way == "send":
                self._dependencies[place].append(passes[number])
                continue
            self._dependencies[passes[number]].append(place)
            if number > 0:
                self._dependencies[place].append(passes[number - 1])
        self._groups += [(place,) for place in transfers if place not in set(peered)]

    def _add_first_backward(self, stage: int, passes: Sequence[int]) -> None:
        """Let the first backward transfers wait for the second forward pass before the first backward pass."""
        first = next(number for number, place in enumerate(passes) if self._kinds[place] == BACKWARD)
        if first < 2:
            return
        for kind in ("backward-recv", "backward-send"):
            for place in self._of.get((kind, stage), [])[:1]:
                self._dependencies[place].append(passes[first - 2])

    def _add_collectives(self, stage: int, passes: Sequence[int]) -> None:
        """Connect gathering of parameters and, where they overlap, reductions of gradients with passes of a chunk."""
        gathers, reductions = (self._of.get((kind, stage), []) for kind in (PARAMETERS, GRADIENTS))
        self._chain(self._by_start(stage, PARAMETERS, GRADIENTS))
        for place in {self._chunks[place]: place for place in gathers}.values():  # the last of each chunk
            of_chunk = self._passes_of_chunk(passes, FORWARD, place)
            if of_chunk:
                self._dependencies[of_chunk[0]].append(place)
        separate = self._of.get((SEPARATE, stage), [])
        if separate:
            for place in {self._chunks[place]: place for place in reversed(reductions)}.values():  # the first
                of_chunk = self._passes_of_chunk(passes, BACKWARD, place)
                if of_chunk:
                    self._dependencies[place].append(max(of_chunk, key=self._ends.__getitem__))
        self._groups += [(place,) for place in (*gathers, *reductions, *separate)]

    def _passes_of_chunk(self, passes: Sequence[int], kind: str, collective: int) -> list[int]:
        chunk = self._chunks[collective]
        return [place for place in passes if self._kinds[place] == kind and self._chunks[place] == chunk]

    def _add_end_of_step(self, stage: int, passes: Sequence[int]) -> None:
        """Chain what follows the last pass, up to the optimizer."""
        last = [max(passes, key=self._ends.__getitem__)]
        collector = self._of.get((COLLECTOR, stage), [])
        self._chain(collector, last)
        after = collector[-1:] or last
        first = [*self._of.get((LAYERNORM, stage), []), *self._of.get((EMBEDDING, stage), [])]
        reductions, separate = (self._of.get((kind, stage), []) for kind in (GRADIENTS, SEPARATE))
        ends = [*self._of.get((CLIP, stage), []), *self._of.get((OPTIMIZER, stage), [])]
        if separate:  # reductions overlap with backward passes
            self._chain([*first, *separate, *ends], [*reductions[-1:], *after])
        else:
            self._chain([*first, *reductions, *ends], after)

    def _pair_transfers(self) -> None:
        """Group each transfer with that of the neighbouring stage."""
        for direction, ahead in (("forward", 1), ("backward", -1)):
            for stage in range(self._stages):
                peer = (stage + ahead) % self._stages
                sent = self._with_peer[f"{direction}-send", stage]
                received = self._with_peer[f"{direction}-recv", peer]
                if len(sent) != len(received):
                    raise WhatIfError(
                        f"stage {stage} has {len(sent)} operations {direction}-send to stage {peer}, which has "
                        f"{len(received)} {direction}-recv; both must have as many"
                    )
                self._groups += list(zip(sent, received, strict=True))
