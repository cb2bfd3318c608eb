"""What all pods of a job follow from, worked out once for its thousand workers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Generic, TypeVar

from megatronapp_common.job import MegatronJob, World, megatron_arguments
from megatronapp_common.text.run_length import format_run_lengths

T = TypeVar("T")
R = TypeVar("R")
REMEMBERED = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RenderFacts:
    """Numbers and words of a job."""

    world: World
    arguments: tuple[str, ...]
    """Flags of its ranks."""
    proc_per_node: str
    """Ranks of each worker, as `counts` writes them."""


class IdentityKey(Generic[T]):
    """A key by identity for a value that never changes but has no hash. It keeps the value, and so its identity."""

    def __init__(self, value: T) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def cached_by_identity(function: Callable[[T], R]) -> Callable[[T], R]:
    """The function, remembering its results for the newest values."""
    remembered = functools.lru_cache(maxsize=REMEMBERED)(lambda same: function(same.value))
    return functools.wraps(function)(lambda value: remembered(IdentityKey(value)))


@cached_by_identity
def facts_of(job: MegatronJob) -> RenderFacts:
    """The facts of a job. Raises JobError if its numbers do not agree."""
    world = job.world
    return RenderFacts(
        world=world,
        arguments=tuple(megatron_arguments(job)),
        proc_per_node=format_run_lengths(world.proc_per_node),
    )
