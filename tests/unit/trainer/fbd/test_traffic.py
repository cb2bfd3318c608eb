"""Traffic of a step: known beforehand, equal on both ends of each channel, and checked by each of them."""

import pathlib
import re
import types
from collections.abc import Callable
from typing import Any

import pytest
from fbd_worlds import manifest_of, worlds
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.topology import FbdWorld, RankRole, Topology
from megatronapp_trainer.config.fbd import ShipMode
from megatronapp_trainer.errors import TransferError
from megatronapp_trainer.fbd.channels.commands import Command, Order
from megatronapp_trainer.fbd.channels.expected import (
    ExpectedTraffic,
    expected_traffic,
    refuse_other_traffic,
)
from megatronapp_trainer.fbd.channels.messages import MessageCounts, MessageKey, MessageKind, Traffic

RunRanks = Callable[..., list[Any]]
orders = st.builds(
    Order,
    st.sampled_from([Command.TRAIN, Command.EVALUATE]),
    st.integers(1, 6),
    sends_weights=st.booleans(),
    ship=st.just(ShipMode.SAVED),
)


@given(worlds(), st.integers(1, 3), orders)
def test_both_ends_of_each_channel_expect_the_same(world: FbdWorld, chunks: int, order: Order) -> None:
    chunks = chunks if world.trained.pipeline > 1 else 1
    traffic = [expected_traffic(manifest_of(world, rank, chunks), order) for rank in range(world.world_size)]
    sent: dict[Any, Traffic] = {}
    received: dict[Any, Traffic] = {}
    for rank, of_rank in enumerate(traffic):
        sent |= {(rank, peer, kind): found for (peer, kind), found in of_rank.sent.items() if found.messages}
        received |= {(peer, rank, kind): found for (peer, kind), found in of_rank.received.items() if found.messages}
    assert sent == received
    assert total(sent, MessageKind.GRADIENT) == boundaries(world, chunks, order, RankRole.BACKWARD)
    assert total(sent, MessageKind.ACTIVATION) == boundaries(world, chunks, order, RankRole.FORWARD)
    assert total(sent, MessageKind.SUMMARY) == (world.backward_ranks if order.command is Command.TRAIN else 0)


def total(traffic: dict[Any, Traffic], of_kind: MessageKind) -> int:
    return sum(found.messages for (_, _, kind), found in traffic.items() if kind is of_kind)


def boundaries(world: FbdWorld, chunks: int, order: Order, role: RankRole) -> int:
    """Messages between stages: one at each boundary of each pipeline, in each microbatch."""
    if role is RankRole.BACKWARD and order.command is not Command.TRAIN:
        return 0
    tensor = world.topology_of(role).tensor
    return (world.trained.pipeline * chunks - 1) * order.num_microbatches * world.trained.data * tensor


PAIR = FbdWorld(trained=Topology(), merged=False)
STEP = Order(Command.TRAIN, 4, sends_weights=True)


def counted(traffic: dict[tuple[int, MessageKind], Traffic]) -> MessageCounts:
    counts = MessageCounts()
    for (peer, kind), found in traffic.items():
        for index in range(found.messages):
            counts.add(peer, kind, found.bytes - index * (found.bytes // found.messages) if index == 0 else 0)
    return counts


def pair(rank: int) -> ExpectedTraffic:
    return expected_traffic(manifest_of(PAIR, rank, 1), STEP)


@given(st.sampled_from([0, 1]), st.booleans(), st.data())
def test_each_difference_is_an_error_that_names_kind_and_rank(rank: int, sent: bool, data: st.DataObject) -> None:
    expected = pair(rank).sent if sent else pair(rank).received
    refuse_other_traffic(counted(expected), expected, step=7, sent=sent)
    kind = data.draw(st.sampled_from([kind for (_, kind), found in expected.items() if found.messages]))
    due, peer = expected[1 - rank, kind], 1 - rank
    changed = {
        "missing": Traffic(due.messages - 1, due.bytes) if due.messages > 1 else Traffic(),
        "extra": Traffic(due.messages + 1, due.bytes),
        "other size": Traffic(due.messages, due.bytes + 1),
    }
    found = changed[data.draw(st.sampled_from(list(changed)))]
    direction = "sent to" if sent else "received from"
    message = rf"command 7: {found.messages} messages of {kind.name.lower()} with .* were {direction} rank {peer}, and "
    with pytest.raises(TransferError, match=message):
        refuse_other_traffic(counted({**expected, (peer, kind): found}), expected, step=7, sent=sent)


def test_a_kind_that_a_step_does_not_have_is_an_error() -> None:
    expected = pair(0).received
    counts = counted(expected)
    counts.add(1, MessageKind.GRADIENT, 8)
    with pytest.raises(TransferError, match="1 messages of gradient with 8 bytes were received from rank 1"):
        refuse_other_traffic(counts, expected, step=1, sent=False)


FAULTS = {
    "missing": "saved 2 of chunk 0, part 0, of command 2 from rank 1: receive from rank 1, key .* nothing within",
    "extra": r"MessageKey\(kind=<MessageKind.SAVED.*, item=9.* has arrived from rank 1",
    "resized": "saved 2 of chunk 0, part 0, of command 2 from rank 1: key .* has 60 bytes, and .* are 64",
}


@pytest.mark.torch
@pytest.mark.parametrize("fault", FAULTS)
def test_messages_that_a_forward_rank_does_not_owe_are_errors_of_the_receiver(
    run_ranks: RunRanks, tmp_path: pathlib.Path, fault: str
) -> None:
    environment = {"MEGATRONAPP_SHM_DIR": str(tmp_path)}
    (text, _) = run_ranks(2, exchanged, fault, environment=environment)
    assert re.search(FAULTS[fault], text)


def refusals() -> list[str]:
    """Return the errors for a credit too many, and for messages of another rank that need too many slots."""
    import dataclasses

    import torch

    from megatronapp_trainer.errors import UsageError
    from megatronapp_trainer.fbd.channels.agreement import agree
    from megatronapp_trainer.fbd.channels.plan import ChannelPlan
    from megatronapp_trainer.fbd.forward_rank import ForwardRank
    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

    credit = Order.credit(3, 1).pack()
    channel: Any = types.SimpleNamespace(
        sent=MessageCounts(), received=MessageCounts(), partners=(0,), next_number=lambda _partner: credit
    )
    forward_rank = ForwardRank.__new__(ForwardRank)
    forward_rank._step, forward_rank._channel = 1, channel
    with pytest.raises(TransferError) as redundant:
        forward_rank._next_order()
    plan = ChannelPlan(
        rank=5,
        unit=5,
        partners=(0,),
        leads=False,
        neighbours=(),
        activation=TensorSpec((64,), torch.uint8),
        control_bytes=64,
        shipment_bytes=64,
        shipments=8,
        deadline_s=1.0,
        device=None,
        threads=1,
    )
    exchange: Any = types.SimpleNamespace(gather=lambda *_: pytest.fail("no rank takes part in an exchange"))
    with pytest.raises(UsageError) as too_many:
        agree(dataclasses.replace(plan, control_slots=4097), exchange)
    return [str(redundant.value), str(too_many.value)]


@pytest.mark.torch
def test_a_credit_too_many_and_too_many_slots_are_refused_by_name(run_ranks: RunRanks) -> None:
    ((redundant, too_many),) = run_ranks(1, refusals)
    assert redundant.startswith("command 2: rank 0 gives a credit for microbatch 3, chunk 1, after those of all passes")
    assert "rank 5 needs room for 4097 messages of another rank at a time, and there are at most 4096" in too_many


def exchanged(fault: str) -> str:
    """Send four shipments from rank 1 to rank 0, with a fault; returns the error of rank 0."""
    import dataclasses
    import os

    import torch
    from torch._C._distributed_c10d import TCPStore

    from megatronapp_trainer.fbd.channels.agreement import agree
    from megatronapp_trainer.fbd.channels.channel import Channel
    from megatronapp_trainer.fbd.channels.plan import ChannelPlan
    from megatronapp_trainer.fbd.channels.start import StartExchange
    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

    rank = int(os.environ["RANK"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, is_master=rank == 0)
    spec = TensorSpec((64,), torch.uint8)
    plan = ChannelPlan(
        rank=rank,
        unit=1,
        partners=(1 - rank,),
        leads=rank == 0,
        neighbours=(),
        activation=spec,
        control_bytes=64,
        shipment_bytes=64,
        shipments=8,
        deadline_s=240.0,
        device=None,
        threads=1,
    )
    exchange = StartExchange(store, rank, 2, key=b"of this job")
    channel = Channel(plan, agree(plan, exchange), exchange)
    if fault == "missing":
        channel._bulk.options = dataclasses.replace(channel._bulk.options, deadline_s=2.0)
    keys = [MessageKey(MessageKind.SAVED, 2, item) for item in range(4)]
    text = ""
    if rank == 1:
        for key in keys:
            if not (fault == "missing" and key.item == 2):
                size = 60 if fault == "resized" and key.item == 2 else 64
                channel.send(0, key, torch.zeros(size, dtype=torch.uint8))
        if fault == "extra":
            channel.send(0, keys[0]._replace(item=9), torch.zeros(64, dtype=torch.uint8))
    exchange.gather("sent", None)
    if rank == 0:
        try:
            for key in keys:
                channel.receive(1, key, spec)
            channel.refuse_unread(2)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
    exchange.gather("received", None)
    channel.close(drain=False)
    return text


@pytest.mark.parametrize("stored", ["80054e2e", "zz", "", None], ids=["unsealed", "no hexadecimal", "empty", "foreign"])
def test_what_no_rank_of_the_job_has_published_is_not_read(stored: str | None) -> None:
    """torch's store takes what any process writes that reaches it."""
    from torch._C._distributed_c10d import HashStore

    from megatronapp_trainer.fbd.channels.start import StartExchange

    store = HashStore()
    own = StartExchange(store, 0, 1, key=b"of this job")
    own.put("plan", {"a": 1})
    assert own.get("plan", 0) == {"a": 1}
    if stored is None:
        StartExchange(store, 0, 1, key=b"of another job").put("plan", {"a": 2})
    else:
        store.set("fbd/plan/0", stored)
    with pytest.raises(TransferError, match="plan of rank 0 in torch's store is not what that rank has published"):
        own.get("plan", 0)
