"""Treatment of pinned heads on each rank."""

from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.scope.capture.rank_shard import pins_of

PINS = st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=16)


@given(PINS, st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]))
def test_every_rank_of_a_tensor_group_counts_alike(requested: set[tuple[int, int]], tensor: int, pipeline: int) -> None:
    stages = [(stage * 8 // pipeline, (stage + 1) * 8 // pipeline) for stage in range(pipeline)]
    shards = [(shard * 8 // tensor, (shard + 1) * 8 // tensor) for shard in range(tensor)]
    found = [[pins_of(requested, layers=layers, heads=heads) for heads in shards] for layers in stages]
    assert sorted(pin for stage in found for pins, _ in stage for pin in pins) == sorted(requested)
    for stage in found:
        assert {most for _, most in stage} == {max(len(pins) for pins, _ in stage)}
