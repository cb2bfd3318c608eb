"""Number of samples of a step, constant or growing over the first samples of the training."""

import dataclasses

from megatronapp_trainer.config.root import TrainerConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchSchedule:
    """Global batch size as a function of the samples consumed so far."""

    micro_batch_size: int
    data_size: int
    final: int
    """Samples of a step after the ramp-up."""
    ramp: tuple[int, int, int] | None = None
    """First size, increment, and number of samples over which the size grows."""

    def global_batch_size(self, consumed_samples: int) -> int:
        """Return the samples of the step that begins after this many samples; the staircase of Megatron's ramp-up."""
        if self.ramp is None:
            return self.final
        start, increment, samples = self.ramp
        if consumed_samples > samples or start == self.final:
            return self.final
        samples_per_size = samples / ((self.final - start) // increment)
        return min(self.final, start + int(consumed_samples / samples_per_size) * increment)

    def samples_of(self, steps: int) -> int:
        """Return the number of samples of the first `steps` steps."""
        return self._walk(steps=steps, samples=None)[1]

    def steps_left(self, samples: int, consumed_samples: int) -> int:
        """Return the number of whole steps that fit between `consumed_samples` and `samples`."""
        return self._walk(steps=None, samples=samples, consumed=consumed_samples)[0]

    def _walk(self, *, steps: int | None, samples: int | None, consumed: int = 0) -> tuple[int, int]:
        """Return steps done and samples consumed when either limit is reached: by step in the ramp-up."""
        done = 0
        while self.ramp is not None and consumed <= self.ramp[2]:
            size = self.global_batch_size(consumed)
            if done == steps or (samples is not None and consumed + size > samples):
                return done, consumed
            done, consumed = done + 1, consumed + size
        rest = steps - done if steps is not None else max(0, (samples or 0) - consumed) // self.final
        return done + rest, consumed + rest * self.final

    def num_microbatches(self, consumed_samples: int) -> int:
        """Return the number of microbatches of each rank in that step."""
        return self.global_batch_size(consumed_samples) // (self.micro_batch_size * self.data_size)


def with_steps(config: TrainerConfig, *, iteration: int = 0, consumed_samples: int = 0) -> TrainerConfig:
    """Return the configuration with ``--train-iters`` as ``--train-samples`` gives it, counted from the steps done."""
    total = config.training.train_samples
    if total is None:
        return config
    steps = iteration + batch_schedule(config, data_size=1).steps_left(total, consumed_samples)
    return dataclasses.replace(config, training=dataclasses.replace(config.training, train_iters=steps))


def batch_schedule(config: TrainerConfig, data_size: int) -> BatchSchedule:
    """Return the schedule of a run with this many replicas."""
    ramp = config.training.rampup_batch_size
    return BatchSchedule(
        micro_batch_size=config.training.micro_batch_size,
        data_size=data_size,
        final=config.global_batch_size(data_size),
        ramp=None if ramp is None else (ramp[0], ramp[1], ramp[2]),
    )
