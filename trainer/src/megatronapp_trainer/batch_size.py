"""How many samples a step takes, constant or growing over the first samples of the training."""

import dataclasses

from megatronapp_trainer.config import TrainerConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchSchedule:
    """Global batch size as a function of the samples consumed so far."""

    micro_batch_size: int
    data_size: int
    final: int
    """Samples of a step once the ramp-up has ended."""
    ramp: tuple[int, int, int] | None = None
    """First size, increment, and samples over which it grows."""

    def global_batch_size(self, consumed_samples: int) -> int:
        """Samples of the step that begins after this many samples; the staircase of Megatron's ramp-up."""
        if self.ramp is None:
            return self.final
        start, increment, samples = self.ramp
        if consumed_samples > samples or start == self.final:
            return self.final
        samples_per_size = samples / ((self.final - start) // increment)
        return min(self.final, start + int(consumed_samples / samples_per_size) * increment)

    def num_microbatches(self, consumed_samples: int) -> int:
        """Microbatches of each rank in that step."""
        return self.global_batch_size(consumed_samples) // (self.micro_batch_size * self.data_size)


def batch_schedule(config: TrainerConfig, data_size: int) -> BatchSchedule:
    """The schedule of a run with this many replicas."""
    ramp = config.training.rampup_batch_size
    return BatchSchedule(
        micro_batch_size=config.training.micro_batch_size,
        data_size=data_size,
        final=config.global_batch_size(data_size),
        ramp=None if ramp is None else (ramp[0], ramp[1], ramp[2]),
    )
