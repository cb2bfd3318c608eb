"""A small training run on this rank, set up as `pretrain` does it."""

import warnings
from typing import Any

from recording_reporter import RecordingReporter


def prepare(flags: str) -> Any:
    """A `Run` of these flags; the process groups are made by the first one of a process."""
    warnings.simplefilter("ignore")
    import torch.distributed as dist

    from megatronapp_trainer.config import parse
    from megatronapp_trainer.device import prepare_device
    from megatronapp_trainer.parallel.groups import initialize_groups
    from megatronapp_trainer.training.build import build_run, layout_of, vocab_size_of

    config = parse(flags.split())
    layout = layout_of(config)
    device = prepare_device(layout.local_rank, config.parallel.ranks_per_gpu)
    if not dist.is_initialized():
        initialize_groups(config, layout, device)
    return build_run(config, layout, device, vocab_size=vocab_size_of(config))


def resumed(flags: str) -> tuple[Any, Any]:
    """A `Run` that resumes if there is something to resume from, and its checkpoint manager."""
    from megatronapp_trainer.checkpoint.manager import CheckpointManager

    run = prepare(flags)
    manager = CheckpointManager(run.config, run.layout)
    manager.load(run.state)
    return run, manager


def trainer_of(run: Any, *, iterators: Any = None, checkpoints: Any = None, reporter: Any = None) -> Any:
    """The `Trainer` of a run, from the sample on where its state is."""
    from megatronapp_trainer.training.build import build_iterators, build_schedule
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    iterators = iterators or build_iterators(
        run.config, run.layout, run.state.consumed_samples, stream_state=run.state.stream_state
    )
    return Trainer(
        run, iterators, build_schedule(run), stop_request=StopRequest(), reporter=reporter, checkpoints=checkpoints
    )


def train(run: Any, *, iterators: Any = None, checkpoints: Any = None) -> RecordingReporter | None:
    """Train to the end; what the reporting rank has seen, None on the others."""
    from megatronapp_trainer.parallel.groups import destroy_groups

    recorder = RecordingReporter() if run.layout.is_reporter else None
    trainer_of(run, iterators=iterators, checkpoints=checkpoints, reporter=recorder).train()
    destroy_groups()
    return recorder
