"""Short trainings on devices: losses, counted synchronisations, and the records of a traced run."""

import json
import os
import pathlib
import warnings
from typing import Any

from recording_reporter import RecordingReporter

STEPS = 8
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 "
    f"--global-batch-size 8 --train-iters {STEPS} --lr 2e-3 --lr-warmup-iters 2 --mock-data --vocab-size 120 "
    "--attention-dropout 0 --hidden-dropout 0 --eval-iters 0"
)
SYNCHRONISES = "called a synchronizing CUDA operation"
"""Warning of torch while torch.cuda.set_sync_debug_mode("warn") is on."""


def train(flags: str, model: str = MODEL) -> dict[str, Any]:
    """Train on this rank with the flags of `model` and further ones.

    Returns losses, gradient norms, the waits of one more step, and the ring's contents.
    """
    warnings.simplefilter("ignore")
    from megatronapp_trainer.checkpoint.manager import CheckpointManager
    from megatronapp_trainer.config import parse
    from megatronapp_trainer.device import prepare_device
    from megatronapp_trainer.launch.ranks.connections import CONNECTIONS, device_connections
    from megatronapp_trainer.parallel.groups import destroy_groups, initialize_groups
    from megatronapp_trainer.training.build import (
        build_iterators,
        build_run,
        build_schedule,
        layout_of,
        vocab_size_of,
        with_overlap,
    )
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    config = parse(f"{model} {flags}".split())
    layout = layout_of(config)
    os.environ[CONNECTIONS] = device_connections(flags.split(), layout.role)
    device = prepare_device(layout.local_rank, config.parallel.ranks_per_gpu)
    config = with_overlap(config, layout, device)
    initialize_groups(config, layout, device)
    run = build_run(config, layout, device, vocab_size=vocab_size_of(config))
    manager = CheckpointManager(config, layout) if config.checkpoint.save or config.checkpoint.load else None
    if manager is not None:
        manager.load(run.state)
    observer = _observer(config, layout, run, device) if config.logging.trace else None
    recorder = RecordingReporter()
    schedule = build_schedule(run, observer)
    trainer = Trainer(
        run,
        build_iterators(config, layout, run.state.consumed_samples),
        schedule,
        stop_request=StopRequest(),
        reporter=recorder,  # type: ignore[arg-type]
        checkpoints=manager,
        observer=observer,
    )
    trainer.train()
    losses, norms = list(recorder.losses), list(recorder.grad_norms)
    synchronisations = _count_synchronisations(trainer) if device.is_cuda and not config.checkpoint.save else 0
    if observer is not None:
        observer.close()
    schedule.close()
    destroy_groups()
    return {
        "device": device.name,
        "losses": losses,
        "norms": norms,
        "synchronisations": synchronisations,
        **_adam(run.state.optimizer),
        "transfers_without_times": _transfers_without_times() if config.logging.trace_nccl else 0,
        **_ring(layout.rank),
    }


def train_on_all_kernels(flags: str) -> dict[str, Any]:
    """Train on all of our own kernels, whether passes are replayed or not."""
    import importlib

    warnings.simplefilter("ignore")
    for name in ("models.kernels.choice", "pipeline.split_backward"):
        module: Any = importlib.import_module(f"megatronapp_trainer.{name}")
        module.launches_are_replayed = lambda _config: True
    return train(flags)


def _adam(optimizer: Any) -> dict[str, Any]:
    """Return whether each group of Adam is fused, and the devices of its counts of steps."""
    from megatronapp_trainer.checkpoint.optimizer_state import inner_optimizers

    parts = [part.optimizer for part in inner_optimizers(optimizer)]
    return {
        "fused": [bool(group.get("fused")) for part in parts for group in part.param_groups],
        "step_devices": sorted({state["step"].device.type for part in parts for state in part.state.values()}),
    }


def train_without_fusing(flags: str) -> dict[str, Any]:
    """Train with torch's Adam as megatron-core makes it."""
    from megatronapp_trainer.training import optimizer_kernels

    optimizer_kernels.fuse_adam = lambda optimizer: None
    return train(flags)


def _observer(config: Any, layout: Any, run: Any, device: Any) -> Any:
    from megatronapp_trainer import scan
    from megatronapp_trainer.scan.run_context import RunContext

    return scan.start(
        RunContext(
            config=config,
            layout=layout,
            device_name=device.name,
            chunks=run.state.chunks,
            num_microbatches=8 // 2 // layout.data_size,
        )
    )


def _count_synchronisations(trainer: Any) -> int:
    """Synchronisations of one more step, as torch counts them on this rank's thread."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        trainer.step()
        torch.cuda.set_sync_debug_mode("default")
    return sum(SYNCHRONISES in str(warning.message) for warning in caught)


def _transfers_without_times() -> int:
    """Transfers of NCCL in this process of which it has not reported the times of their kernels."""
    from megatronapp_trainer.scan.nccl_transfers import PluginLog

    log = PluginLog()
    return log.dropped() + log.in_flight()


def _ring(rank: int) -> dict[str, Any]:
    """Metadata, records and count of lost records of this rank's ring, if it has one."""
    path = pathlib.Path(os.environ.get("MEGATRONAPP_SHM_DIR", "/nowhere"), f"test.rank{rank}.ring")
    if not path.exists():
        return {}
    import megatronapp_native as native

    reader = native.RingReader(str(path))
    data, lost = reader.read(1_000_000)
    return {"metadata": json.loads(reader.info().metadata), "records": data, "lost": lost}


def losses_of(results: list[dict[str, Any]]) -> list[float]:
    """Losses of the ranks that know them; they all agree."""
    known = [result["losses"] for result in results if any(result["losses"])]
    assert known
    assert all(losses == known[0] for losses in known)
    assert len(known[0]) == STEPS
    return list(known[0])
