"""Orders of the two roles: each pass once, in the order of the static schedule. Numbers of messages and commands."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.config import ShipMode
from megatronapp_trainer.fbd.channels.commands import VERSIONS, Command, Order, Split
from megatronapp_trainer.fbd.channels.messages import MessageKey, MessageKind
from megatronapp_trainer.fbd.orders import Pass, backward_order, forward_order
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
        st.integers(0, VERSIONS - 1),
    )
)
def test_orders_are_numbers_of_64_bits(order: Order) -> None:
    assert 0 <= order.pack() < 1 << 64
    assert Order.unpack(order.pack()) == order


def test_a_key_that_does_not_fit_is_refused() -> None:
    from megatronapp_trainer.errors import TransferError

    with pytest.raises(TransferError, match="12 bits cannot hold 4096"):
        MessageKey(MessageKind.SAVED, 0, part=4096).pack()
