"""Time for which training waits for a checkpoint: at once, in the background, and in memory, in turns in one run.

    python bench/checkpoint_block.py [--layers 4] [--hidden 512] [--ranks 2] [--blocks 5] [--steps 6]
    python bench/checkpoint_block.py --layers 18 --hidden 2048 --heads 16 --seq 2048 --ranks 1 --bf16  # a GPU

Each block trains undisturbed steps, saves at once, in the background until that checkpoint is published, and in the
memory of the workers until the copies are complete. Each rank is a worker, and the next one stores its copy; a single
rank has no copy.
`wait` is the time in the call that saves, in agreements, and before the update that waits for the copy. `extra` is by
how much the steps took longer, from the save to the publication, than as many undisturbed ones: on a GPU the device's
wait for the copy is in it, and on a host without spare processors the writer's own work. Medians of the blocks; a first
block, in which the ranks plan and get memory, is not counted. The ranks run here, on the GPUs of this host if it has
any.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any

from megatronapp_common.names import Env
from megatronapp_trainer.launch.config.address import reserved_port


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockTimes:
    """Seconds of one block on rank 0."""

    step: float
    at_once: float
    wait: float
    extra: float
    written: float
    steps_while_written: int
    memory_wait: float
    memory_extra: float
    memory_written: float
    memory_steps: int


def flags_of(options: argparse.Namespace, folder: str, *, in_background: bool) -> list[str]:
    """Return the command line of a training, which saves nothing by itself."""
    memory = "--non-persistent-save-interval 1000000" + (" --replication" if options.ranks > 1 else "")
    extra = f"--async-save {memory}".split() if in_background else []
    text = (
        f"--num-layers {options.layers} --hidden-size {options.hidden} --num-attention-heads {options.heads} "
        f"--seq-length {options.seq} --micro-batch-size 1 --global-batch-size {options.ranks * options.batch} "
        f"--train-iters 100000 --lr 1e-4 --mock-data --vocab-size {options.vocab} --eval-iters 0 --swiglu "
        f"--use-distributed-optimizer --keep-last 2 --save {folder}"
    )
    return [*text.split(), *(["--bf16"] if options.bf16 else []), *extra]


def prepare(flags: list[str]) -> tuple[Any, Any]:
    """Return a run of these flags and its checkpoint manager."""
    import torch.distributed as dist

    from megatronapp_trainer.checkpoint.manager import CheckpointManager
    from megatronapp_trainer.config import parse
    from megatronapp_trainer.device import prepare_device
    from megatronapp_trainer.parallel.groups import initialize_groups
    from megatronapp_trainer.training.build import build_run, layout_of, vocab_size_of

    config = parse(flags)
    layout = layout_of(config)
    device = prepare_device(layout.local_rank, config.parallel.ranks_per_gpu)
    if not dist.is_initialized():
        initialize_groups(config, layout, device)
    run = build_run(config, layout, device, vocab_size=vocab_size_of(config))
    return run, CheckpointManager(config, layout)


def run_rank(options: argparse.Namespace, folder: str) -> None:
    """Measure all blocks as one of the ranks; rank 0 prints them."""
    warnings.simplefilter("ignore")
    from megatronapp_trainer.checkpoint.manager import CheckpointManager
    from megatronapp_trainer.config import parse
    from megatronapp_trainer.parallel.groups import destroy_groups
    from megatronapp_trainer.training.build import build_iterators, build_schedule
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    run, manager = prepare(flags_of(options, f"{folder}/background", in_background=True))
    manager.memory.begin(run.state, None)
    at_once = CheckpointManager(parse(flags_of(options, f"{folder}/at-once", in_background=False)), run.layout)
    trainer = Trainer(
        run,
        build_iterators(run.config, run.layout, 0),
        build_schedule(run),
        stop_request=StopRequest(),
        checkpoints=manager,
    )
    blocks = [measure_block(trainer, run, manager, at_once, options.steps) for _ in range(options.blocks + 1)]
    memory_bytes = manager.memory.saves.report.size_bytes
    manager.memory.saves.discard()
    parameters = sum(weight.numel() for chunk in run.state.chunks for weight in chunk.parameters())
    manager.close()
    destroy_groups()
    if run.layout.rank == 0:
        found = [dataclasses.asdict(block) for block in blocks[1:]]
        result = {"parameters": parameters, "device": run.device.name, "memory": memory_bytes, "blocks": found}
        print(json.dumps(result), flush=True)


def measure_block(trainer: Any, run: Any, manager: Any, at_once: Any, steps: int) -> BlockTimes:  # noqa: ANN401
    """Train undisturbed steps, save at once, in the background, and in memory."""
    undisturbed = [timed_step(trainer) for _ in range(steps)]
    began_s = time.perf_counter()
    at_once.save(run.state)
    at_once_s = time.perf_counter() - began_s
    timed_step(trainer)  # as after any pause, it may be slow
    began_s = time.perf_counter()
    trainer._save()
    taken = 0
    while manager.background.pending is not None:
        timed_step(trainer)
        taken += 1
    extra_s = time.perf_counter() - began_s
    step_s = statistics.median(undisturbed)
    report = manager.background.report
    timed_step(trainer)
    began_s = time.perf_counter()
    trainer._save_in_memory()
    saves, step, memory_steps = manager.memory.saves, run.state.iteration, 0
    while saves.report.iteration != step:
        timed_step(trainer)
        memory_steps += 1
    return BlockTimes(
        step=step_s,
        at_once=at_once_s,
        wait=report.blocked_s,
        extra=extra_s - taken * step_s,
        written=report.written_s,
        steps_while_written=taken,
        memory_wait=saves.report.blocked_s,
        memory_extra=time.perf_counter() - began_s - memory_steps * step_s,
        memory_written=saves.report.written_s,
        memory_steps=memory_steps,
    )


def timed_step(trainer: Any) -> float:  # noqa: ANN401
    """Run a step with the work at its end; return its seconds."""
    began_s = time.perf_counter()
    trainer._at_boundary(trainer.step())
    return time.perf_counter() - began_s


def start_ranks(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Run all ranks as processes of this host; return what rank 0 has measured."""
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserved_port("127.0.0.1"))
        ranks = []
        for rank in range(options.ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.ranks)}
            own[Env.WORKER_INDEX] = str(rank)
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(options.ranks)}
            environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | os.environ | own | meeting
            command = [sys.executable, *sys.argv, "--as-rank-in", folder]
            ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise SystemExit(f"ranks ended with codes {[process.returncode for process in ranks]}")
    found: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"layers": 4, "hidden": 512, "heads": 8, "seq": 64, "vocab": 8000}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel ranks of this host")
    parser.add_argument("--batch", type=int, default=1, help="samples of a rank in a step")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="undisturbed steps of a block")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--folder", help="directory for the checkpoints; default: a temporary one")
    parser.add_argument("--as-rank-in", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank_in is not None:
        run_rank(options, options.as_rank_in)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = start_ranks(options, folder)
        sizes = [path.stat().st_size for path in pathlib.Path(folder, "at-once").rglob("*.distcp")]
    print(f"{found['parameters'] / 1e6:.0f} million parameters on each of {options.ranks} ranks, {found['device']}")
    print(f"{sum(sizes) / 2 / 2**20:.0f} MiB a checkpoint, medians of {len(found['blocks'])} blocks, seconds:")
    print(f"{found['memory'] / 2**20:.0f} MiB is the state of a rank in memory")
    medians = {name: statistics.median(block[name] for block in found["blocks"]) for name in found["blocks"][0]}
    for name, value in medians.items():
        print(f"  {name:20} {value:9.3f}")
    print(f"  wait / at_once       {medians['wait'] / medians['at_once']:9.1%}")
    print(f"  extra / at_once      {medians['extra'] / medians['at_once']:9.1%}")
    print(f"  memory_wait / at_once  {medians['memory_wait'] / medians['at_once']:7.1%}")
    print(f"  memory_extra / at_once {medians['memory_extra'] / medians['at_once']:7.1%}")


if __name__ == "__main__":
    main()
