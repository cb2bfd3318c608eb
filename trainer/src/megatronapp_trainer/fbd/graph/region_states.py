"""Random states of regions that backward computes again: megatron-core keeps them in the graph, not in a slot of it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch


class RegionStates(NamedTuple):
    """States with which a checkpointed region began: of the host, the device, and megatron-core's tracker by name."""

    host: torch.Tensor
    device: torch.Tensor | None
    tracker: dict[str, torch.Tensor]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return all states in an order that depends on their names alone."""
        device = [] if self.device is None else [self.device]
        return [self.host, *device, *(self.tracker[name] for name in sorted(self.tracker))]

    def replaced(self, tensors: list[torch.Tensor]) -> "RegionStates":
        """Return states of the same form with other values, which are in the order of `tensors`."""
        values = iter(tensors)
        host = next(values)
        device = None if self.device is None else next(values)
        return RegionStates(host, device, {name: next(values) for name in sorted(self.tracker)})


class _Marker:
    """Takes the place of a region's states in a graph that runs backward with the states of many passes."""

    def __init__(self, resolve: Callable[[], RegionStates]) -> None:
        self.resolve = resolve


def region_check() -> Callable[[], bool]:
    """Return a function that says whether a checkpointed region runs forward, or is recomputed.

    megatron-core's layers enable gradients for some of their parts even there. What these save in a forward pass
    belongs to a graph that is dropped at the end of the region.
    """
    from megatron.core.tensor_parallel import random

    check: Callable[[], bool] = random.is_checkpointing
    return check


@contextlib.contextmanager
def region_states_recorded(states: list[RegionStates]) -> Iterator[None]:
    """Add the states of each checkpointed region that begins within the context."""
    from megatron.core.tensor_parallel import random

    get = random._get_all_rng_states

    def record() -> Any:  # noqa: ANN401 - megatron-core's
        found = get()
        host, device, tracker = found
        states.append(RegionStates(host.clone(), device, dict(tracker)))
        return found

    random._get_all_rng_states = record
    try:
        yield
    finally:
        random._get_all_rng_states = get


@contextlib.contextmanager
def region_states_marked(states_of: Callable[[int], RegionStates], learned: list[RegionStates]) -> Iterator[None]:
    """Let regions that begin within the context take their states from `states_of(number)` when they run backward.

    Adds the states that they would have kept to `learned`.
    """
    from megatron.core.tensor_parallel import random

    get = random._get_all_rng_states
    _install_resolver(random)

    def mark() -> Any:  # noqa: ANN401 - megatron-core's
        number = len(learned)
        host, device, tracker = get()
        learned.append(RegionStates(host.clone(), device, dict(tracker)))
        return _Marker(lambda: states_of(number)), None, None

    random._get_all_rng_states = mark
    try:
        yield
    finally:
        random._get_all_rng_states = get


def _install_resolver(random: Any) -> None:  # noqa: ANN401 - module of megatron-core
    """Let megatron-core set states through a marker; once in a process."""
    put = random._set_all_rng_states
    if getattr(put, "resolves_markers", False):
        return

    def resolve(*states: Any) -> None:  # noqa: ANN401 - megatron-core's
        put(*(states[0].resolve() if isinstance(states[0], _Marker) else states))

    resolve.resolves_markers = True  # type: ignore[attr-defined]
    random._set_all_rng_states = resolve
