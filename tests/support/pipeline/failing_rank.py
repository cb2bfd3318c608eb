"""`python -m failing_rank FLAGS`: a rank that trains as `pretrain` does, and may send itself a signal at a transfer.

RANK_FAILURE holds the `Failure` of a gang as JSON, if there is one. With RANKS_APART each rank has a directory of
shared memory for itself, as on another node. In the launcher's folder each rank leaves its process id in
`pid-ATTEMPT-RANK`, and its exit code in `code-ATTEMPT-RANK` if it ends by itself.
"""

import collections
import dataclasses
import json
import os
import pathlib
import sys
from typing import Any

import late_inputs

from megatronapp_common.names import Env
from megatronapp_trainer.pretrain import main
from megatronapp_trainer.utils.process_exit import exit_with

MOMENTS = ("received", "computed", "sent")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """A signal that a rank sends to itself in the first attempt."""

    rank: int
    step: int
    """From 0."""
    transfer: int
    """Number of the transfer in the step, from 1: of those that the rank receives, or of those that it sends."""
    moment: str
    """received: before the input is handed to its task; computed: before the send; sent: right after it, while a thread
    of the transport copies."""
    signal: int


class FailingTransport:
    """A transport whose process signals itself at one transfer."""

    def __init__(self, transport: Any, failure: Failure) -> None:
        self._transport = transport
        self._failure = failure
        self._step = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def begin_step(self, expected: Any) -> None:
        self._step += 1
        self._left = self._failure.transfer
        self._transport.begin_step(expected)

    def send(self, target: Any, tensor: Any) -> None:
        if self._failure.moment == "computed":
            self._count(1)
        self._transport.send(target, tensor)
        if self._failure.moment == "sent":
            self._count(1)

    def poll(self) -> dict[Any, Any]:
        inputs: dict[Any, Any] = self._transport.poll()
        if self._failure.moment == "received":
            self._count(len(inputs))
        return inputs

    def _count(self, transfers: int) -> None:
        before, self._left = self._left, self._left - transfers
        if self._step == self._failure.step and before > 0 >= self._left:
            os.kill(os.getpid(), self._failure.signal)


def install_in_channel(failure: Failure) -> None:
    """Let this process signal itself at a message between the roles of MegaFBD, or between stages of one role."""
    from megatronapp_trainer.fbd.channels.channel import Channel

    counts: collections.Counter[int] = collections.Counter()
    receive = Channel.receive

    def count(step: int) -> None:
        counts[step] += 1
        if step == failure.step + 1 and counts[step] == failure.transfer:  # the first command is number 1
            os.kill(os.getpid(), failure.signal)

    def counted_send(send: Any) -> Any:
        def call(channel: Any, peer: int, key: Any, *arguments: Any) -> None:
            if failure.moment == "computed":
                count(key.step)
            send(channel, peer, key, *arguments)
            if failure.moment == "sent":
                count(key.step)

        return call

    def counted_receive(channel: Any, peer: int, key: Any, spec: Any, target: Any = None) -> Any:
        tensor = receive(channel, peer, key, spec, target)
        if failure.moment == "received":
            count(key.step)
        return tensor

    for name in ("send", "send_parts"):
        setattr(Channel, name, counted_send(getattr(Channel, name)))
    setattr(Channel, "receive", counted_receive)  # noqa: B010 - a method of one process's class


def train() -> int:
    """Train, and leave the exit code."""
    rank, attempt = os.environ["RANK"], os.environ[Env.ATTEMPT]
    folder = pathlib.Path(os.environ[Env.RUN_DIR])
    (folder / f"pid-{attempt}-{rank}").write_text(str(os.getpid()), encoding="utf-8")
    if "RANKS_APART" in os.environ:
        own = pathlib.Path(os.environ[Env.SHM_DIR], f"rank-{rank}")
        own.mkdir(exist_ok=True)
        os.environ[Env.SHM_DIR] = str(own)
    described = os.environ.get("RANK_FAILURE")
    if described and attempt == "0":
        failure = Failure(**json.loads(described))
        if failure.rank == int(rank) and "--forward-backward-disaggregating" in sys.argv:
            install_in_channel(failure)
        elif failure.rank == int(rank):
            late_inputs.wrap_transport(lambda transport: FailingTransport(transport, failure))
    code = main()
    (folder / f"code-{attempt}-{rank}").write_text(str(int(code)), encoding="utf-8")
    return code


if __name__ == "__main__":
    exit_with(train)
