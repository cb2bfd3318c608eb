"""`megatronapp describe` for jobs of this machine."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatronapp_common.errors import JobError
from megatronapp_common.job.api.progress import TimeUse
from megatronapp_common.job.profiles.effective import LayeredJob, read_layers
from megatronapp_common.text.terminal import to_single_line
from megatronapp_operator.backends.process.state import files, registry
from megatronapp_operator.backends.process.state.registry import JobView
from megatronapp_operator.cli.jobs import JobHandle
from megatronapp_operator.cli.text.durations import human_duration
from megatronapp_operator.cli.text.layers import field_rows, profile_rows
from megatronapp_operator.cli.text.tables import NONE, age, format_table, iteration, number
from megatronapp_operator.errors import OperatorError

EVENTS_SHOWN = 30
"""Newest events that are printed."""
SHIPPED = {
    "saved": "all saved tensors",
    "selective": "what selective recomputation keeps",
    "full": "inputs of layers",
}
"""Shipped tensors in words, by the value of fbd.ship."""
Pairs = Sequence[tuple[str, str]]


def main(arguments: argparse.Namespace) -> int:
    """Print everything about a job; return the exit code."""
    job = registry.view(arguments.job)
    print("\n".join(describe(job, fields=arguments.fields)), flush=True)
    return 0


def describe(job: JobView, *, fields: bool = False) -> Iterator[str]:
    """Yield the lines about a job of this machine."""
    backend = ("Backend", "running" if job.alive else "ended")
    yield from lines(
        job,
        files.read_lines(job.paths.events),
        place=[backend],
        end=[("State", str(job.paths.root))],
        layered=local_layers(job) if fields or job.paths.layers.exists() else None,
        fields=fields,
    )


def local_layers(job: JobView) -> LayeredJob:
    """Return the layers of the spec of a job of this machine. Raises OperatorError for a job of an older release."""
    stored = files.read_json(job.paths.layers)
    if stored is None:
        raise OperatorError(f"{job.name}: was started by an older release, which recorded no origins of its fields")
    try:
        return read_layers(job.document, stored)
    except JobError as error:
        raise OperatorError(f"{job.name}: this release cannot read its spec: {error}") from error


def lines(
    job: JobHandle,
    events: list[dict[str, Any]],
    *,
    place: Pairs,
    end: Pairs = (),
    layered: LayeredJob | None = None,
    fields: bool = False,
) -> Iterator[str]:
    """Yield the lines about a job; the backend adds rows as `place`, after the phase, and as `end` of the head.

    `layered`: layers of its spec; None: not known. With `fields`, all fields of the spec are listed.
    """
    spec = job.document["spec"] if layered is None or not layered.profiles else layered.job.spec.to_dict()
    yield from _pairs([*_head(job, spec, place), *end])
    if layered is not None and layered.profiles:
        yield from _section("Profiles", profile_rows(layered))
    if layered is not None and fields:
        yield from _section("Fields", field_rows(layered))
    yield from _conditions(job.status)
    yield from _workers(job.status)
    yield from _slow_ranks(job.status)
    yield from _slow_nodes(job.status)
    yield from _failures(job.status)
    yield from _events(events)


def _head(job: JobHandle, spec: Mapping[str, Any], place: Pairs) -> list[tuple[str, str]]:
    """Return the rows about a job; `spec` has the fields of its profiles, too."""
    metadata, status = job.document["metadata"], job.status
    layout = ", ".join(f"{name} {size}" for name, size in spec.get("parallelism", {}).items())
    replicas = ", ".join(f"{count} {name}" for name, count in status.get("replicaStatuses", {}).items())
    progress = status.get("progress", {})
    api = [("API", status.get("serveUrl", NONE))] if spec.get("mode") == "serve" else []
    return [
        ("Name", job.name),
        ("UID", metadata["uid"]),
        ("Phase", job.phase),
        *place,
        ("Created", metadata.get("creationTimestamp", NONE)),
        ("Started", status.get("startTime", NONE)),
        ("Completed", status.get("completionTime", NONE)),
        ("Parallelism", layout or NONE),
        ("World size", str(status.get("worldSize", NONE))),
        *_roles(status),
        ("Workers", replicas or NONE),
        ("Attempt", str(status.get("attempt", 0))),
        ("Restarts", f"{status.get('restarts', 0)} ({status.get('restartsTowardsMax', 0)} towards the maximum)"),
        ("Iteration", iteration(progress)),
        *_evictions(status),
        *_time_spent(status.get("timeSpent")),
        *_spares(status, spec),
        *_size(spec, status),
        ("Loss", number(progress.get("loss"), ".4f")),
        *[("Pipeline plan", f"{plan['schedule']}: {plan['plan']}") for plan in progress.get("plans", [])[-1:]],
        *_forward_backward(progress.get("forwardBackward")),
        ("Hub", status.get("hubUrl", NONE)),
        *api,
    ]


def _time_spent(spent: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """Yield the effective training time ratio with what the rest of the time was spent on; nothing before a step."""
    uses = {use.value: float((spent or {}).get(use.value, 0.0)) for use in TimeUse}
    total, trained = sum(uses.values()), uses.pop(TimeUse.TRAINED.value)
    if total > 0 and trained > 0:
        lost = [f"{use} {human_duration(seconds)}" for use, seconds in uses.items() if seconds >= 1]
        yield "Effective time", f"{trained / total:.1%}" + (f"; {', '.join(lost)}" if lost else "")


def _evictions(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the newest checkpoint of the attempt, and whether workers may be evicted; nothing without either."""
    progress = status.get("progress") or {}
    if progress.get("checkpointTime") is not None:
        yield "Checkpoint", f"step {progress.get('checkpointIteration')}, taken {age(progress['checkpointTime'])} ago"
    for condition in status.get("conditions", ()):
        if condition["type"] == "EvictionsRefused":
            yield "Evictions", f"{'refused' if condition['status'] == 'True' else 'allowed'}: {condition['message']}"


def _spares(status: Mapping[str, Any], spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield how many spares hold nodes, what they have cost so far, and whose places former spares hold."""
    spent, price = status.get("timeSpent") or {}, (spec.get("analyzer") or {}).get("gpuHourPrice")
    if spent.get("sparesSince") is not None:
        hours = float(spent.get("spareGpuSeconds", 0.0)) / 3600
        priced = f", cost {hours * float(price):.2f}" if price else ""
        cost = f" ({hours:.2f} GPU-hours{priced})" if hours else ""
        yield "Spares", f"{spent.get('spares', 0)}, held for {human_duration(spent.get('spareSeconds', 0.0))}{cost}"
    for entry in status.get("takeovers", ()):
        yield "Former spare", f"{entry['pod']} is worker {entry['worker']}"


def _size(spec: Mapping[str, Any], status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield model replicas of a gang that has lacked nodes, and what it has trained without so far."""
    size, spent = status.get("gangSize"), status.get("timeSpent") or {}
    if size is not None:
        full = spec.get("parallelism", {}).get("data")
        whole = "" if full is None else f" of {full}"
        yield "Replicas", f"{size['data']}{whole} since attempt {size['sinceAttempt']}"
    if spent.get("absentSince") is not None:
        hours = float(spent.get("absentGpuSeconds", 0.0)) / 3600
        cost = f" ({hours:.2f} GPU-hours)" if hours else ""
        lacking = human_duration(spent.get("absentSeconds", 0.0))
        yield "Absent workers", f"{spent.get('absent', 0)}, missed for {lacking}{cost}"


def _forward_backward(state: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """Yield mode and ratio of MegaFBD, its times, and its advice; nothing without MegaFBD."""
    if state is None:
        return
    size = state.get("shipBytes", 0) / 2**20
    why = ", chosen by measured times" if state.get("chosen") else ""
    served = "a tensor group" if state.get("merged") else f"{state.get('backwardPerForward', 1)} backward"
    yield "MegaFBD", f"ships {SHIPPED[state['ship']]}{why} ({size:.1f} MiB a microbatch), {served} per forward rank"
    names = (("forward", "forwardSeconds"), ("backward", "backwardSeconds"), ("shipping", "shipSeconds"))
    times = [f"{name} {1e3 * state[key]:.1f} ms" for name, key in names if state.get(key) is not None]
    if times:
        yield "MegaFBD times", f"{', '.join(times)} per microbatch"
    if state.get("advice"):
        yield "MegaFBD advice", state["advice"]


def _roles(status: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the row about the ranks of MegaFBD."""
    ranks = status.get("fbd")
    if ranks is not None:
        served = ranks["backwardPerForward"]
        shared = f", one forward rank for {served} replicas" if served > 1 else ""
        counts = f"{ranks['forwardRanks']} forward, {ranks['backwardRanks']} backward"
        yield "Ranks", f"{counts}, data-parallel size {status.get('dataParallelSize', NONE)}{shared}"


def _pairs(pairs: Pairs) -> Iterator[str]:
    width = max(len(name) for name, _ in pairs) + 3
    return (f"{name + ':':<{width}}{to_single_line(value)}" for name, value in pairs)


def _section(title: str, rows: list[list[str]]) -> Iterator[str]:
    yield f"{title}:" if len(rows) > 1 else f"{title}:  {NONE}"
    if len(rows) > 1:
        yield from (f"  {line}" for line in format_table(rows).splitlines())


def _conditions(status: dict[str, Any]) -> Iterator[str]:
    rows = [["TYPE", "STATUS", "AGE", "REASON", "MESSAGE"]]
    for condition in status.get("conditions", ()):
        rows.append(
            [
                condition["type"],
                condition["status"],
                age(condition["lastTransitionTime"]),
                condition["reason"],
                condition["message"],
            ]
        )
    return _section("Conditions", rows)


def _workers(status: dict[str, Any]) -> Iterator[str]:
    workers = status.get("rankTable", {}).get("workers", ())
    has_roles = any(worker.get("roles") for worker in workers)
    rows = [["WORKER", "NODE", "ADDRESS", "RANKS", *(["ROLES"] if has_roles else [])]]
    for worker in workers:
        ranks = ",".join(map(str, worker["ranks"]))
        roles = [",".join(worker.get("roles", ()))] if has_roles else []
        rows.append([str(worker["index"]), worker["node"], worker["address"], ranks, *roles])
    return _section("Rank table", rows)


def _slow_ranks(status: dict[str, Any]) -> Iterator[str]:
    rows = [["SUBJECT", "CAUSE", "STATE", "GPU-HOURS", "COST", "SENTENCE"]]
    for verdict in status.get("slowRanks", ()):
        subject = f"{verdict['subject']['type']} {','.join(map(str, verdict['subject']['ranks']))}"
        effect = verdict.get("effect", {})
        lost = [number(effect.get(name), "g") for name in ("gpuHours", "cost")]
        rows.append([subject, verdict["cause"], verdict["state"], *lost, verdict["sentence"]])
    return _section("Slow ranks", rows)


def _slow_nodes(status: dict[str, Any]) -> Iterator[str]:
    rows = [["NODE", "RANKS", "CAUSES", "AGE", "GPU-HOURS", "COST"]]
    for slow in status.get("slowNodes", ()):
        names = [",".join(map(str, slow.get(field, ()))) or NONE for field in ("ranks", "causes")]
        lost = [number(slow.get(field), "g") for field in ("gpuHours", "cost")]
        rows.append([slow["node"], *names, age(slow.get("since")), *lost])
    return _section("Slow nodes", rows)


def _failures(status: dict[str, Any]) -> Iterator[str]:
    rows = [["ATTEMPT", "AGE", "ACTION", "REASON", "MESSAGE"]]
    for failure in status.get("failures", ()):
        rows.append(
            [
                str(failure["attempt"]),
                age(failure["time"]),
                failure["action"],
                failure["reason"],
                _line(failure["message"]),
            ]
        )
    return _section("Failures", rows)


def _events(events: list[dict[str, Any]]) -> Iterator[str]:
    rows = [["TYPE", "REASON", "AGE", "MESSAGE"]]
    for event in events[-EVENTS_SHOWN:]:
        rows.append([event["type"], event["reason"], age(event["time"]), _line(event["message"])])
    return _section("Events", rows)


def _line(text: str) -> str:
    """Return the first line of a message: a table has no space for the rest."""
    return text.splitlines()[0] if text else ""
