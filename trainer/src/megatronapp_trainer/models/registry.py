"""The interface of a model family, and all families by `model.type`."""

from typing import Any, Protocol

import torch

from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.data.microbatches import DataIterators, MicrobatchSource
from megatronapp_trainer.device import Device
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.models import bert, gpt
from megatronapp_trainer.parallel.layout import Layout


class ModelFamily(Protocol):
    """The parts of training and serving that depend on the kind of model; a module fulfils it with its functions.

    The flags of a family are those of `config.model.ModelConfig` with its `type`.
    """

    LOSSES: tuple[str, ...]
    """Names of its losses in the log, that of the language model first."""

    def further_losses(self, config: TrainerConfig) -> tuple[str, ...]:
        """Return the names of the losses that reports have after `LOSSES` and that are not minimised."""

    def build_chunks(
        self, config: TrainerConfig, layout: Layout, device: Device, *, vocab_size: int, drawn: bool = True
    ) -> tuple[Any, list[Any]]:
        """Build megatron-core's TransformerConfig and the model chunks of this rank, wrapped for data parallelism."""

    def build_stage(
        self, config: TrainerConfig, layout: Layout, device: Device, *, vocab_size: int, drawn: bool = True
    ) -> Any:  # noqa: ANN401 - a model of megatron-core
        """Build a pipeline stage's model without what training wraps around it."""

    def forward(self, model: Any, batch: Any | None) -> torch.Tensor:  # noqa: ANN401 - DDP, microbatch of the source
        """Run one chunk with its inputs of a microbatch; None: the chunk reads no data."""

    def loss(self, output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # noqa: ANN401
        """Sum the loss over a microbatch: sum, its divisor, and a report of sum and count for each of
        `LOSSES`, and of `further_losses`.
        """

    def build_iterators(
        self,
        config: TrainerConfig,
        layout: Layout,
        consumed_samples: int,
        *,
        order_samples: int | None = None,
        stream_state: str | None = None,
    ) -> DataIterators:
        """Open the datasets and iterate over microbatches of this rank from the given sample on; collective."""

    def example_batch(self, config: TrainerConfig, layout: Layout, device: Device) -> Any:  # noqa: ANN401 - microbatch of the source
        """Return a microbatch of the form of all others, with any contents; collective over the tensor group."""

    def batch_source(self, config: TrainerConfig, layout: Layout, device: Device) -> MicrobatchSource:
        """Return the source of this family's microbatches on the device."""


FAMILIES: dict[str, ModelFamily] = {"gpt": gpt, "bert": bert}


def model_family(config: TrainerConfig) -> ModelFamily:
    """Return the family that the flags describe. Raises UsageError for a type that is not registered."""
    family = FAMILIES.get(config.model.type)
    if family is None:
        raise UsageError(f"there is no model type {config.model.type!r}; take one of: {', '.join(FAMILIES)}")
    return family
