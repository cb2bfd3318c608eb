"""Reading the Chrome JSON that `megatronapp trace export` writes."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatronapp_analyzer.errors import ImportTraceError
from megatronapp_analyzer.hub.export.tracks import ARROW_CATEGORY
from megatronapp_analyzer.model import Communicator
from megatronapp_analyzer.offline.job import Details, RankRecords, RecordedJob, RecordedRank, check_world
from megatronapp_common.text.ranges import parse_ranges
from megatronapp_common.topology import Coordinates
from megatronapp_common.trace import P2P_KINDS, Flag, PassFlag, RecordKind

_RANK = re.compile(r"rank (\d+) \(pp (\d+), dp (\d+), tp (\d+)\) (host|device|transfers)(?: \d+)?")
_WORKER = re.compile(r"worker \d+ on (.+)")
_KINDS: Mapping[str, RecordKind] = {kind.name.lower(): kind for kind in RecordKind}
_FLAGS: Mapping[str, int] = {
    "early": PassFlag.EARLY,
    "injected": Flag.INJECTED,
    "skippedUpdate": Flag.SKIPPED_UPDATE,
}
_SENT = frozenset({RecordKind.SEND_POST, RecordKind.SEND_WAIT})


def read_exported(document: Mapping[str, Any], name: str) -> RecordedJob:
    """Read an exported trace. Raises ImportTraceError for one of MegaFBD, or with events that it cannot have."""
    events: Sequence[Any] = document["traceEvents"]
    tracks = {
        (event["pid"], event["tid"]): found
        for event in events
        if event["ph"] == "M"
        and event["name"] == "thread_name"
        and (found := _RANK.fullmatch(event["args"]["name"])) is not None
    }
    if not tracks:
        raise ImportTraceError(f"{name} has no track of a rank; traces of MegaFBD and of older releases are not read")
    nodes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    records = {int(found[1]): RankRecords(int(found[1])) for found in tracks.values()}
    attempt = max((event["args"]["attempt"] for event in events if event["ph"] == "X"), default=0)
    for number, event in enumerate(events):
        if event["ph"] != "X" or event.get("cat") == ARROW_CATEGORY or event["args"]["attempt"] != attempt:
            continue
        track = tracks.get((event["pid"], event["tid"]))
        kind = _KINDS.get(event["name"].partition(" ")[0])
        if track is None or kind is None:
            raise ImportTraceError(f"{name}: event {number} ({event['name']!r}) is of no rank and kind of a record")
        _add(records[int(track[1])], kind, event, on_device=track[5] == "device")
    ranks = [
        RecordedRank(
            rank=int(found[1]),
            coordinates=Coordinates(tp=int(found[4]), cp=0, ep=0, dp=int(found[3]), pp=int(found[2])),
            worker=process,
            local_rank=0,
            node=_node(nodes.get(process, "")),
            device="cpu",
            communicators=list(records[int(found[1])].communicators),
            records=records[int(found[1])].array(),
        )
        for _, (process, found) in sorted({int(track[1]): (at[0], track) for at, track in tracks.items()}.items())
    ]
    return _job(ranks, document, name)


def _add(records: RankRecords, kind: RecordKind, event: Mapping[str, Any], *, on_device: bool) -> None:
    arguments = event["args"]
    start_ns = int(event["ts"] * 1000)
    times = start_ns, start_ns + int(event["dur"] * 1000)
    batch = event["name"].partition(" ")[2]
    queue, lead = arguments.get("runQueueUs"), arguments.get("launchLeadUs")
    details = Details(
        microbatch=int(batch) if batch else None,
        chunk=arguments["chunk"],
        size_bytes=arguments.get("bytes"),
        run_queue_ns=None if queue is None else int(queue * 1000),
        lead_ns=None if lead is None else int(lead * 1000),
        ordinal=arguments.get("ordinal", 0),
        on_device=on_device,
        flags=sum(flag for name, flag in _FLAGS.items() if arguments.get(name)),
    )
    if kind in P2P_KINDS | {RecordKind.COPY} and "peer" in arguments:
        pair = (records.rank, arguments["peer"]) if kind in _SENT else (arguments["peer"], records.rank)
        records.numbered(kind, arguments["step"], times, Communicator("p2p", pair), details)
    elif "group" in arguments:
        name, _, members = arguments["group"].partition(" ")
        records.numbered(kind, arguments["step"], times, Communicator(name, parse_ranges(members)), details)
    else:
        records.add(kind, arguments["step"], times, details)


def _node(process: str) -> str:
    found = _WORKER.fullmatch(process)
    return found[1] if found else "unknown"


def _job(ranks: Sequence[RecordedRank], document: Mapping[str, Any], name: str) -> RecordedJob:
    places = [rank.coordinates for rank in ranks]
    sizes = {
        "tensor": max(at.tp for at in places) + 1,
        "pipeline": max(at.pp for at in places) + 1,
        "data": max(at.dp for at in places) + 1,
    }
    world = max(sizes["tensor"] * sizes["pipeline"] * sizes["data"], *(rank.rank + 1 for rank in ranks))
    chunks = max(int(rank.records["chunk"].max(initial=0)) for rank in ranks) + 1
    notes = check_world([rank.rank for rank in ranks], world, name)
    return RecordedJob(
        source=name,
        layout=sizes | {"virtualPipeline": chunks},
        world=world,
        ranks=ranks,
        real_offset_ns=int(document["metadata"]["originRealTimeNs"]),
        notes=notes,
    )
