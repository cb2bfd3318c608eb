"""The ranks that publish, which part of the model each has, and the model as rank 0 describes it. Pure."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.scope.parts.step_assembler import number
from megatronapp_analyzer.scope.schemas import NamedPerturbation
from megatronapp_common.scope.perturbation.recipe import MAX_NAMED
from megatronapp_common.scope.protocol_requests import MAX_PROMPTS, MAX_TOKENS

SIZES = ("layers", "hidden", "heads", "keyHeads", "headWidth", "mlpWidth", "vocabulary", "maxLength")
POSITIONS = frozenset({"learned", "rotary", "none"})
MAX_SIZE = 1 << 24
MAX_LAYERS = 4096
MAX_SITES = 256
MOST = {"prompts": MAX_PROMPTS, "tokens": MAX_TOKENS}
"""Limits of any run, even if the model could take more."""
_RECIPES = TypeAdapter(Annotated[list[NamedPerturbation], Field(max_length=MAX_NAMED)])
LEADER = 0
"""The rank that takes runs."""
UNKNOWN = -1
"""Number in place of a rank that has not begun."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankPublisher:
    """A rank that publishes. `replica` is its data-parallel coordinate: only replica 0 is shown."""

    rank: int
    attempt: int
    worker: int
    tp: int
    pp: int
    replica: int
    layers: tuple[int, int] | None
    """First layer, and the end of the range; None if the rank does not report it."""
    heads: tuple[int, int] | None

    def shard(self) -> dict[str, Any]:
        """Return its part of the model, as SCOPE_HELLO has it."""
        share = {"rank": self.rank, "stage": self.pp, "tensor": self.tp}
        return share | {"layers": list(self.layers or ()), "heads": list(self.heads or ())}


def parse_publisher(header: Mapping[str, Any], worker: int) -> RankPublisher:
    """Parse a PUBLISHER frame. Raises ProtocolError."""
    coordinates = header.get("coordinates")
    if not isinstance(coordinates, dict):
        raise ProtocolError("bad-publisher", "PUBLISHER frame: coordinates is not a map")
    return RankPublisher(
        rank=number(header, "rank"),
        attempt=number(header, "attempt"),
        worker=worker,
        tp=number(coordinates, "tp"),
        pp=number(coordinates, "pp"),
        replica=number(coordinates, "dp"),
        layers=_span(header, "layers"),
        heads=_span(header, "heads"),
    )


def _span(header: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    said = header.get(name)
    if said is None:
        return None
    if not (isinstance(said, list) and [type(bound) for bound in said] == [int, int] and 0 <= said[0] <= said[1]):
        raise ProtocolError("bad-publisher", f"PUBLISHER frame: {name} is not a first one and an end")
    return min(said[0], MAX_SIZE), min(said[1], MAX_SIZE)


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


def parse_layout(layout: object) -> dict[str, int] | None:
    """How the model is spread, if a PUBLISHER frame says so. Raises ProtocolError."""
    if layout is None:
        return None
    if not isinstance(layout, dict):
        raise ProtocolError("bad-publisher", "PUBLISHER frame: layout is not a map")
    return {name: max(1, number(layout, name)) for name in ("tensor", "pipeline")}


def parse_limits(limits: object) -> dict[str, int] | None:
    """Most prompts of a run and most new tokens of each, if a PUBLISHER frame says so. Raises ProtocolError."""
    if limits is None:
        return None
    if not isinstance(limits, dict):
        raise ProtocolError("bad-publisher", "PUBLISHER frame: limits is not a map")
    return {name: min(most, number(limits, name)) for name, most in MOST.items()}


def parse_perturbations(recipes: object) -> list[dict[str, Any]] | None:
    """Recipes that requests can name, if a PUBLISHER frame lists them. Raises ProtocolError."""
    if recipes is None:
        return None
    try:
        return [entry.model_dump() for entry in _RECIPES.validate_python(recipes)]
    except ValidationError as error:
        raise ProtocolError("bad-publisher", "PUBLISHER frame: perturbations is not a list of recipes") from error


def _names(sites: object) -> set[str]:
    if not isinstance(sites, list) or len(sites) > MAX_SITES or not all(isinstance(name, str) for name in sites):
        raise ProtocolError("bad-publisher", f"PUBLISHER frame: sites is not a list of at most {MAX_SITES} names")
    return {site for site in sites if 1 <= len(site) <= 64}


class PublisherRegistry:
    """The ranks of the newest attempt."""

    def __init__(self) -> None:
        self.attempt = -1
        self.ranks: dict[int, RankPublisher] = {}
        self.model: dict[str, Any] | None = None
        self.layout: dict[str, Any] = {"tensor": 1, "pipeline": 1}
        self.limits = dict(MOST)
        self.sites: set[str] = set()
        self.perturbations: list[dict[str, Any]] = []
        """Name, digest and state of each recipe that requests can name."""

    def begin(self, attempt: int) -> bool:
        """Begin an attempt if it is newer, and return whether it is."""
        if attempt <= self.attempt:
            return False
        self.attempt, self.ranks = attempt, {}
        return True

    def add(self, header: Mapping[str, Any], worker: int) -> None:
        """Add a rank, or update it. Raises ProtocolError."""
        publisher, model = parse_publisher(header, worker), parse_model(header.get("model"))
        if publisher.attempt < self.attempt:
            return
        self.begin(publisher.attempt)
        self.ranks[publisher.rank] = publisher
        self.model = model or self.model
        self.sites |= _names(header.get("sites"))
        self.layout = parse_layout(header.get("layout")) or self.layout
        self.limits = parse_limits(header.get("limits")) or self.limits
        recipes = parse_perturbations(header.get("perturbations"))
        self.perturbations = self.perturbations if recipes is None else recipes

    def remove(self, attempt: int, worker: int, rank: int | None = None) -> list[int]:
        """Remove the ranks of a worker, or one of them; return those that were known."""
        if attempt != self.attempt:
            return []
        gone = [
            known_rank
            for known_rank, found in self.ranks.items()
            if found.worker == worker and rank in {None, known_rank}
        ]
        for known_rank in gone:
            del self.ranks[known_rank]
        return gone

    def reported_layout(self) -> dict[str, Any]:
        """Return the layout of the model, with the part of each rank of a replica once all have reported."""
        known = sorted(
            (publisher for publisher in self.ranks.values() if publisher.replica == 0),
            key=lambda publisher: publisher.rank,
        )
        if UNKNOWN in self.expected() or any(
            publisher.layers is None or publisher.heads is None for publisher in known
        ):
            return self.layout
        return self.layout | {"ranks": [publisher.shard() for publisher in known]}

    def expected(self) -> list[int]:
        """Return the ranks whose parts make a step, and UNKNOWN in place of those that have not begun.

        How many there are is known once rank 0 has begun.
        """
        known = [rank for rank, publisher in self.ranks.items() if publisher.replica == 0]
        whole = LEADER in known and len(known) >= self.layout["tensor"] * self.layout["pipeline"]
        return known if whole else [*known, UNKNOWN]
