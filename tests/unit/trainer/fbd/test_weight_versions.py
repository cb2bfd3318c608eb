"""Weights on their way to forward ranks: both sides check their version, and no backward rank waits for delivery."""

import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from evaluated_training import BATCH, train

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
SWITCH = "--forward-backward-disaggregating"


def environment(folder: pathlib.Path) -> dict[str, str]:
    return {"MEGATRONAPP_SHM_DIR": str(folder)}


def train_with_late_weights() -> dict[str, list[int]]:
    """Train, and take no weights on the forward rank before the backward rank waits for the first shipment.

    Returns the messages that are not delivered, on the backward rank when each step waits for its first shipment, and
    when the gradients are complete, after which the optimizer changes the weights.
    """
    from megatronapp_trainer.fbd.backward_schedule import BackwardSchedule
    from megatronapp_trainer.fbd.channels.channel import Channel
    from megatronapp_trainer.fbd.channels.messages import MessageKind
    from megatronapp_trainer.parallel.worlds import shared_store

    queued: dict[int, int] = {}
    left: list[int] = []
    receive, finish = Channel.receive, BackwardSchedule._finish

    def watched_receive(channel: Any, peer: int, key: Any, spec: Any, target: Any = None) -> Any:
        if key.kind is MessageKind.SAVED and key.step not in queued:
            queued[key.step] = channel._control.sending()
            shared_store().set(f"waits/{key.step}", "")
        if key.kind is MessageKind.WEIGHTS and key.item == 0 and key.step in (1, 2, 3):
            shared_store().wait([f"waits/{key.step}"])
        return receive(channel, peer, key, spec, target)

    def watched_finish(schedule: Any) -> Any:
        left.append(schedule._channel._control.sending())
        return finish(schedule)

    setattr(Channel, "receive", watched_receive)  # noqa: B010 - a method of one process's class
    setattr(BackwardSchedule, "_finish", watched_finish)  # noqa: B010
    code, _ = train(f"{SWITCH} --eval-interval 100")
    assert code == 0
    return {"queued": list(queued.values()), "left": left}


def test_a_step_begins_before_its_weights_are_delivered_and_ends_after(
    run_ranks: RunRanks, tmp_path: pathlib.Path
) -> None:
    backward, forward = run_ranks(2, train_with_late_weights, environment=environment(tmp_path))
    assert len(backward["queued"]) == 3
    assert all(count > 0 for count in backward["queued"])
    assert backward["left"] == [0, 0, 0]
    assert forward["left"] == []


def fail(fault: str) -> str:
    """Error of this rank with weights of a wrong version, or a report of one, in the second step."""
    from megatronapp_trainer.fbd import backward_schedule, forward_rank
    from megatronapp_trainer.fbd.channels.summary import send_summary
    from megatronapp_trainer.fbd.weights import send_weights

    def sent_weights(channel: Any, chunks: Any, step: int, version: int) -> None:
        send_weights(channel, chunks, step, version - (step == 2 and fault == "stale"))

    def sent_summary(channel: Any, partner: int, step: int, summary: Any) -> None:
        if step == 2 and fault == "mixed":
            (version,) = summary.versions
            summary.versions[version - 1] = 1
            summary.versions[version] -= 1
        send_summary(channel, partner, step, summary)

    vars(backward_schedule)["send_weights"] = sent_weights
    vars(forward_rank)["send_summary"] = sent_summary
    try:
        train(f"{SWITCH} --eval-interval 100")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return os.environ["RANK"]


@pytest.mark.parametrize(
    ("fault", "rank", "message"),
    [
        ("stale", 1, "command 2: it is for the weights after 1 optimizer steps, and those of rank 1 are of 0, sent by"),
        (
            "mixed",
            0,
            f"command 2: by version of the weights, rank 1 has run forward passes {{1: {BATCH - 1}, 0: 1}}, and",
        ),
    ],
)
def test_other_weights_than_those_of_the_step_are_a_typed_error(
    run_ranks: RunRanks, tmp_path: pathlib.Path, fault: str, rank: int, message: str
) -> None:
    errors = run_ranks(2, fail, fault, environment=environment(tmp_path))
    assert errors[rank].startswith(f"WeightVersionError: {message}")
    assert errors[1 - rank].startswith("PeerLostError: ")
