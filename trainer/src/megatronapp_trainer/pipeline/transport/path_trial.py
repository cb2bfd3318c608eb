"""Trial of the paths of one rank of a MegaDPP job, before it trains: connect as the rank will, and send one message.

    python -m megatronapp_trainer.pipeline.transport.path_trial SECONDS MEGATRON_ARGUMENT...

The process of each rank has the rank's variables. It takes the inboxes with all their memory, connects to the
neighbours in the pipeline and the tensor group, sends each neighbour a message and receives one from it. It prints a
line for each path, or the error of one that fails, whose exit code is that of the rank. For the channels of MegaFBD
`megatronapp_trainer.fbd.path_trial` does so.
"""

import contextlib
import datetime
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from megatronapp_common.names import Env
from megatronapp_trainer.config import TrainerConfig, parse
from megatronapp_trainer.errors import TrainerError, TransferError
from megatronapp_trainer.parallel.layout import Layout, environment_integer, layout_from_environment
from megatronapp_trainer.parallel.node_flags import check_node_flags
from megatronapp_trainer.pipeline.dpp import DppPlan
from megatronapp_trainer.pipeline.planning.tasks import Placement, Shape
from megatronapp_trainer.pipeline.transport.inboxes import Inboxes, TaskAddresses, TransportAgreement, inboxes_at
from megatronapp_trainer.pipeline.transport.network import connected
from megatronapp_trainer.pipeline.transport.tensor_transport import TensorTransport, TransportOptions


class Trial(Protocol):
    """A trial of the paths of one rank."""

    def __call__(self, config: TrainerConfig, layout: Layout, *, deadline_s: float) -> Iterator[str]:
        """Yield a sentence for each path that a message has taken; a collective."""


def run_trial(trial: Trial, arguments: Sequence[str]) -> int:
    """Try the paths of one rank, and print what was found. Returns the exit code.

    Args:
        trial: of the paths that the flags need.
        arguments: deadline in seconds, then the flags.
    """
    try:
        config = parse(arguments[1:])
        layout = _layout(config)
        check_node_flags(config.dpp, layout, os.environ)
        for line in trial(config, layout, deadline_s=float(arguments[0])):
            print(f"path: {line}", flush=True)
    except (TrainerError, dist.DistError) as error:
        print(f"error: {str(error).splitlines()[0]}", flush=True)
        return error.exit_code if isinstance(error, TrainerError) else TransferError.exit_code
    return 0


def try_paths(config: TrainerConfig, layout: Layout, *, deadline_s: float) -> Iterator[str]:
    """Yield a sentence for each neighbour that a message has reached; collective over the world.

    Raises:
        UsageError: too little shared memory, or no path to a rank on another node.
        PeerLostError: a rank did not connect, or sent nothing within the deadline.
        TransferError: a message is not what its sender sent.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(layout.local_rank // config.parallel.ranks_per_gpu)
    timeout = datetime.timedelta(seconds=deadline_s)
    store = open_store(layout, timeout)
    dist.init_process_group("gloo", store=store, rank=layout.rank, world_size=layout.world_size, timeout=timeout)
    try:
        inboxes = _inboxes(config, layout)
        agreement = inboxes.agree()
        transport = connected(_options(config, inboxes, agreement, deadline_s), inboxes, agreement)
        yield from _exchange(transport, inboxes)
        dist.barrier()  # a rank that ends is lost to those that still wait for a message of another one
        transport.close()
    finally:
        dist.destroy_process_group()
    wait_until_closed(store, layout)


def open_store(layout: Layout, timeout: datetime.timedelta) -> TCPStore:
    """Return a store of all ranks, at the port of the one that trains; rank 0 serves it."""
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        layout.global_world_size,
        is_master=layout.global_rank == 0,
        timeout=timeout,
    )


def wait_until_closed(store: TCPStore, layout: Layout) -> None:
    """Wait until rank 0 has ended: the store of the ranks that train will be at the same port."""
    if layout.global_rank > 0:
        with contextlib.suppress(dist.DistError):
            store.wait(["a key that no rank sets"])


def _layout(config: TrainerConfig) -> Layout:
    return layout_from_environment(
        tensor_size=config.parallel.tensor_model_parallel_size,
        pipeline_size=config.parallel.pipeline_model_parallel_size,
        context_size=config.parallel.context_parallel_size,
        virtual_size=config.virtual_size,
        is_vee=config.is_vee,
        fbd=config.fbd_world(environment_integer("WORLD_SIZE", 1)),
    )


def _inboxes(config: TrainerConfig, layout: Layout) -> Inboxes:
    """Return the inboxes as `inboxes_of` does, without the groups of megatron-core, which take seconds to build."""
    stride = layout.world_size // layout.pipeline_size
    together = layout.tensor_size * layout.context_size
    first = layout.rank // together * together
    addresses = TaskAddresses(
        pipeline=range(layout.rank % stride, layout.world_size, stride),
        tensor=range(first, first + together),
    )
    shape = Shape.VEE if layout.is_vee else Shape.LOOP
    plan = DppPlan(config.dpp, Placement(layout.pipeline_size, layout.virtual_size, shape))
    return inboxes_at(config, layout, plan, addresses)


def _options(
    config: TrainerConfig, inboxes: Inboxes, agreement: TransportAgreement, deadline_s: float
) -> TransportOptions:
    return TransportOptions(
        job=f"{agreement.job}-trial",
        attempt=int(os.environ.get(Env.ATTEMPT, "0")),
        rank=dist.get_rank(),
        slot_bytes=inboxes.slot_bytes,
        slots=inboxes.slots,
        threads=config.dpp.threads,
        deadline_s=deadline_s,
        device=inboxes.device,
        pinned=agreement.pinned,
    )


def _exchange(transport: TensorTransport, inboxes: Inboxes) -> Iterator[str]:
    own, spec = dist.get_rank(), inboxes.spec
    device = torch.device("cpu") if inboxes.device is None else torch.device("cuda", inboxes.device)
    message = torch.full(spec.shape, own % 128, dtype=spec.dtype, device=device)
    for peer in inboxes.neighbours:
        transport.send(peer, own, message)
    for peer in inboxes.neighbours:
        begun = time.monotonic()
        received = transport.receive(peer, peer, spec)
        if not bool((received.tensor == peer % 128).all()):
            raise TransferError(
                f"the message from rank {peer} to rank {own} is damaged; check the memory of both nodes"
            )
        received.release()
        milliseconds = 1e3 * (time.monotonic() - begun)
        path = transport.paths[peer].replace("ucx", "UCX")
        yield f"rank {peer} to rank {own}: {path}, {inboxes.slot_bytes} bytes after {milliseconds:.1f} ms"


if __name__ == "__main__":
    sys.exit(run_trial(try_paths, sys.argv[1:]))
