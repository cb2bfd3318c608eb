"""Roles of the ranks of a gang, from the flags of a rank, without importing torch."""

import argparse
from collections.abc import Sequence

from megatronapp_common.errors import TopologyError
from megatronapp_common.topology import FbdWorld, fbd_world_of


def fbd_world_of_flags(arguments: Sequence[str], world_size: int) -> FbdWorld | None:
    """Return the ranks of both roles of MegaFBD among those that are started; None without MegaFBD.

    Also None for flags that cannot be read or do not fit the world: the ranks refuse these at their start, and say why.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for switch in ("forward-backward-disaggregating", "ignore-forward-tensor-parallel", "fbd-forward-ranks-apart"):
        parser.add_argument(f"--{switch}", action="store_true")
    for size in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "fbd-backward-per-forward"):
        parser.add_argument(f"--{size}", type=int, default=1)
    try:
        flags, _ = parser.parse_known_args(arguments)
        if not flags.forward_backward_disaggregating:
            return None
        return fbd_world_of(
            world_size,
            tensor=flags.tensor_model_parallel_size,
            pipeline=flags.pipeline_model_parallel_size,
            merged=flags.ignore_forward_tensor_parallel,
            backward_per_forward=flags.fbd_backward_per_forward,
            apart=flags.fbd_forward_ranks_apart,
        )
    except (argparse.ArgumentError, TopologyError):
        return None
