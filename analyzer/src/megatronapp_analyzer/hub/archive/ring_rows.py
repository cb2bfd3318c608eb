"""Rows of the archive's table of rings, from the headers of RING frames."""

import json
from collections.abc import Mapping
from typing import Any

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.hub.ingest.ingest import RingKey
from megatronapp_analyzer.hub.ingest.ring_metadata import RankRing, parse_ring


def ring_rows(attempt: int, rings: Mapping[RingKey, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each ring; a ring whose metadata is malformed has its header alone."""
    return [
        {"attempt": attempt, "rank": rank, "worker": worker, "header": json.dumps(header), **_columns(attempt, header)}
        for (worker, rank), header in rings.items()
    ]


def _columns(attempt: int, header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that are parts of the header."""
    if header.get("rank") is None:
        metadata = header.get("metadata")
        node = metadata.get("node") if isinstance(metadata, Mapping) else None
        boot_id = header.get("bootId")
        return {
            "node": node if isinstance(node, str) else None,
            "boot_id": boot_id if isinstance(boot_id, str) else None,
        }
    try:
        return _of_rank(parse_ring(attempt, header))
    except ProtocolError:
        return {}


def _of_rank(ring: RankRing) -> dict[str, Any]:
    place = ring.coordinates
    return {
        "node": ring.node,
        "local_rank": ring.local_rank,
        "role": ring.role.value,
        "tp": place.tp,
        "cp": place.cp,
        "ep": place.ep,
        "dp": place.dp,
        "pp": place.pp,
        "device": ring.device,
        "boot_id": ring.boot_id,
        "comms": [
            {"slot": slot, "kind": comm.kind, "members": list(comm.members)} for slot, comm in ring.comms.items()
        ],
    }
