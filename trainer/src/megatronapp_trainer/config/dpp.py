"""Flags of MegaDPP, the pipeline schedule that decides during the step, and their rules."""

import dataclasses
import ipaddress
import re
from collections.abc import Iterator

from megatronapp_trainer.config.fields import option, require
from megatronapp_trainer.config.parallel import ParallelConfig
from megatronapp_trainer.utils.byte_sizes import bytes_of

DPP_SCHEDULES = ("auto", "dfc", "bfc", "static", "zero-bubble")
DPP_PLACEMENTS = ("loop", "vee")
TRANSPORTS = ("auto", "native", "nccl")
_NUMBER = re.compile(r"[1-9][0-9]{0,9}")
MAX_THREADS = 64
"""Limit of the native transport (`csrc/src/transport/endpoint.cpp`)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DppConfig:
    """Dynamic pipeline schedule (MegaDPP)."""

    use_dpp: bool = option(False, "run the passes of a step as their inputs arrive, over a transport of our own")
    dpp_schedule: str = option(
        "auto",
        "auto: the static order, left while an input is late; dfc, bfc: any ready pass, depth or breadth first; "
        "static: the order of megatron-core; zero-bubble: ZB-H1, with two chunks on each rank ZB-V",
        choices=DPP_SCHEDULES,
    )
    dpp_placement: str | None = option(
        None,
        "how stages are spread over ranks with two chunks; loop: each pass over the model runs on the ranks in order; "
        "vee: the second chunks run backwards, with --dpp-schedule auto the plan is then ZB-V; default: loop, with "
        "--dpp-schedule zero-bubble vee",
        choices=DPP_PLACEMENTS,
    )
    dpp_memory_cap: str | None = option(
        None,
        "activations that a rank may keep: a number of microbatches, or bytes such as 8GiB; default: up to a quarter "
        "more than the static order keeps, with dfc and bfc as many microbatches as pipeline ranks",
    )
    transport: str = option(
        "auto",
        "how stages exchange tensors; native: our transport; nccl: megatron-core's transfers on GPUs, without "
        "--use-dpp; auto: native with --use-dpp, otherwise megatron-core's",
        choices=TRANSPORTS,
    )
    workload: int | None = option(None, f"threads of a rank that copy its messages, 1 to {MAX_THREADS}; default: 1")
    num_gpus: int | None = option(None, "ranks of a node; must be the launcher's number", bounds="[1, inf)")
    multi_node: bool = option(False, "the ranks are on several nodes; must agree with the launcher")
    node_ips: str | None = option(
        None, "address of each rank in rank order, separated by commas; must be the launcher's"
    )

    def is_vee(self, chunks: int) -> bool:
        """Return whether stages of this many chunks on each rank are placed in a vee."""
        return self.use_dpp and chunks == 2 and (self.dpp_placement == "vee" or self.dpp_schedule == "zero-bubble")

    @property
    def schedule(self) -> str | None:
        """Return the schedule; None without MegaDPP."""
        return self.dpp_schedule if self.use_dpp else None

    @property
    def replaces_transfers(self) -> bool:
        """Return whether megatron-core's own schedules send through the native transport."""
        return self.transport == "native" and not self.use_dpp

    @property
    def memory_cap_microbatches(self) -> int | None:
        """Return the microbatches of ``--dpp-memory-cap``; None without it, and if it is a size."""
        cap = self.dpp_memory_cap
        return int(cap) if cap is not None and _NUMBER.fullmatch(cap) else None

    @property
    def memory_cap_bytes(self) -> int | None:
        """Return the bytes of ``--dpp-memory-cap``; None without it, and if it is a number of microbatches."""
        return None if self.dpp_memory_cap is None else bytes_of(self.dpp_memory_cap)

    @property
    def threads(self) -> int:
        """Return the number of threads that copy messages of a rank."""
        return 1 if self.workload is None else self.workload

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the entries of ``--node-ips``."""
        return () if self.node_ips is None else tuple(part.strip() for part in self.node_ips.split(","))


def dpp_problems(dpp: DppConfig, parallel: ParallelConfig, chunks: int) -> Iterator[str]:
    """Yield a sentence for each rule that the flags break; `chunks`: model chunks of each rank."""
    yield from require(
        not dpp.use_dpp or parallel.pipeline_model_parallel_size > 1,
        "--use-dpp needs --pipeline-model-parallel-size above 1: one stage has nothing to schedule",
    )
    given = {
        "--dpp-schedule": dpp.dpp_schedule != "auto",
        "--dpp-placement": dpp.dpp_placement is not None,
        "--dpp-memory-cap": dpp.dpp_memory_cap is not None,
    }
    for flag, on in given.items():
        yield from require(dpp.use_dpp or not on, f"{flag} needs --use-dpp")
    yield from require(
        dpp.use_dpp or dpp.replaces_transfers or dpp.workload is None,
        "--workload needs --use-dpp or --transport native, which copy with threads of their own; leave it out",
    )
    yield from require(
        dpp.dpp_memory_cap is None or dpp.memory_cap_microbatches is not None or dpp.memory_cap_bytes is not None,
        f"--dpp-memory-cap {dpp.dpp_memory_cap}: give a number of microbatches, 1 or more, or a size such as 8GiB",
    )
    yield from require(
        dpp.dpp_schedule not in {"static", "zero-bubble"} or dpp.dpp_memory_cap is None,
        f"--dpp-memory-cap means nothing with --dpp-schedule {dpp.dpp_schedule}, whose order is fixed; leave it out",
    )
    yield from require(
        dpp.dpp_schedule != "zero-bubble" or chunks <= 2,
        f"--dpp-schedule zero-bubble has one chunk on each rank (ZB-H1) or two (ZB-V), not {chunks}; give "
        "--num-virtual-stages-per-pipeline-rank 2, or take --dpp-schedule auto",
    )
    yield from _placement_problems(dpp, parallel, chunks)
    yield from require(
        1 <= dpp.threads <= MAX_THREADS,
        f"--workload {dpp.workload}: give the number of threads that copy messages of a rank, 1 to {MAX_THREADS}, or "
        "leave it out for 1; in MegatronApp it was the number of elements for each thread",
    )
    yield from _transport_problems(dpp, parallel)
    for address in dpp.addresses:
        yield from require(
            _is_address(address),
            f"--node-ips: {address!r} is not an IP address; give one for each rank, in rank order and separated by "
            "commas, or leave it out",
        )


def _placement_problems(dpp: DppConfig, parallel: ParallelConfig, chunks: int) -> Iterator[str]:
    is_given = dpp.dpp_placement == "vee"
    yield from require(
        not is_given or chunks == 2,
        f"--dpp-placement vee has two chunks on each rank, not {chunks}; give "
        "--num-virtual-stages-per-pipeline-rank 2, or leave it out",
    )
    yield from require(
        not is_given or dpp.dpp_schedule in {"auto", "zero-bubble"},
        f"--dpp-placement vee has no order of --dpp-schedule {dpp.dpp_schedule}; take --dpp-schedule auto or "
        "zero-bubble, or leave the placement out",
    )
    yield from require(
        dpp.dpp_placement != "loop" or not dpp.is_vee(chunks),
        "--dpp-placement loop has no order of --dpp-schedule zero-bubble with two chunks (ZB-V), whose stages are in a "
        "vee; leave the placement out, or take --dpp-schedule auto",
    )
    uneven = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    yield from require(
        not dpp.is_vee(chunks) or uneven == (None, None),
        "stages in a vee (--dpp-placement vee, or --dpp-schedule zero-bubble with two chunks) have both ends of the "
        "model on the first rank, so that --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers "
        "name no rank of their own; leave them out, or take --account-for-embedding-in-pipeline-split and "
        "--account-for-loss-in-pipeline-split",
    )


def _transport_problems(dpp: DppConfig, parallel: ParallelConfig) -> Iterator[str]:
    yield from require(
        dpp.transport != "nccl" or not dpp.use_dpp,
        "--transport nccl cannot carry --use-dpp: the order of its transfers is decided during the step, and NCCL "
        "matches those of two ranks by the order in which each of them starts its own; leave --transport out",
    )
    yield from require(
        dpp.transport != "native" or parallel.pipeline_model_parallel_size > 1,
        "--transport native needs --pipeline-model-parallel-size above 1: one stage sends nothing; leave it out",
    )
    yield from require(
        dpp.transport != "nccl" or parallel.distributed_backend != "gloo",
        "--transport nccl and --distributed-backend gloo exclude each other; leave one of them out",
    )


def world_problems(dpp: DppConfig, world_size: int) -> Iterator[str]:
    """Yield a sentence for each flag about nodes that no placement of `world_size` ranks fits."""
    count = len(dpp.addresses)
    yield from require(
        count in {0, world_size},
        f"--node-ips: {count} addresses for {world_size} ranks; give one for each rank, also where ranks share a node, "
        "or leave it out",
    )
    yield from require(
        dpp.num_gpus is None or dpp.num_gpus <= world_size,
        f"--num-gpus {dpp.num_gpus}: there are {world_size} ranks in all; give the ranks of a node, or leave it out",
    )


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
