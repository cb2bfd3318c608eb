"""Number of hardware queues of a device, from the flags of a rank. Without a GPU it has no effect."""

import argparse
from collections.abc import Sequence

from megatronapp_common.topology import RankRole

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
IN_ORDER = "1"
"""Kernels start in the order in which they are launched: with tensor parallelism megatron-core relies on it to overlap
communication with computation in backward passes (`tensor_parallel/layers.py`)."""
APART = "8"
"""CUDA's default, and the fewest with which a stream that waits does not hold up another one: that of a task of MegaDPP
for its input, those of copies of MegaFBD for the pass whose tensors they ship."""


def device_connections(arguments: Sequence[str], role: RankRole | None = None) -> str:
    """Return the value of CUDA_DEVICE_MAX_CONNECTIONS for ranks with these flags, unless the user sets another.

    With `--use-dpp` or MegaFBD it is `APART`, but with tensor parallelism what megatron-core needs, except on forward
    ranks; ranks of MegaDPP then log that no task is launched early. Flags that cannot be read are refused by the ranks,
    not here.

    Args:
        arguments: the flags.
        role: of the rank in the rank table; None without MegaFBD.
    """
    if role is RankRole.FORWARD:
        return APART
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--use-dpp", action="store_true")
    parser.add_argument("--forward-backward-disaggregating", action="store_true")
    parser.add_argument("--tensor-model-parallel-size", default="1")
    try:
        flags, _ = parser.parse_known_args(arguments)
    except argparse.ArgumentError:
        return IN_ORDER
    needs_apart = flags.use_dpp or flags.forward_backward_disaggregating
    return APART if needs_apart and flags.tensor_model_parallel_size == "1" else IN_ORDER
