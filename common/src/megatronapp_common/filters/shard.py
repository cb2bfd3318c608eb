"""The header `merge` of a tensor of states (docs/scope-protocol.md, section 5): its shard, and its reducer.

Where a pixel is on several ranks, each sends the state of its shard; the receiver of all of them compiles the same
plan.
"""

import functools
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatronapp_common.errors import FilterError, FrameError, ReductionPlanError
from megatronapp_common.filters.expression import MAX_CHARACTERS
from megatronapp_common.filters.reducers import parse_reducer
from megatronapp_common.filters.shard_plan import ReductionPlan, compile_reduction_plan

MAX_WIDTH = 1 << 24
MAX_SHARDS = 1024
MERGE = "merge"
"""Key in a tensor's header."""


class Shard(BaseModel):
    """One shard of a vector whose pixels consist of several. Fields of a newer peer are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    reducer: Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]
    """Text of the reducer (docs/expressions.md)."""
    width: Annotated[int, Field(ge=2, le=MAX_WIDTH)]
    """Number of elements of the whole vector."""
    pixels: Annotated[int, Field(ge=1, lt=MAX_SHARDS)]
    shards: Annotated[int, Field(ge=2, le=MAX_SHARDS)]
    shard: Annotated[int, Field(ge=0, lt=MAX_SHARDS)]
    """Index of the shard, in the order of the vector."""

    @model_validator(mode="after")
    def _is_known_shard(self) -> Self:
        if self.pixels >= self.shards or self.shard >= self.shards:
            raise ValueError(f"shard {self.shard} of {self.shards} makes no part of {self.pixels} pixels")
        return self

    @property
    def plan(self) -> ReductionPlan:
        """Plan by which the shards merge. Raises ReductionPlanError and FilterError, but not after `parse_shard`."""
        return _plan(self.reducer, self.width, self.pixels, self.shards)

    def dump(self) -> dict[str, Any]:
        """Return the value for a header."""
        return {MERGE: self.model_dump()}


def parse_shard(given: object) -> Shard:
    """Read a header's `merge`, with a plan that merges. Raises FrameError for any other value."""
    try:
        found = Shard.model_validate(given)
        assert found.plan.merged
        return found
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, (MERGE, *first["loc"])))
        raise FrameError(f"{place}: {first['msg'][:200]}") from error
    except (FilterError, ReductionPlanError) as error:
        raise FrameError(f"{MERGE}: {error}") from error


@functools.lru_cache(maxsize=256)
def _plan(reducer: str, width: int, pixels: int, shards: int) -> ReductionPlan:
    return compile_reduction_plan(parse_reducer(reducer), width=width, pixels=pixels, shards=shards)
