"""Rows of a pipeline with several chunks a stage, whose operations take random times, as recorded."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow

Operation = tuple[str, int, int, int]
"""Kind, replica, stage, number among its kind on the stage."""
BACK = "backward-recv"
ENDS = ("optimizer-clip-main-grad", "optimizer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterleavedPipeline:
    """The interleaved 1F1B order of Megatron; all times are multiples of 1/8 s, so that sums are exact."""

    stages: int = 2
    chunks: int = 1
    microbatches: int = 4
    replicas: int = 2
    steps: tuple[int, ...] = (1, 2)
    overlapped: bool = False
    """Gather parameters and reduce gradients during the passes, in two buckets for each chunk."""
    unlaunched: bool = False
    """Record a send before the first pass and a receive after the last one, which moved nothing."""
    random: bool = True
    """Draw all times; otherwise a pass takes as many seconds as the number of its chunk, counted from 1."""

    def order(self, stage: int) -> list[tuple[str, int]]:
        """Return kind and number of a stage's passes in the order in which they run."""
        total = self.microbatches * self.chunks
        ahead = self.stages - stage - 1
        warmup = min(total, ahead if self.chunks == 1 else 2 * ahead + (self.chunks - 1) * self.stages)
        order = [("forward", number) for number in range(warmup)]
        for number in range(total - warmup):
            order += [("forward", warmup + number), ("backward", number)]
        return order + [("backward", number) for number in range(total - warmup, total)]

    def chunk(self, direction: str, number: int) -> int:
        """Return the chunk, among those of its stage, that a pass runs."""
        chunk = number // self.stages % self.chunks
        return chunk if direction == "forward" else self.chunks - 1 - chunk

    def table(self) -> pyarrow.Table:
        """Return the rows as a table with the columns of the public traces."""
        draw = np.random.default_rng(7)
        rows = [row for step in self.steps for row in self._step(step, draw)]
        names = ("optype", "dp_rank", "stage", "seq_id", "step", "mc", "gmc", "rank", "start_ts", "duration")
        return pyarrow.table({name: [row[place] for row in rows] for place, name in enumerate(names)})

    def _step(self, step: int, draw: np.random.Generator) -> Iterator[tuple[object, ...]]:
        waits = dict(pair for replica in range(self.replicas) for pair in self._waits(replica).items())
        together = self._together(waits)
        starts: dict[Operation, float] = {}
        ends: dict[Operation, float] = {}
        while len(ends) < len(waits):
            for operation, others in waits.items():
                if operation not in starts and all(other in ends for other in others):
                    starts[operation] = max((ends[other] for other in others), default=0.0)
            for operation in [operation for operation in starts if operation not in ends]:
                members = together.get(operation, (operation,))
                if all(member in starts for member in members):
                    end = max(starts[member] for member in members) + self._seconds(operation, draw)
                    ends |= dict.fromkeys(members, end)
        for operation, start in starts.items():
            kind, replica, stage, number = operation
            chunk = self._chunk_of(operation)
            model_chunk = -1 if chunk < 0 else chunk * self.stages + stage
            worker = replica * self.stages + stage
            yield kind, replica, stage, number, step, chunk, model_chunk, worker, start, ends[operation] - start

    def _seconds(self, operation: Operation, draw: np.random.Generator) -> float:
        if operation[3] == self.microbatches * self.chunks:  # was never launched
            return 0.125
        if self.random:
            return float(draw.integers(1, 33)) / 8
        return 1.0 + self._chunk_of(operation) if operation[0].endswith("compute") else 0.25

    def _chunk_of(self, operation: Operation) -> int:
        kind, _, _, number = operation
        if kind == "params-all-gather":
            return number // 2
        if kind == "grads-reduce-scatter":
            return self.chunks - 1 - number // 2 if self.overlapped else 0
        direction, _, what = kind.partition("-")
        if what not in {"compute", "send", "recv"}:
            return -1
        return self.chunk(direction, number % (self.microbatches * self.chunks))

    def _waits(self, replica: int) -> dict[Operation, list[Operation]]:
        """Return for each operation of a replica those that must end before it starts."""
        waits: dict[Operation, list[Operation]] = {}
        for stage in range(self.stages):

            def named(kind: str, number: int, stage: int = stage) -> Operation:
                return kind, replica, stage, number

            order = [named(f"{direction}-compute", number) for direction, number in self.order(stage)]
            self._run_in_order(order, waits)
            for direction in ("forward", "backward"):
                for number in range(self.microbatches * self.chunks):
                    computed, received = named(f"{direction}-compute", number), named(f"{direction}-recv", number)
                    waits.setdefault(computed, []).append(received)
                    waits[received] = [named(f"{direction}-{kind}", number - 1) for kind in ("recv", "compute")][
                        : 2 * (number > 0)
                    ]
                    waits[named(f"{direction}-send", number)] = [
                        computed,
                        *[named(f"{direction}-send", number - 1)] * (number > 0),
                    ]
            first = next(place for place, pass_ in enumerate(order) if pass_[0] == "backward-compute")
            if first > 1:
                waits[named(BACK, 0)].append(order[first - 2])
            if self.unlaunched:
                total = self.microbatches * self.chunks
                waits[named("forward-send", total)] = []
                waits[named("forward-send", 0)].append(named("forward-send", total))
                waits[named("forward-recv", total)] = [order[-1]]
            self._add_collectives(order, named("", 0), waits)
        return waits

    @staticmethod
    def _run_in_order(order: Sequence[Operation], waits: dict[Operation, list[Operation]]) -> None:
        for before, after in zip([None, *order], order, strict=False):
            waits.setdefault(after, []).extend([] if before is None else [before])

    def _add_collectives(
        self, order: Sequence[Operation], place: Operation, waits: dict[Operation, list[Operation]]
    ) -> None:
        _, replica, stage, _ = place
        ends = [(kind, replica, stage, 0) for kind in ENDS]
        last = order[-1]
        buckets = 2 * self.chunks
        if not self.overlapped:
            self._run_in_order([last, ("grads-reduce-scatter", replica, stage, 0), *ends], waits)
            return
        gathers = [("params-all-gather", replica, stage, number) for number in range(buckets)]
        reductions = [("grads-reduce-scatter", replica, stage, number) for number in range(buckets)]
        self._run_in_order([*gathers, *reductions], waits)
        for chunk in range(self.chunks):
            of_chunk = [pass_ for pass_ in order if self._chunk_of(pass_) == chunk]
            waits[next(pass_ for pass_ in of_chunk if pass_[0] == "forward-compute")].append(gathers[2 * chunk + 1])
            waits[reductions[2 * (self.chunks - 1 - chunk)]].append(of_chunk[-1])
        separate = ("separate-grads-all-reduce", replica, stage, 0)
        waits[separate] = [reductions[-1]]
        self._run_in_order([last, separate, *ends], waits)

    def _together(self, waits: dict[Operation, list[Operation]]) -> dict[Operation, tuple[Operation, ...]]:
        """Return the members of each transfer that has more than one."""
        found: dict[Operation, tuple[Operation, ...]] = {}
        of_replicas = {"params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"}
        for operation in waits:
            kind, _, stage, number = operation
            if kind == ENDS[0]:
                found[operation] = tuple(other for other in waits if other[0] == kind)
            elif kind in of_replicas:
                found[operation] = tuple(other for other in waits if other[0] == kind and other[2:] == (stage, number))
        for replica in range(self.replicas):
            for direction, ahead in (("forward", 1), ("backward", -1)):
                for stage in range(self.stages):
                    peer = (stage + ahead) % self.stages
                    sent = self._with_peer(direction, stage, ahead)
                    received = self._with_peer(direction, peer, -ahead)
                    for number, other in zip(sent, received, strict=True):
                        pair = (
                            (f"{direction}-send", replica, stage, number),
                            (f"{direction}-recv", replica, peer, other),
                        )
                        found |= dict.fromkeys(pair, pair)
        return found

    def _with_peer(self, direction: str, stage: int, ahead: int) -> list[int]:
        """Return the passes on a stage whose input or output another stage has."""
        everything = self.stages * self.chunks
        return [
            number
            for number in range(self.microbatches * self.chunks)
            if 0 <= self.chunk(direction, number) * self.stages + stage + ahead < everything
        ]
