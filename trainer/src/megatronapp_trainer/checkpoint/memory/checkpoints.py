"""Checkpoints in memory of one run: what the checkpoint manager and the training loop use."""

import datetime
import hashlib
import pathlib
import time

import torch.distributed as dist

from megatronapp_trainer.checkpoint.directory import CheckpointDirectory
from megatronapp_trainer.checkpoint.memory.live_state import restore_live_state
from megatronapp_trainer.checkpoint.memory.parts import MappedPart
from megatronapp_trainer.checkpoint.memory.place import MemoryPlace, find_place
from megatronapp_trainer.checkpoint.memory.saves import CopyRule, MemorySaves
from megatronapp_trainer.checkpoint.memory.search import MemorySearch, StoredStep
from megatronapp_trainer.checkpoint.memory.selection import ranks_with_useless_copies
from megatronapp_trainer.checkpoint.memory.training import training_token
from megatronapp_trainer.checkpoint.saving.device_snapshot import snapshot_memory
from megatronapp_trainer.checkpoint.train_state import NO_STEP, TrainState
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.parallel.agreement import broadcast_from_zero, on_all_ranks, rank

_STATE_SECTIONS = (
    "model",
    "parallel",
    "dpp",
    "fbd",
    "precision",
    "kernels",
    "training",
    "optimizer",
    "data",
)
"""Sections of the flags that the state, or what follows from it, depends on."""


class MemoryCheckpoints:
    """Search, restoration and saves; made and used by all ranks together."""

    def __init__(self, config: TrainerConfig) -> None:
        """Find where the ranks have their memory, and open a process group for copies.

        Raises:
            UsageError: on every rank, if copies would not be on other workers, or a directory cannot be written.
            StorageError: the same for `--save`.
        """
        flags, place = config.checkpoint, find_place(config)
        rule = copy_rule(config, place)
        timeout = datetime.timedelta(minutes=config.parallel.distributed_timeout_minutes)
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert flags.save is not None, "a rule of the flags"
        directory = CheckpointDirectory(pathlib.Path(flags.save))
        digest = flags_digest(config, broadcast_from_zero(lambda: training_token(directory)))
        self.interval = flags.non_persistent_save_interval
        self.saves = MemorySaves(place, rule, digest, group, snapshot_memory(config.parallel))
        self._search = MemorySearch(place, digest, group)
        self._found: dict[int, StoredStep | None] = {}
        self.resumed: StoredStep | None = None
        """Step that this attempt was resumed from; None: from none in memory."""
        self._text_tokens: bytes | None = None

    def newest(self, after: int) -> StoredStep | None:
        """Return the newest step, later than `after`, that all ranks can resume from; collective."""
        if after not in self._found:
            self._found[after] = self._search.newest(after)
        return self._found[after]

    def resume(self, after: int, state: TrainState) -> bool:
        """Restore the newest step if it is later than `after`, that of a checkpoint on the disk; collective.

        Raises:
            CheckpointError: on every rank, if the state of one has other tensors.
        """
        stored = self.newest(after)
        if stored is None:
            return False
        began_s = time.monotonic()
        self._text_tokens = on_all_ranks(lambda: _restore(stored, state))
        self.resumed = stored
        if rank() == 0:
            on_disk = f"the newest checkpoint is of step {after}" if after > NO_STEP else "there is no checkpoint"
            print(
                f"resumed from the memory of the workers: iteration {state.iteration}, {state.consumed_samples} "
                f"samples consumed; {stored.received} ranks received their state from another worker; searching took "
                f"{stored.seconds:.3f} s, reading {time.monotonic() - began_s:.3f} s; on the disk {on_disk}",
                flush=True,
            )
        return True

    def begin(self, state: TrainState, text_tokens: bytes | None) -> bytes | None:
        """Take the memory for all saves, before training; returns the text tokens of further checkpoints; collective.

        `text_tokens`: those of a checkpoint on the disk, if it was resumed.

        Raises:
            UsageError, StorageError: on every rank, if a worker has too little memory.
        """
        if self.resumed is None:
            self._text_tokens = text_tokens
        self.saves.reserve(state, self.resumed)
        return self._text_tokens

    def save(self, state: TrainState) -> None:
        """Begin to save this step; collective."""
        self.saves.start(state, self._text_tokens)


def _restore(stored: StoredStep, state: TrainState) -> bytes | None:
    part = MappedPart.open(stored.path)
    start, length = stored.header.objects
    objects = bytes(part.content[start : start + length].numpy())
    try:
        return restore_live_state(state, part.content, objects)
    finally:
        part.close()


def copy_rule(config: TrainerConfig, place: MemoryPlace) -> CopyRule:
    """Return where copies are stored. Raises UsageError if one would be on the worker of its rank or of another."""
    flags, workers = config.checkpoint, place.workers
    if not flags.replication:
        return CopyRule(jump=1, factor=1)
    ranks_of_worker = max(workers.count(worker) for worker in workers)
    jump, factor = flags.replication_jump or ranks_of_worker, flags.replication_factor
    if (count := len(set(workers))) < factor:
        smaller = f"give --replication-factor {count}" if count > 1 else "leave --replication out"
        raise UsageError(
            f"--replication stores each state on {factor} workers (--replication-factor), and the job has {count}; "
            f"{smaller}, or start more workers"
        )
    useless = ranks_with_useless_copies(workers, jump=jump, factor=factor)
    if useless:
        raise UsageError(
            f"--replication-jump {jump}: copies of the state of rank {useless[0]} would not all be on other workers, "
            f"of which each has up to {ranks_of_worker} ranks; give --replication-jump {ranks_of_worker}, or a "
            "multiple of it that does not lead back to the same worker, and equal numbers of ranks on all workers"
        )
    return CopyRule(jump=jump, factor=factor)


def flags_digest(config: TrainerConfig, training: str) -> str:
    """Return a digest of the flags that must be equal to resume from memory, and of the token of the training."""
    begins_from = config.checkpoint.load, config.checkpoint.finetune
    texts = [training, repr(begins_from), *(repr(getattr(config, name)) for name in _STATE_SECTIONS)]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:32]
