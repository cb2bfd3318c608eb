"""Reading traces of MegatronApp: a file of each rank, and the file that its aggregator makes of them.

A file of a rank is a list of marks: begin (`B`) and end (`E`) of named scopes, nanoseconds after the start of an
iteration, at which all ranks have just met at a barrier. The aggregator's is a Chrome trace with a process per rank.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from megatronapp_analyzer.errors import ImportTraceError
from megatronapp_analyzer.model import Communicator
from megatronapp_analyzer.offline.job import Details, RankRecords, RecordedJob, RecordedRank, check_world
from megatronapp_common.topology import Coordinates
from megatronapp_common.trace import RecordKind

NAME = re.compile(r"benchmark-data-(\d+)-pipeline-(\d+)-tensor-(\d+)\.json(?:\.gz)?")
_PLAIN: Mapping[str, RecordKind] = {"iteration": RecordKind.STEP, "optimizer": RecordKind.OPTIMIZER}
_PASSES: Mapping[str, RecordKind] = {
    "forward": RecordKind.FORWARD,
    "forward-warmup": RecordKind.FORWARD,
    "backward": RecordKind.BACKWARD,
    "backward-cooldown": RecordKind.BACKWARD,
}
_NEXT, _PREVIOUS = 1, -1
_MESSAGES: Mapping[str, tuple[int | None, int | None]] = {
    "recv-warmup": (None, _PREVIOUS),
    "recv-extra": (None, _PREVIOUS),
    "send-warmup": (_NEXT, None),
    "exchange-next": (_NEXT, _NEXT),
    "exchange-prev": (_PREVIOUS, _PREVIOUS),
    "send-extra": (_PREVIOUS, None),
    "recv-cooldown": (None, _NEXT),
    "send-cooldown": (_PREVIOUS, None),
}
"""For each scope of transfers the stage that it sends to, and the one that it receives from."""
_COLLECTIVES: Mapping[str, tuple[RecordKind, str]] = {
    "_reduce": (RecordKind.TP_REDUCE, "tp"),
    "_reduce_scatter_along_first_dim": (RecordKind.TP_REDUCE, "tp"),
    "_reduce_scatter_along_last_dim": (RecordKind.TP_REDUCE, "tp"),
    "_gather_along_first_dim": (RecordKind.TP_GATHER, "tp"),
    "_gather_along_last_dim": (RecordKind.TP_GATHER, "tp"),
    "allreduce": (RecordKind.GRAD_REDUCE, "dp"),
    "loss": (RecordKind.LOSS_REDUCE, "dp"),
}
"""Kind and group of each scope of a collective. The loss is averaged over the replicas."""
Place = tuple[int, int, int]
"""Data-parallel, pipeline and tensor-parallel rank."""


@dataclasses.dataclass(slots=True)
class Scope:
    """A named span of a rank, in nanoseconds from the start of the trace."""

    name: str
    step: int
    start_ns: int
    end_ns: int
    arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _Iteration:
    pad_ns: int
    """Time since the end of the iteration before."""
    wall_ns: int
    marks: Sequence[Mapping[str, Any]]
    end_ns: int
    start_ns: int | None
    """Real time of its begin, which files of this trainer have."""


def read_rank_files(files: Mapping[str, Any]) -> RecordedJob:
    """Read the files of ranks: their content by name. Raises ImportTraceError, with the file and mark that is wrong."""
    iterations: dict[Place, list[_Iteration]] = {}
    numbers: dict[Place, tuple[int, int]] = {}
    repeated = 0
    for name, content in files.items():
        found = NAME.fullmatch(name.rpartition("/")[2])
        assert found is not None
        place: Place = (int(found[1]), int(found[2]), int(found[3]))
        if place in iterations:
            raise ImportTraceError(f"{name}: another file is of the same rank; give one of each rank")
        everything = list(_iterations(_marks(content, name), name))
        iterations[place] = [
            iteration
            for number, iteration in enumerate(everything)
            if number == 0 or iteration.marks != everything[number - 1].marks
        ]
        repeated += len(everything) - len(iterations[place])
        numbers[place] = _numbers(content, name)
    counts = {place: len(found) for place, found in iterations.items()}
    if len(set(counts.values())) > 1 or not any(counts.values()):
        place, fewest = min(counts.items(), key=lambda item: item[1])
        raise ImportTraceError(
            f"benchmark-data-{place[0]}-pipeline-{place[1]}-tensor-{place[2]}.json has {fewest} iterations, others up "
            f"to {max(counts.values())}; give files of one run, with one iteration or more"
        )
    begins = _iteration_starts(iterations)
    scopes = {
        place: [
            scope
            for step, (iteration, begin_ns) in enumerate(zip(found, begins[place], strict=True))
            for scope in _scopes(iteration, step, begin_ns, place)
        ]
        for place, found in iterations.items()
    }
    note = f"{repeated} iterations that the files hold twice are skipped"
    return _job(scopes, numbers, "files of MegatronApp's ranks", [note] if repeated else [])


def _marks(content: Any, name: str) -> Iterator[Mapping[str, Any]]:  # noqa: ANN401 - JSON
    if not isinstance(content, list):
        raise ImportTraceError(f"{name} holds no list of marks; give a file that MegatronApp's --trace wrote")
    for number, mark in enumerate(content):
        if not isinstance(mark, dict) or not isinstance(mark.get("name"), str) or "ph" not in mark:
            raise ImportTraceError(f"{name}: mark {number} has no name and ph; each must be an object with both")
        yield mark


def _whole(mark: Mapping[str, Any], key: str, name: str) -> int:
    value = mark.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or value != value or abs(value) > 1 << 62:  # noqa: PLR0124
        raise ImportTraceError(f"{name}: {key} of {mark.get('name')!r} is {value!r}; it must be a number")
    return int(value)


def _numbers(content: Sequence[Mapping[str, Any]], name: str) -> tuple[int, int]:
    """Return the rank in the world and the number of its device on the node."""
    for mark in content:
        if "g_rk" in mark:
            return _whole(mark, "g_rk", name), _whole(mark, "dev", name) if "dev" in mark else 0
    raise ImportTraceError(f"{name}: no mark has g_rk, the rank; give a file that MegatronApp's --trace wrote")


def _iterations(marks: Iterable[Mapping[str, Any]], name: str) -> Iterator[_Iteration]:
    """Yield the traced iterations; marks outside, of evaluations, are skipped."""
    inside: list[Mapping[str, Any]] | None = None
    pad_ns = 0
    start_ns: int | None = None
    for mark in marks:
        if mark["name"] != "iteration":
            if inside is not None:
                inside.append(mark)
        elif mark["ph"] == "B":
            inside, pad_ns = [], _whole(mark, "pad_before", name) if mark.get("pad_before") is not None else 0
            start_ns = _whole(mark, "start_real_ns", name) if "start_real_ns" in mark else None
        elif inside is not None:
            wall_ns = _whole(mark, "duration_wall", name)
            end_ns = _whole(mark, "rel_ts", name) if "rel_ts" in mark else wall_ns
            yield _Iteration(pad_ns, wall_ns, inside, end_ns, start_ns)
            inside = None


def _iteration_starts(ranks: Mapping[Place, Sequence[_Iteration]]) -> dict[Place, list[int]]:
    """Return when each iteration of a rank begins, in ns: its real time where all files have it.

    Ranks of MegatronApp meet before an iteration, and the slowest one counts.
    """
    known = [[iteration.start_ns for iteration in found] for found in ranks.values()]
    if all(start_ns is not None for found in known for start_ns in found):
        origin_ns = min(start_ns for found in known for start_ns in found if start_ns is not None)
        return {place: [(each.start_ns or 0) - origin_ns for each in found] for place, found in ranks.items()}
    begins = []
    now_ns = 0
    for same in zip(*ranks.values(), strict=True):
        now_ns += max(iteration.pad_ns for iteration in same)
        begins.append(now_ns)
        now_ns += max(max(iteration.wall_ns, iteration.end_ns) for iteration in same)
    return dict.fromkeys(ranks, begins)


def _scopes(iteration: _Iteration, step: int, begin_ns: int, place: Place) -> Iterator[Scope]:
    """Yield the iteration and its scopes, in the order of their starts."""
    name = f"benchmark-data-{place[0]}-pipeline-{place[1]}-tensor-{place[2]}.json"
    found = [Scope("iteration", step, begin_ns, begin_ns + iteration.end_ns, {})]
    open_scopes: list[Scope] = []
    for mark in iteration.marks:
        at_ns = begin_ns + _whole(mark, "rel_ts", name)
        if mark["ph"] == "B":
            open_scopes.append(Scope(mark["name"], step, at_ns, at_ns, {}))
            found.append(open_scopes[-1])
        elif mark["ph"] == "E":
            if not open_scopes or open_scopes[-1].name != mark["name"]:
                begun = f"{open_scopes[-1].name!r} is open" if open_scopes else "nothing is open"
                raise ImportTraceError(
                    f"{name}: iteration {step}: {mark['name']!r} ends while {begun}; scopes must be nested"
                )
            scope = open_scopes.pop()
            scope.end_ns, scope.arguments = at_ns, mark
    if open_scopes:
        raise ImportTraceError(
            f"{name}: iteration {step}: {open_scopes[-1].name!r} has no end; give a file that was written to its end"
        )
    yield from found


def read_aggregated(events: Sequence[Any], name: str) -> RecordedJob:
    """Read the aggregator's file. Its iterations have no spans: they last from their first to their last event."""
    scopes: dict[Place, list[Scope]] = {}
    numbers: dict[Place, tuple[int, int]] = {}
    for number, event in enumerate(events):
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        arguments = event.get("args")
        if not isinstance(arguments, dict) or not {"dp_rk", "pp_rk", "tp_rk", "iteration"} <= arguments.keys():
            raise ImportTraceError(f"{name}: event {number} has no dp_rk, pp_rk, tp_rk and iteration in its args")
        at = f"{name}: event {number}"
        place = (_whole(arguments, "dp_rk", at), _whole(arguments, "pp_rk", at), _whole(arguments, "tp_rk", at))
        start_ns = 1000 * _whole(event, "ts", at)
        scope = Scope(
            str(event.get("name")),
            _whole(arguments, "iteration", at),
            start_ns,
            start_ns + 1000 * _whole(event, "dur", at),
            arguments,
        )
        scopes.setdefault(place, []).append(scope)
        numbers[place] = _whole(arguments, "g_rk", at), _whole(arguments, "dev", at) if "dev" in arguments else 0
    if not scopes:
        raise ImportTraceError(
            f"{name} has no complete events (ph X); give the file that MegatronApp's aggregator wrote"
        )
    for found in scopes.values():
        found.sort(key=lambda scope: (scope.start_ns, -scope.end_ns))
        of_step: dict[int, list[Scope]] = collections.defaultdict(list)
        for scope in found:
            of_step[scope.step].append(scope)
        found[:0] = [
            Scope("iteration", step, inside[0].start_ns, max(scope.end_ns for scope in inside), {})
            for step, inside in of_step.items()
        ]
    return _job(scopes, numbers, name, ["steps last from their first to their last event"])


def _job(
    scopes: Mapping[Place, Sequence[Scope]], numbers: Mapping[Place, tuple[int, int]], source: str, notes: list[str]
) -> RecordedJob:
    data, stages, tensor = (max(place[axis] for place in scopes) + 1 for axis in range(3))
    world = data * stages * tensor
    rank_of = {place: number for place, (number, _) in numbers.items()}
    local_ranks = max(local for _, local in numbers.values()) + 1
    skipped: collections.Counter[str] = collections.Counter()
    ranks = []
    for place, found in sorted(scopes.items(), key=lambda item: rank_of[item[0]]):
        number, local_rank = numbers[place]
        if number >= world:
            raise ImportTraceError(
                f"{source}: DP{place[0]}-PP{place[1]}-TP{place[2]} is rank {number}, and the files are of "
                f"{data} x {stages} x {tensor} ranks; give the files of all ranks"
            )
        records = _records(found, _Neighbours(place, rank_of), skipped)
        ranks.append(
            RecordedRank(
                rank=number,
                coordinates=Coordinates(tp=place[2], cp=0, ep=0, dp=place[0], pp=place[1]),
                worker=number // local_ranks,
                local_rank=local_rank,
                node=f"node-{number // local_ranks}",
                device="cuda",
                communicators=list(records.communicators),
                records=records.array(),
            )
        )
    notes += check_world([rank.rank for rank in ranks], world, source)
    if skipped:
        some = ", ".join(f"{count} {name}" for name, count in skipped.most_common(6))
        notes.append(f"{sum(skipped.values())} spans inside passes are skipped ({some})")
    layout = {"tensor": tensor, "pipeline": stages, "data": data, "virtualPipeline": 1}
    return RecordedJob(source=source, layout=layout, world=world, ranks=ranks, notes=notes)


@dataclasses.dataclass(frozen=True, slots=True)
class _Neighbours:
    """A rank among those that have a file."""

    place: Place
    rank_of: Mapping[Place, int]

    def group(self, kind: str) -> Communicator:
        """Return the data-parallel (`dp`) or tensor-parallel (`tp`) group of the rank."""
        own = slice(1, 3) if kind == "dp" else slice(0, 2)
        members = (rank for place, rank in self.rank_of.items() if place[own] == self.place[own])
        return Communicator(kind, tuple(sorted(members)))

    def of_stage(self, ahead: int) -> int | None:
        """Return the same rank of the next stage (1) or the previous one (-1); None at the ends of the pipeline."""
        data, stage, tensor = self.place
        return self.rank_of.get((data, stage + ahead, tensor))


def _records(scopes: Sequence[Scope], near: _Neighbours, skipped: collections.Counter[str]) -> RankRecords:
    """Return the records of a rank; `skipped` counts the scopes that have no kind here."""
    records = RankRecords(near.rank_of[near.place])
    groups = {kind: near.group(kind) for kind in ("dp", "tp")}
    losses: dict[int, list[int]] = collections.defaultdict(list)
    for scope in scopes:
        if scope.name == "loss":
            losses[scope.step].append(scope.start_ns)
    passes: collections.Counter[tuple[int, RecordKind]] = collections.Counter()
    for scope in scopes:
        times = scope.start_ns, scope.end_ns
        details = Details(size_bytes=_bytes(scope.arguments))
        if scope.name in _PLAIN:
            records.add(_PLAIN[scope.name], scope.step, times)
        elif scope.name in _PASSES:
            kind = _PASSES[scope.name]
            number = Details(microbatch=passes[scope.step, kind])
            passes[scope.step, kind] += 1
            records.add(kind, scope.step, _without_loss(scope, losses[scope.step]), number)
        elif scope.name in _MESSAGES:
            for add, ahead in zip((records.send, records.receive), _MESSAGES[scope.name], strict=True):
                if ahead is not None and (peer := near.of_stage(ahead)) is not None:
                    add(scope.step, times, peer, details)
        elif scope.name in _COLLECTIVES:
            kind, group = _COLLECTIVES[scope.name]
            records.collective(kind, scope.step, times, groups[group], details)
        else:
            skipped[scope.name] += 1
    return records


def _without_loss(scope: Scope, losses: Iterable[int]) -> tuple[int, int]:
    """Return the times of a pass, which ends before the loss inside it is averaged with the other replicas."""
    inside = [start_ns for start_ns in losses if scope.start_ns <= start_ns < scope.end_ns]
    return scope.start_ns, min([scope.end_ns, *inside])


def _bytes(arguments: Mapping[str, Any]) -> int | None:
    size = arguments.get("data")
    return int(size) if isinstance(size, int | float) and size >= 0 else None
