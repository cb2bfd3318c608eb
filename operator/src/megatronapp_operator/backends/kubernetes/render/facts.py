"""Facts that all pods of a job depend on, computed once for its thousand workers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Generic, TypeVar

from megatronapp_common.job import MegatronJob, World, megatron_arguments
from megatronapp_common.text.run_length import format_run_lengths

T = TypeVar("T")
R = TypeVar("R")
REMEMBERED = 64
"""Jobs whose facts and template digests are cached."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RenderFacts:
    """Sizes and arguments of a job."""

    world: World
    arguments: tuple[str, ...]
    """Flags of its ranks."""
    proc_per_node: str
    """Ranks of each worker, in the format of `format_run_lengths`."""


class IdentityKey(Generic[T]):
    """Key by identity for an immutable value without a hash. It references the value, so its id is not reused."""

    def __init__(self, value: T) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def cached_by_identity(function: Callable[[T], R]) -> Callable[[T], R]:
    """Cache the results of a function for the newest values, by identity."""
    remembered = functools.lru_cache(maxsize=REMEMBERED)(lambda same: function(same.value))
    return functools.wraps(function)(lambda value: remembered(IdentityKey(value)))


@cached_by_identity
def facts_of(job: MegatronJob) -> RenderFacts:
    """Return the facts of a job. Raises JobError if its numbers do not agree."""
    world = job.world
    return RenderFacts(
        world=world,
        arguments=tuple(megatron_arguments(job)),
        proc_per_node=format_run_lengths(world.proc_per_node),
    )
