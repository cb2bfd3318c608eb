"""Trial of the paths of one rank of a MegaFBD job, before it trains: connect as the rank will, and send one message.

    python -m megatronapp_trainer.fbd.path_trial SECONDS MEGATRON_ARGUMENT...

It is run as `megatronapp_trainer.pipeline.transport.path_trial` is. Sizes of shipments are known once the model is
built, so that their room in shared memory is compared as the ranks start, and not here.
"""

import dataclasses
import datetime
import sys
import time
from collections.abc import Iterator

import torch
from torch._C._distributed_c10d import PrefixStore

from megatronapp_common.trace import TransferPath
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.device.place import hide_gpus
from megatronapp_trainer.errors import TransferError
from megatronapp_trainer.fbd.channels.agreement import agree
from megatronapp_trainer.fbd.channels.channel import Channel
from megatronapp_trainer.fbd.channels.messages import MessageKey, MessageKind
from megatronapp_trainer.fbd.channels.plan import SUMMARY_BYTES, ChannelPlan, channel_plan
from megatronapp_trainer.fbd.channels.start import StartExchange, exchange_key
from megatronapp_trainer.fbd.stage import stage_of
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.pipeline.transport.path_trial import open_store, run_trial, wait_until_closed
from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

_PATHS = {
    TransferPath.SHARED_MEMORY: "shared memory",
    TransferPath.CUDA_IPC: "CUDA IPC",
    TransferPath.UCX: "UCX",
}


def try_channels(config: TrainerConfig, layout: Layout, *, deadline_s: float) -> Iterator[str]:
    """Yield a sentence for each partner and neighbour that has sent a message; collective over both roles.

    Raises:
        UsageError: too little shared memory, or no path to a rank on another node.
        PeerLostError: a rank did not connect, or sent nothing within the deadline.
        TransferError: a message is not what its sender sent.
    """
    device, place = None, layout.gpu_place(config.fbd)
    if place is None:
        hide_gpus()
    elif torch.cuda.is_available():
        device = place // config.parallel.ranks_per_gpu
        torch.cuda.set_device(device)
    store = open_store(layout, datetime.timedelta(seconds=deadline_s))
    ranks = layout.global_rank, layout.global_world_size
    exchange = StartExchange(PrefixStore("trial", store), *ranks, key=exchange_key())
    of_role = config.of_role(layout.role)
    planned = channel_plan(of_role, layout, stage_of(layout), shipment_bytes=1, shipments=1, device=device)
    plan = dataclasses.replace(planned, deadline_s=deadline_s)
    paths = agree(plan, exchange)
    channel = Channel(plan, paths._replace(job=f"{paths.job}-trial"), exchange)
    try:
        yield from _exchanged(channel, plan)
        exchange.gather("received", None)  # a rank that ends is lost to those that still wait for another one
    except BaseException:
        channel.close(drain=False)
        raise
    channel.close()
    wait_until_closed(store, layout)


def _exchanged(channel: Channel, plan: ChannelPlan) -> Iterator[str]:
    """Send each peer a message, and yield a sentence for each that arrives."""
    device = torch.device("cpu") if plan.device is None else torch.device("cuda", plan.device)
    key, spec = MessageKey(MessageKind.SUMMARY, 0), TensorSpec((SUMMARY_BYTES,), torch.uint8)
    message = torch.full(spec.shape, plan.rank % 251, dtype=spec.dtype, device=device)
    for peer in plan.peers:
        channel.send(peer, key, message)
    for peer in plan.peers:
        begun = time.monotonic()
        received = channel.receive(peer, key, spec)
        if not bool((received == peer % 251).all()):
            raise TransferError(
                f"the message from rank {peer} to rank {plan.rank} is damaged; check the memory of both nodes"
            )
        milliseconds = 1e3 * (time.monotonic() - begun)
        yield (
            f"rank {peer} to rank {plan.rank}: {_PATHS[channel.path_from(peer)]}, {spec.bytes} bytes after "
            f"{milliseconds:.1f} ms"
        )


if __name__ == "__main__":
    sys.exit(run_trial(try_channels, sys.argv[1:]))
