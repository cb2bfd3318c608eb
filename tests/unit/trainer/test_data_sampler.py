"""Samples are shared among replicas without gaps or repeats, also when their number changes."""

from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.data.sampler import SampleOrder


def taken(consumed: int, microbatches: int, micro_batch_size: int, replicas: int, size: int = 10**9) -> list[int]:
    """Return the samples that all replicas take in this number of microbatches, in order."""
    samplers = [
        SampleOrder(
            consumed_samples=consumed,
            micro_batch_size=micro_batch_size,
            data_rank=rank,
            data_size=replicas,
            size=size,
        )
        for rank in range(replicas)
    ]
    return [index for step in range(microbatches) for sampler in samplers for index in sampler.indices(step)]


small = st.integers(1, 6)


@given(consumed=st.integers(0, 1000), microbatches=small, micro_batch_size=small, replicas=small)
def test_replicas_split_the_next_samples(
    consumed: int, microbatches: int, micro_batch_size: int, replicas: int
) -> None:
    expected = range(consumed, consumed + microbatches * micro_batch_size * replicas)
    assert taken(consumed, microbatches, micro_batch_size, replicas) == list(expected)


@given(first=small, second=small, micro_batch_size=small, microbatches=small)
def test_a_resume_with_other_replicas_continues_after_the_last_sample(
    first: int, second: int, micro_batch_size: int, microbatches: int
) -> None:
    before = taken(0, microbatches, micro_batch_size, first)
    after = taken(len(before), microbatches, micro_batch_size, second)
    assert before + after == list(range(len(before) + len(after)))


def test_the_order_starts_again_after_the_last_sample() -> None:
    assert taken(0, 3, 2, 1, size=4) == [0, 1, 2, 3, 0, 1]


def test_an_evaluation_starts_again_though_the_data_is_longer() -> None:
    sampler = SampleOrder(consumed_samples=0, micro_batch_size=2, data_rank=0, data_size=1, size=100, restart_after=4)
    assert [sampler.indices(step) for step in range(4)] == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_an_evaluation_longer_than_its_data_repeats_it_within() -> None:
    sampler = SampleOrder(consumed_samples=0, micro_batch_size=2, data_rank=0, data_size=1, size=3, restart_after=4)
    assert [sampler.indices(step) for step in range(4)] == [[0, 1], [2, 0], [0, 1], [2, 0]]
