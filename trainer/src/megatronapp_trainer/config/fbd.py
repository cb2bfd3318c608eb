"""Flags of MegaFBD, which runs forward and backward passes on separate ranks."""

import dataclasses
import enum

from megatronapp_common.errors import TopologyError
from megatronapp_common.topology import FbdWorld, fbd_world_of
from megatronapp_trainer.config.fields import option
from megatronapp_trainer.config.parallel import ParallelConfig
from megatronapp_trainer.errors import UsageError


class ShipMode(enum.StrEnum):
    """Part of a pass's saved tensors that forward ranks send; the rest is recomputed on the backward rank."""

    SAVED = "saved"
    """All tensors that autograd saves."""
    SELECTIVE = "selective"
    """All tensors but those of core attention."""
    FULL = "full"
    """Inputs of layers, and what no layer saves."""


AUTO = "auto"
"""Value of `--fbd-ship` with which the first steps measure all modes."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FbdConfig:
    """Forward and backward on separate ranks (MegaFBD)."""

    forward_backward_disaggregating: bool = option(
        False, "each rank is one for forward or one for backward passes; there are half as many replicas"
    )
    ignore_forward_tensor_parallel: bool = option(False, "one forward rank for each tensor group")
    fbd_backward_per_forward: int = option(
        1, "replicas whose backward ranks one forward rank serves in turns", bounds="[1, inf)"
    )
    fbd_ship: str | None = option(
        None,
        "what forward ranks send: all that autograd saves, or less, which backward ranks recompute: core attention "
        "(selective), or each layer from its input (full); auto measures all three in the first steps and takes the "
        "fastest; default: what --recompute-granularity says",
        choices=(*ShipMode, AUTO),
    )
    fbd_forward_on_cpu: bool = option(
        False, "forward ranks run on the CPU, and backward ranks on GPUs; needs --fbd-ship full, and no dropout"
    )
    fbd_forward_ranks_apart: bool = option(
        False, "forward ranks are numbered after all backward ranks, as on separate workers (spec.fbd.forward)"
    )

    @property
    def enabled(self) -> bool:
        """Return whether forward and backward run on separate ranks."""
        return self.forward_backward_disaggregating

    @property
    def merged(self) -> bool:
        """Return whether the forward ranks of a tensor group are one."""
        return self.ignore_forward_tensor_parallel

    def world(self, world_size: int, parallel: ParallelConfig) -> FbdWorld:
        """Return the ranks of both roles among those that are started. Raises UsageError if they do not fit."""
        try:
            return fbd_world_of(
                world_size,
                tensor=parallel.tensor_model_parallel_size,
                pipeline=parallel.pipeline_model_parallel_size,
                merged=self.merged,
                backward_per_forward=self.fbd_backward_per_forward,
                apart=self.fbd_forward_ranks_apart,
            )
        except TopologyError as error:
            raise UsageError(f"--forward-backward-disaggregating: {error}") from error
