"""Which ranks publish, what of the model each has, and the model as rank 0 tells it. Pure."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.hub.scope.steps import number

SIZES = ("layers", "hidden", "heads", "keyHeads", "headWidth", "mlpWidth", "vocabulary", "maxLength")
POSITIONS = frozenset({"learned", "rotary", "none"})
MAX_SIZE = 1 << 24
MAX_LAYERS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Publisher:
    """A rank that publishes. `replica` is its data-parallel coordinate: only replica 0 is shown."""

    rank: int
    attempt: int
    worker: int
    tp: int
    replica: int


def parse_publisher(header: Mapping[str, Any], worker: int) -> Publisher:
    """Who sends a PUBLISHER frame. Raises ProtocolError."""
    coordinates = header.get("coordinates")
    if not isinstance(coordinates, dict):
        raise ProtocolError("bad-publisher", "PUBLISHER frame: coordinates is not a map")
    return Publisher(
        rank=number(header, "rank"),
        attempt=number(header, "attempt"),
        worker=worker,
        tp=number(coordinates, "tp"),
        replica=number(coordinates, "dp"),
    )


def parse_model(model: object) -> dict[str, Any] | None:
    """The model that a PUBLISHER frame describes, if it does. Raises ProtocolError."""
    if model is None:
        return None
    if not isinstance(model, dict):
        raise ProtocolError("bad-publisher", "PUBLISHER frame: model is not a map")
    sizes = {name: number(model, name) for name in SIZES}
    if max(sizes.values()) > MAX_SIZE or sizes["layers"] > MAX_LAYERS or model.get("positions") not in POSITIONS:
        raise ProtocolError("bad-publisher", "PUBLISHER frame: no model has these sizes or positions")
    return sizes | {"gated": bool(model.get("gated")), "positions": model["positions"]}


class Publishers:
    """The ranks of the newest attempt."""

    def __init__(self) -> None:
        self.attempt = -1
        self.ranks: dict[int, Publisher] = {}
        self.model: dict[str, Any] | None = None
        self.layout = {"tensor": 1, "pipeline": 1}

    def add(self, header: Mapping[str, Any], worker: int) -> None:
        """A rank begins, or says again that it does. Raises ProtocolError."""
        publisher, model = parse_publisher(header, worker), parse_model(header.get("model"))
        if publisher.attempt < self.attempt:
            return
        if publisher.attempt > self.attempt:
            self.attempt, self.ranks = publisher.attempt, {}
        self.ranks[publisher.rank] = publisher
        self.model = model or self.model
        pipeline = header["coordinates"].get("pp", 0)
        self.layout = {
            "tensor": max(one.tp for one in self.ranks.values()) + 1,
            "pipeline": max(self.layout["pipeline"], pipeline + 1 if isinstance(pipeline, int) else 1),
        }

    def remove(self, attempt: int, worker: int) -> bool:
        """The agent of a worker went away; whether ranks went with it."""
        if attempt != self.attempt:
            return False
        gone = [rank for rank, one in self.ranks.items() if one.worker == worker]
        for rank in gone:
            del self.ranks[rank]
        return bool(gone)

    def expected(self) -> list[int]:
        """Ranks whose parts make a step."""
        return [rank for rank, one in self.ranks.items() if one.replica == 0]
