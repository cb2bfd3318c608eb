"""Headers of tensors of states: they are read back unchanged, and any other header is refused."""

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.errors import FrameError
from megatronapp_common.filters.reducers import NAMES
from megatronapp_common.filters.shard import MAX_SHARDS, MERGE, Shard, parse_shard
from megatronapp_common.filters.shard_plan import run

GOOD: dict[str, Any] = {"reducer": "std", "width": 64, "pixels": 1, "shards": 4, "shard": 3}
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.integers(), max_size=2)
)


@given(st.sampled_from([name for name in NAMES if name != "histogram"]), st.sampled_from([2, 4, 8, 24]), st.data())
def test_what_is_read_is_what_was_written(name: str, shards: int, draw: st.DataObject) -> None:
    pixels = draw.draw(st.sampled_from([count for count in range(1, shards) if shards % count == 0]))
    shard = Shard(reducer=name, width=4 * shards, pixels=pixels, shards=shards, shard=draw.draw(st.integers(0, 1)))
    assert parse_shard(json.loads(json.dumps(shard.dump()))[MERGE]) == shard
    bounds = shard.plan.shard_bounds
    owned = [shard.plan.shard_pixels(index) for index in range(shards)]
    pixels_of_shards = [list(range(first, end)) for first, end in itertools.pairwise(bounds)]
    assert pixels_of_shards == [[index for index in range(shards) if pixel in owned[index]] for pixel in range(pixels)]
    data = np.arange(4.0 * shards)
    parts = [run(shard.plan.program(index), chunk) for index, chunk in enumerate(np.split(data, shards))]
    assert all(part.shape == (1, shard.plan.columns) for part in parts)
    assert shard.plan.combine(parts).shape == (pixels, shard.plan.values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shards": 4, "pixels": 4}, "makes no part of 4 pixels"),
        ({"shard": 4}, "shard 4 of 4"),
        ({"shards": MAX_SHARDS + 1}, "merge.shards: Input should be less"),
        ({"width": 1 << 40}, "merge.width: Input should be less"),
        ({"width": 62}, "no 4 equal shards"),
        ({"pixels": 3}, "falls inside a pixel"),
        ({"reducer": "data[0]"}, "an element cannot be taken"),
        ({"reducer": "__import__('os')"}, "merge: column 1"),
        ({"reducer": "data.mean()" + " " * 500}, "merge.reducer: String should have at most"),
        ({"shard": True}, "merge.shard: Input should be a valid integer"),
        ({"shard": -1}, "merge.shard"),
    ],
)
def test_what_cannot_merge_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FrameError, match=message):
        parse_shard(GOOD | change)


@given(st.one_of(ODD, st.dictionaries(st.sampled_from([*GOOD, "other"]), ODD)))
def test_any_header_is_parsed_or_refused(header: Any) -> None:
    for document in (header, GOOD | header if isinstance(header, dict) else header):
        try:
            assert parse_shard(document).plan.merged
        except FrameError as error:
            assert str(error).startswith(MERGE) and len(str(error)) < 400
