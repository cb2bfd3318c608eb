"""Reading traces of PyTorch's profiler (Kineto): one file for each rank.

They hold kernels, calls and operators, and no passes. A kernel belongs to the phase in which the host launched it:
backward inside an operator of the autograd engine, optimizer inside `Optimizer.step`, forward everywhere apart from
these. Kernels of one phase in succession are a pass. Without kernels, operators of the host take their place.
"""

import bisect
import collections
import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from megatronapp_analyzer.errors import ImportTraceError
from megatronapp_analyzer.model import Communicator
from megatronapp_analyzer.offline.job import Details, RankRecords, RecordedJob, RecordedRank, check_world
from megatronapp_common.topology import Coordinates
from megatronapp_common.trace import RecordKind

_STEP = re.compile(r"ProfilerStep#(\d+)")
_HOST_IN_NAME = re.compile(r"(.+)_\d+\.\d+\.pt\.trace\.json(?:\.gz)?")
"""Name of a file that `tensorboard_trace_handler` wrote."""
_RANK_IN_NAME = re.compile(r"rank[-_]?(\d+)")
_KERNELS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_CALLS = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime"})
_BACKWARD, _OPTIMIZER = "autograd::engine::evaluate_function", "Optimizer.step#"
_NOT_WORK = ("Optimizer.zero_grad#",)
_SHORT = 0.05
"""Part of the longest pass of a step below which kernels in succession are none."""
_FEW_ELEMENTS = 16
"""Numbers that are reduced over replicas, up to which it is a loss that is averaged, and no gradients."""
_ELEMENT_BYTES = {"Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Int": 4, "Long": 8, "Byte": 1, "Bool": 1}
_GROUPS = {
    "tensor": re.compile(r"(mesh_)?tp|tensor_model_parallel_group", re.IGNORECASE),
    "pipeline": re.compile(r"(mesh_)?pp|pipeline_model_parallel_group", re.IGNORECASE),
    "data": re.compile(r"(mesh_)?dp|data_parallel_group(_with_cp)?", re.IGNORECASE),
}
"""Descriptions of process groups, of Megatron-core and of device meshes."""
_SHORT_NAMES = {"tensor": "tp", "data": "dp", "pipeline": "pp"}
_NO_HOST = "unknown"
_SOURCE = "traces of PyTorch's profiler"
Event = Mapping[str, Any]


class _Intervals:
    """Spans of each thread of a host, to find out what encloses a moment."""

    def __init__(self, events: Iterable[Event]) -> None:
        spans: dict[Any, list[tuple[float, float]]] = collections.defaultdict(list)
        for event in events:
            spans[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        self._starts: dict[Any, list[float]] = {}
        self._reached: dict[Any, list[float]] = {}
        for thread, found in spans.items():
            found.sort()
            self._starts[thread] = [start for start, _ in found]
            self._reached[thread] = list(itertools.accumulate((end for _, end in found), max))

    def enclose(self, thread: Any, at: float) -> bool:  # noqa: ANN401 - numbers and texts
        place = bisect.bisect_right(self._starts.get(thread, []), at)
        return place > 0 and self._reached[thread][place - 1] > at


@dataclasses.dataclass(frozen=True, slots=True)
class _Work:
    """A kernel or operator, in nanoseconds of real time; `kind` is None for communication."""

    kind: RecordKind | None
    step: int
    start_ns: int
    end_ns: int
    event: Event


class _Profile:
    """A file of one rank."""

    def __init__(self, name: str, document: Mapping[str, Any], only: bool) -> None:
        self.name = name
        info = document.get("distributedInfo") or {}
        file_name = name.rpartition("/")[2]
        in_name, host = _RANK_IN_NAME.search(file_name), _HOST_IN_NAME.fullmatch(file_name)
        self.host = host[1] if host else _NO_HOST
        if "rank" not in info and in_name is None and not only:
            raise ImportTraceError(
                f"{name} does not say of which rank it is; name the files rank0.json, rank1.json, ..."
            )
        self.rank = int(info["rank"]) if "rank" in info else int(in_name[1]) if in_name else 0
        self.world = int(info.get("world_size", 0))
        self.groups: dict[str, tuple[str, tuple[int, ...]]] = {
            str(group["pg_name"]): (str(group.get("pg_desc", "")), tuple(map(int, group.get("ranks", ()))))
            for group in info.get("pg_config", ())
        }
        self._base_ns = int(document.get("baseTimeNanoseconds", 0))
        self._events = [event for event in document["traceEvents"] if event.get("ph") == "X" and "ts" in event]
        self.has_kernels = any(event.get("cat") == "kernel" for event in self._events)
        self.unknown_groups = 0
        self._backward = self._enclosing("cpu_op", _BACKWARD)
        self._optimizer = self._enclosing("user_annotation", _OPTIMIZER)
        self._idle = self._enclosing("user_annotation", *_NOT_WORK)

    def group_of(self, role: str) -> tuple[int, ...] | None:
        """Return the ranks of the tensor, pipeline or data group; None if no group is described so."""
        found = (ranks for about, ranks in self.groups.values() if ranks and _GROUPS[role].fullmatch(about))
        return next(found, None)

    def work(self) -> list[_Work]:
        """Return kernels, or operators of the host, in the order of their starts."""
        steps = sorted(
            (event["ts"], event["ts"] + event["dur"], int(number[1]))
            for event in self._events
            if event.get("cat") == "user_annotation" and (number := _STEP.fullmatch(str(event["name"])))
        )
        launches = self._launches() if self.has_kernels else ((event, event) for event in self._operators())
        found: list[_Work] = []
        for event, launch in launches:
            step = _step_at(steps, launch["ts"])
            is_communication = _is_communication(event)
            if step is None or (not is_communication and self._idle.enclose(launch["tid"], launch["ts"])):
                continue
            kind = None if is_communication else self._phase(launch)
            start_ns = self._base_ns + round(event["ts"] * 1000)
            found.append(_Work(kind, step, start_ns, start_ns + round(event["dur"] * 1000), event))
        return sorted(found, key=lambda work: work.start_ns)

    def _enclosing(self, category: str, *names: str) -> _Intervals:
        return _Intervals(
            event for event in self._events if event.get("cat") == category and str(event["name"]).startswith(names)
        )

    def _launches(self) -> Iterator[tuple[Event, Event]]:
        """Yield each kernel with the call that launched it; with itself where that is not recorded."""
        calls = {
            event["args"]["correlation"]: event
            for event in self._events
            if event.get("cat") in _CALLS and "correlation" in event.get("args", {})
        }
        for event in self._events:
            if event.get("cat") in _KERNELS:
                yield event, calls.get(event.get("args", {}).get("correlation"), event)

    def _operators(self) -> Iterator[Event]:
        """Yield operators of the host that are not inside another one, and its collectives."""
        reached: dict[Any, float] = {}
        for event in sorted(self._events, key=lambda event: (event["ts"], -event["dur"])):
            if _is_communication(event):
                yield event
            elif event.get("cat") == "cpu_op" and event["ts"] >= reached.get(event["tid"], -1.0):
                reached[event["tid"]] = event["ts"] + event["dur"]
                if not str(event["name"]).startswith("c10d::"):
                    yield event

    def _phase(self, launch: Event) -> RecordKind:
        if self._backward.enclose(launch["tid"], launch["ts"]):
            return RecordKind.BACKWARD
        if self._optimizer.enclose(launch["tid"], launch["ts"]):
            return RecordKind.OPTIMIZER
        return RecordKind.FORWARD

    def communicator(self, event: Event) -> tuple[str, tuple[int, ...]]:
        """Return role and ranks of the group of a collective; of a host's, and of one not named, all ranks."""
        arguments = event.get("args", {})
        about, ranks = self.groups.get(str(arguments.get("Process Group Name")), ("", ()))
        listed = str(arguments.get("Process Group Ranks", ""))
        if listed and "..." not in listed:
            ranks = tuple(map(int, re.findall(r"\d+", listed)))
        about = str(arguments.get("Process Group Description", about))
        if not ranks:
            self.unknown_groups += 1
            return "data", tuple(range(max(1, self.world)))
        return next((role for role, pattern in _GROUPS.items() if pattern.fullmatch(about)), "data"), ranks


def is_kineto(document: Any) -> bool:  # noqa: ANN401 - JSON
    """Return true for a trace of PyTorch's profiler."""
    return isinstance(document, dict) and "traceEvents" in document and "schemaVersion" in document


def read_kineto(files: Mapping[str, Mapping[str, Any]]) -> RecordedJob:
    """Read files of ranks: their content by name. Raises ImportTraceError."""
    profiles = [_Profile(name, document, only=len(files) == 1) for name, document in files.items()]
    world = max(*(profile.world for profile in profiles), *(profile.rank + 1 for profile in profiles))
    missing = check_world([profile.rank for profile in profiles], world, _SOURCE)
    work = {profile.rank: profile.work() for profile in profiles}
    if not any(work.values()):
        raise ImportTraceError(
            f"{profiles[0].name} has no kernel and no operator inside a step; profile with activities, and call step() "
            "of the profiler after each step"
        )
    origin_ns = min(found[0].start_ns for found in work.values() if found)
    sizes = _sizes(profiles, world)
    hosts = sorted({profile.host for profile in profiles})
    ranks = [
        dataclasses.replace(
            _ranks_records(profile, work[profile.rank], origin_ns, sizes), worker=hosts.index(profile.host)
        )
        for profile in profiles
    ]
    layout = {"tensor": sizes[0], "pipeline": sizes[1], "data": sizes[2]}
    return RecordedJob(
        source=_SOURCE,
        layout=layout | {"virtualPipeline": 1},
        world=world,
        ranks=sorted(ranks, key=lambda rank: rank.rank),
        real_offset_ns=origin_ns,
        notes=[*missing, *_notes(profiles)],
    )


def _sizes(profiles: Sequence[_Profile], world: int) -> tuple[int, int, int]:
    """Return the sizes of the tensor, pipeline and data groups."""
    tensor = max(len(profile.group_of("tensor") or (0,)) for profile in profiles)
    pipeline = max(len(profile.group_of("pipeline") or (0,)) for profile in profiles)
    return tensor, pipeline, max(1, world // (tensor * pipeline))


def _notes(profiles: Sequence[_Profile]) -> Iterator[str]:
    if sum(profile.host == _NO_HOST for profile in profiles) > 1:
        yield "the names of files do not give hosts (HOST_PID.TIME.pt.trace.json): their clocks are taken for one"
    unknown = sum(profile.unknown_groups for profile in profiles)
    if unknown:
        yield f"collectives that do not name their ranks: {unknown}; they are taken for those of all"
    if not any(profile.has_kernels for profile in profiles):
        yield "there are no kernels: passes are those of operators of the host"


def _step_at(steps: Sequence[tuple[float, float, int]], at: float) -> int | None:
    """Return the step in which the host was at a time; 0 for traces without steps."""
    if not steps:
        return 0
    place = bisect.bisect_right(steps, (at, float("inf"), 0)) - 1
    return steps[place][2] if place >= 0 and at < steps[place][1] else None


def _is_communication(event: Event) -> bool:
    if event.get("cat") == "kernel":
        return str(event["name"]).startswith(("nccl", "rccl"))
    return event.get("cat") == "user_annotation" and str(event["name"]).startswith(("gloo:", "mpi:"))


def _ranks_records(
    profile: _Profile, work: Sequence[_Work], origin_ns: int, sizes: tuple[int, int, int]
) -> RecordedRank:
    records = RankRecords(profile.rank)
    of_steps: dict[int, list[_Work]] = collections.defaultdict(list)
    for part in work:
        of_steps[part.step].append(part)
    begin_ns: int | None = None
    for step, parts in sorted(of_steps.items()):
        end_ns = max(part.end_ns for part in parts)
        own = parts[0].start_ns if begin_ns is None else min(begin_ns, parts[0].start_ns)
        records.add(
            RecordKind.STEP, step, (own - origin_ns, end_ns - origin_ns), Details(on_device=profile.has_kernels)
        )
        begin_ns = end_ns
        _add_passes(records, [part for part in parts if part.kind is not None], origin_ns, profile.has_kernels)
        for part in parts:
            if part.kind is None:
                _add_communication(records, part, origin_ns, profile)
    tensor, _, data = sizes
    groups = {role: profile.group_of(role) or () for role in _GROUPS}
    usual = {"tensor": profile.rank % tensor, "data": profile.rank // tensor % data}  # in the order of Megatron
    usual["pipeline"] = profile.rank // (tensor * data)
    at = {role: ranks.index(profile.rank) if profile.rank in ranks else usual[role] for role, ranks in groups.items()}
    place = Coordinates(tp=at["tensor"], cp=0, ep=0, dp=at["data"], pp=at["pipeline"])
    return RecordedRank(
        rank=profile.rank,
        coordinates=place,
        worker=0,
        local_rank=profile.rank,
        node=profile.host,
        device="cuda" if profile.has_kernels else "cpu",
        communicators=list(records.communicators),
        records=records.array(),
        clock=profile.host,
    )


def _add_passes(records: RankRecords, work: Sequence[_Work], origin_ns: int, on_device: bool) -> None:
    """Add a span for each run of kernels of one phase. Short runs, such as a copy between passes, are none."""
    runs: list[list[Any]] = []
    for part in work:
        if runs and runs[-1][0] is part.kind:
            runs[-1][2] = max(runs[-1][2], part.end_ns)
        else:
            runs.append([part.kind, part.start_ns, part.end_ns])
    longest: dict[Any, int] = {}
    for kind, start_ns, end_ns in runs:
        longest[kind] = max(longest.get(kind, 0), end_ns - start_ns)
    merged: list[list[Any]] = []
    for kind, start_ns, end_ns in runs:
        if end_ns - start_ns < _SHORT * longest[kind]:
            continue
        if merged and merged[-1][0] is kind:
            merged[-1][2] = max(merged[-1][2], end_ns)
        else:
            merged.append([kind, start_ns, end_ns])
    numbers: collections.Counter[Any] = collections.Counter()
    for kind, start_ns, end_ns in merged:
        batch = None if kind is RecordKind.OPTIMIZER else numbers[kind]
        numbers[kind] += 1
        details = Details(microbatch=batch, on_device=on_device)
        records.add(kind, work[0].step, (start_ns - origin_ns, end_ns - origin_ns), details)


def _add_communication(records: RankRecords, work: _Work, origin_ns: int, profile: _Profile) -> None:
    """Add a collective, or a message whose other end is named."""
    arguments = work.event.get("args", {})
    operation = str(arguments.get("Collective name") or work.event["name"]).lower()
    times = work.start_ns - origin_ns, work.end_ns - origin_ns
    elements = arguments.get("In msg nelems")
    size = int(elements) * _ELEMENT_BYTES.get(str(arguments.get("dtype")), 1) if elements is not None else None
    details = Details(size_bytes=size, on_device=profile.has_kernels)
    if operation == "send" and "Dst Rank" in arguments:
        return records.send(work.step, times, int(arguments["Dst Rank"]), details)
    if operation == "recv" and "Src Rank" in arguments:
        return records.receive(work.step, times, int(arguments["Src Rank"]), details)
    role, ranks = profile.communicator(work.event)
    gathers = "gather" in operation
    if role == "tensor":
        kind = RecordKind.TP_GATHER if gathers else RecordKind.TP_REDUCE
    elif elements is not None and int(elements) <= _FEW_ELEMENTS:
        kind = RecordKind.LOSS_REDUCE
    else:
        kind = RecordKind.PARAM_GATHER if gathers else RecordKind.GRAD_REDUCE
    return records.collective(kind, work.step, times, Communicator(_SHORT_NAMES[role], ranks), details)
