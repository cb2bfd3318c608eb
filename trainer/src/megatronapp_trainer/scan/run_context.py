"""Parts of a training run that the tracer reads."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.parallel.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """The run as an observer gets it once groups, model and optimizer exist, before the first step."""

    config: TrainerConfig
    layout: Layout
    device_name: str
    chunks: Sequence[Any]
    """Model chunks of this rank, in order."""
    num_microbatches: int
    """Microbatches of the first step; more under a batch-size ramp-up, see ``step_begin``."""
