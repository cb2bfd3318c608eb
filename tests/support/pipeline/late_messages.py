"""Messages of MegaFBD that a rank which chooses its passes finds late, and in another order than they arrived."""

import random
from typing import Any

REFUSALS = (0, 0, 5, 20)


def install(seed: int = 0) -> None:
    """Hand out each message when it has been asked for a number of times, which its key and the seed give."""
    from megatronapp_trainer.fbd.channels.channel import Channel

    left: dict[Any, int] = {}
    poll, wait = Channel.poll_message, Channel.wait_activity

    def late_poll(channel: Any, peer: int, key: Any, spec: Any) -> Any:
        name = (peer, key)
        left[name] = left.get(name, random.Random(f"{seed} {name}").choice(REFUSALS)) - 1
        return poll(channel, peer, key, spec) if left[name] < 0 else None

    setattr(Channel, "poll_message", late_poll)  # noqa: B010 - a method of one process's class
    # What has arrived, and was refused, ends no wait.
    setattr(Channel, "wait_activity", lambda channel, seen, _: wait(channel, seen, 1e-3) or True)  # noqa: B010
