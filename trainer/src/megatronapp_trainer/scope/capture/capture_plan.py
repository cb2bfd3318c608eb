"""The plan of what is captured of decode steps, derived once while the same runs capture the same sites."""

import dataclasses
from collections.abc import Sequence

import torch

from megatronapp_common.scope.protocol_requests import CaptureSettings
from megatronapp_trainer.hooks.sites import Site
from megatronapp_trainer.scope.capture import probe
from megatronapp_trainer.scope.capture.capture_spec import CaptureSpec, PixelReductions
from megatronapp_trainer.scope.capture.rank_shard import RankShard, pins_of
from megatronapp_trainer.scope.capture.reductions import Reductions, active_sites
from megatronapp_trainer.scope.capture.tracked_requests import TrackedRequest


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CapturePlan:
    """State that decode steps share while the same runs capture the same sites."""

    tracked: tuple[TrackedRequest, ...]
    captures: tuple[CaptureSettings | None, ...]
    specs: tuple[CaptureSpec | None, ...]
    """The specification of each run, rebuilt on every rank when it changes."""
    recipes: tuple[CaptureSpec, ...]
    pixels: Sequence[PixelReductions]
    active_sites: frozenset[Site]
    """Sites that are hooked on any rank of the tensor group. Only they change the forward pass."""
    sites: dict[str, Site]
    picks: dict[str, torch.Tensor | None]
    pins: list[tuple[int, int]]
    most_pins: int
    """The largest number of pins on a rank of the tensor group."""
    groups: list[int]
    """The group of each run."""
    pinned: list[list[tuple[int, int, int]]]
    """Pins of each run: place among all pins, layer, head."""

    def matches(self, tracked: Sequence[TrackedRequest]) -> bool:
        """True if the same runs are tracked with unchanged captures."""
        return len(tracked) == len(self.tracked) and all(
            request is known and request.capture is capture and request.recipe is spec
            for request, known, capture, spec in zip(tracked, self.tracked, self.captures, self.specs, strict=True)
        )


def capture_plan_of(tracked: Sequence[TrackedRequest], reductions: Reductions, shard: RankShard) -> CapturePlan:
    """Derive the plan of these runs on one rank."""
    recipes = tuple(dict.fromkeys(request.recipe for request in tracked if request.recipe is not None))
    pins, most = _pins(tracked, shard)
    sites = sites_of(tracked, reductions)
    own_pins = [
        {(pin.layer, pin.head) for pin in request.capture.pinned} if request.capture else set() for request in tracked
    ]
    return CapturePlan(
        tracked=tuple(tracked),
        captures=tuple(request.capture for request in tracked),
        specs=tuple(request.recipe for request in tracked),
        recipes=recipes,
        pixels=[reductions.pixels_of(recipe) for recipe in recipes],
        active_sites=frozenset().union(*map(active_sites, recipes)),
        sites=sites,
        picks=dict.fromkeys(sites),
        pins=pins,
        most_pins=most,
        groups=[recipes.index(request.recipe) if request.recipe is not None else 0 for request in tracked],
        pinned=[[(place, *pin) for place, pin in enumerate(pins) if pin in own] for own in own_pins],
    )


def sites_of(tracked: Sequence[TrackedRequest], reductions: Reductions) -> dict[str, Site]:
    """Sites that these runs and probes need, by name."""
    sites: dict[str, Site] = {}
    for request in tracked:
        sites |= probe.sites_of(request.sites) if request.recipe is None else reductions.sites(request.recipe)
    return sites


def _pins(tracked: Sequence[TrackedRequest], shard: RankShard) -> tuple[list[tuple[int, int]], int]:
    captures = (request.capture for request in tracked if request.recipe is not None and request.recipe.attention)
    pins = {(pin.layer, pin.head) for capture in captures if capture is not None for pin in capture.pinned}
    return pins_of(pins, layers=shard.layers, heads=shard.heads)
