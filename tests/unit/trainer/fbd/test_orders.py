"""Orders of the two roles: each pass once, in the order of the static schedule, and no cycle of waits."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.config import ShipMode
from megatronapp_trainer.fbd.channels.commands import Command, Order, Split
from megatronapp_trainer.fbd.channels.messages import MessageKey, MessageKind
from megatronapp_trainer.fbd.orders import MOST_PENDING_WEIGHTS, Pass, backward_order, forward_order, places
from megatronapp_trainer.pipeline.planning.tasks import Placement

placements = st.builds(Placement, st.integers(1, 5), st.integers(1, 3))


@st.composite
def steps(draw: st.DrawFn) -> tuple[Placement, int]:
    """A pipeline and a number of microbatches that its static order takes."""
    placement = draw(placements)
    count = draw(st.integers(1, 4)) * placement.ranks if placement.chunks > 1 else draw(st.integers(1, 9))
    return placement, count


@given(steps())
def test_each_pass_runs_once_in_each_role(step: tuple[Placement, int]) -> None:
    placement, count = step
    expected = Counter(Pass(microbatch, chunk) for microbatch in range(count) for chunk in range(placement.chunks))
    for rank in range(placement.ranks):
        assert Counter(forward_order(placement, count, rank)) == expected
        assert Counter(backward_order(placement, count, rank)) == expected


@given(steps(), st.integers(1, 3), st.booleans(), st.data())
def test_no_step_ends_in_a_cycle_of_waits(
    step: tuple[Placement, int], replicas: int, splits: bool, data: st.DataObject
) -> None:
    """Ranks run in an order that is drawn, each as soon as its pass may; all passes run.

    A forward rank serves `replicas` pipelines of backward ranks in turns, with credits of each. With split backward
    passes a credit follows the weight gradients, of which few wait and may do so while another pass is able to run.
    """
    placement, count = step
    ranks = range(placement.ranks)
    forward = [
        [(next_pass, replica) for next_pass in forward_order(placement, count, rank) for replica in range(replicas)]
        for rank in ranks
    ]
    backward = {
        (rank, replica): list(backward_order(placement, count, rank)) for rank in ranks for replica in range(replicas)
    }
    credits = {key: places(placement, count, key[0]) for key in backward}
    weights = dict.fromkeys(backward, 0)
    ended: set[tuple[str, int, int, int]] = set()  # role, replica, microbatch, stage

    def may_run_forward(rank: int) -> bool:
        (next_pass, replica) = forward[rank][0]
        stage = placement.stage(rank, next_pass.chunk)
        arrived = stage == 0 or ("F", replica, next_pass.microbatch, stage - 1) in ended
        return arrived and credits[rank, replica] > 0

    def may_run_backward(rank: int, replica: int) -> bool:
        next_pass = backward[rank, replica][0]
        stage = placement.stage(rank, next_pass.chunk)
        arrived = stage == placement.stages - 1 or ("B", replica, next_pass.microbatch, stage + 1) in ended
        return arrived and ("F", replica, next_pass.microbatch, stage) in ended

    while any(forward) or any(backward.values()) or any(weights.values()):
        able = [("F", rank, 0) for rank in ranks if forward[rank] and may_run_forward(rank)]
        able += [
            ("B", *key)
            for key, left in backward.items()
            if left and weights[key] <= MOST_PENDING_WEIGHTS and may_run_backward(*key)
        ]
        able += [("W", *key) for key, pending in weights.items() if pending]
        assert able, "every rank waits for another one"
        role, rank, replica = data.draw(st.sampled_from(able))
        if role == "W":
            weights[rank, replica] -= 1
            credits[rank, replica] += 1
            continue
        if role == "F":
            next_pass, replica = forward[rank].pop(0)
            credits[rank, replica] -= 1
        else:
            next_pass = backward[rank, replica].pop(0)
            (weights if splits else credits)[rank, replica] += 1
        ended.add((role, replica, next_pass.microbatch, placement.stage(rank, next_pass.chunk)))


@given(
    st.builds(
        MessageKey,
        st.sampled_from(MessageKind),
        st.integers(0, (1 << 22) - 1),
        st.integers(0, (1 << 20) - 1),
        st.integers(0, 63),
        st.integers(0, 4095),
    )
)
def test_keys_are_numbers_of_64_bits(key: MessageKey) -> None:
    assert 0 <= key.pack() < 1 << 64
    assert MessageKey.unpack(key.pack()) == key


@given(
    st.builds(
        Order,
        st.sampled_from(Command),
        st.integers(0, (1 << 24) - 1),
        st.sampled_from(Split),
        st.booleans(),
        st.sampled_from(ShipMode),
    )
)
def test_orders_are_numbers_of_64_bits(order: Order) -> None:
    assert 0 <= order.pack() < 1 << 64
    assert Order.unpack(order.pack()) == order


def test_a_key_that_does_not_fit_is_refused() -> None:
    from megatronapp_trainer.errors import TransferError

    with pytest.raises(TransferError, match="12 bits cannot hold 4096"):
        MessageKey(MessageKind.SAVED, 0, part=4096).pack()
