"""Saving and resuming of a run. All ranks call it together."""

import dataclasses
import logging
import os
import pathlib
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatronapp_common.names import Env
from megatronapp_trainer.checkpoint import arguments, foreign, resume_rates
from megatronapp_trainer.checkpoint.content import StateParts, restore, sharded_state
from megatronapp_trainer.checkpoint.directory import (
    BrokenCheckpointError,
    CheckpointDirectory,
    Manifest,
    OwnershipClaim,
    read_manifest,
)
from megatronapp_trainer.checkpoint.saving.background import BackgroundSaves
from megatronapp_trainer.checkpoint.saving.device_snapshot import snapshot_memory
from megatronapp_trainer.checkpoint.saving.files import (
    GlobalPlan,
    Publication,
    RankDataFile,
    require_shared,
    write_rank_file,
)
from megatronapp_trainer.checkpoint.saving.plans import SharedPlan
from megatronapp_trainer.checkpoint.saving.rank_content import RankContent
from megatronapp_trainer.checkpoint.saving.report import CheckpointReport
from megatronapp_trainer.checkpoint.storage import read, read_common, verify
from megatronapp_trainer.checkpoint.train_state import NO_STEP, PerturbedSteps, TrainState
from megatronapp_trainer.config import CheckpointConfig, TrainerConfig
from megatronapp_trainer.data import text_tokens
from megatronapp_trainer.errors import CheckpointError, StorageError, SupersededError, TrainerError, UsageError
from megatronapp_trainer.parallel.agreement import (
    Agreement,
    broadcast_from_zero,
    gather_to_zero,
    is_peer_lost_error,
    on_all_ranks,
    on_rank_zero,
    rank,
)
from megatronapp_trainer.parallel.layout import Layout, environment_integer

if TYPE_CHECKING:  # imported only where the state is saved in memory
    from megatronapp_trainer.checkpoint.memory.checkpoints import MemoryCheckpoints

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _CheckpointCandidate:
    """A checkpoint that may be read, or why not."""

    path: pathlib.Path
    manifest: Manifest | None
    flaw: str | None


class CheckpointManager:
    """Checkpoints of one run.

    Without `--save` nothing is written. A run resumes from the newest whole checkpoint of `--save`, so that a restarted
    job continues; only without one, from that of `--load`.
    """

    def __init__(self, config: TrainerConfig, layout: Layout) -> None:
        self._config = config
        self._layout = layout
        flags = config.checkpoint
        if flags.finetune and _loads_from_save(flags):
            raise UsageError("--finetune reads weights only, so --save must name another directory than --load")
        self._directory = CheckpointDirectory(pathlib.Path(flags.save)) if flags.save is not None else None
        self._claim: OwnershipClaim | None = None
        self._plan = SharedPlan()
        self._report = CheckpointReport()
        self.background = (
            BackgroundSaves(
                self._plan, exit_wait_s=flags.async_save_exit_wait, snapshots=snapshot_memory(config.parallel)
            )
            if flags.async_save and flags.save is not None
            else None
        )
        """Writes checkpoints while training continues, with `--async-save`."""
        self.memory = memory_checkpoints(config)
        """Checkpoints in the memory of the workers, with `--non-persistent-save-interval`."""
        self._text_tokens: bytes | None = None
        """Text tokens of the loaded checkpoint: those that a converted model expects stay the same when it learns."""

    def finds_checkpoint(self) -> bool:
        """Return True if `load` will fill the weights or fail: there is a checkpoint, whole or not. Collective."""
        flags = self._config.checkpoint
        folders = [pathlib.Path(folder) for folder in (flags.save, flags.load) if folder is not None]
        if broadcast_from_zero(lambda: any(CheckpointDirectory(folder).checkpoints() for folder in folders)):
            return True
        return self.memory is not None and self.memory.newest(NO_STEP) is not None

    def load(self, state: TrainState) -> bool:
        """Resume `state` in place; returns False if there was no checkpoint. Collective.

        Raises:
            CheckpointError: the checkpoint is of another model, or all of them are damaged, or `--load` has none and
                `--exit-on-missing-checkpoint` is given.
            SupersededError: a newer attempt owns `--save`.
        """
        is_resumed = False
        if self._directory is not None:
            self._claimed(self._directory)
            is_resumed = self._load_newest(self._directory, state, finetune=False, memory=self.memory)
            if is_resumed:
                _note_unread(self._config.checkpoint)
        is_resumed = is_resumed or self._load_other(state)
        if self.memory is not None:
            self._text_tokens = self.memory.begin(state, self._text_tokens)
        return is_resumed

    def save(self, state: TrainState) -> None:
        """Write a checkpoint of `state`. Collective; does nothing without `--save`.

        With `--async-save` it is copied and written later. `background` says whether one is pending, which must not be.

        Raises:
            StorageError: it could not be written; no partial files remain, and all ranks raise.
            RuntimeError: a peer was lost; partial files, which are never taken for a checkpoint, are removed by the
                next attempt.
            SupersededError: a newer attempt owns the directory.
        """
        if self._directory is None:
            return
        claim, began_s = self._claimed(self._directory), time.monotonic()
        temporary = self._directory.temporary(state.iteration, claim)
        publication = Publication(
            directory=self._directory.path,
            manifest=self._manifest(state, claim),
            claim=claim,
            text_tokens=self._text_tokens,
            keep=self._config.checkpoint.keep_last,
        )
        if self.background is not None:
            self.background.start(self._prepare(state), publication, began_s=began_s)
            return
        try:
            on_rank_zero(publication.begin)
            content = self._prepare(state)
            files = self._write(content, temporary)
            on_rank_zero(lambda: publication.finish(content.common, self._whole_plan(), files or []))
        except (OSError, TrainerError, RuntimeError) as error:
            self._give_up(error, temporary)
        written_s = time.monotonic() - began_s
        self._report = dataclasses.replace(
            self._report,
            iteration=state.iteration,
            taken_at=time.time() - written_s,
            blocked_s=written_s,
            written_s=written_s,
        )

    @property
    def report(self) -> CheckpointReport:
        """Return the figures of the checkpoints so far."""
        report = self._report if self.background is None else self.background.report
        return report if self.memory is None else dataclasses.replace(report, memory=self.memory.saves.report)

    def close(self) -> None:
        """End the process that writes in the background, and close files in memory, if there are any."""
        if self.background is not None:
            self.background.close()
        if self.memory is not None:
            self.memory.saves.close()

    def _prepare(self, state: TrainState) -> RankContent:
        content = on_all_ranks(lambda: sharded_state(state, self._layout, self._saved_parts(), loading=False))
        return self._plan.prepare(content, [weight for chunk in state.chunks for weight in chunk.parameters()])

    def _whole_plan(self) -> GlobalPlan:
        assert self._plan.whole is not None, "rank 0 has it since the first checkpoint"
        return self._plan.whole

    def _write(self, content: RankContent, temporary: pathlib.Path) -> list[RankDataFile] | None:
        """Write the files of all ranks; returns what rank 0 needs of them."""

        def write() -> RankDataFile:
            require_shared(temporary)
            return write_rank_file(temporary, rank(), content.items, content.tensors.__getitem__, content.objects)

        return gather_to_zero(on_all_ranks(write))

    def _give_up(self, error: Exception, temporary: pathlib.Path) -> None:
        """Report the reason. Unless a peer was lost, all ranks are here, for one cause."""
        if isinstance(error, SupersededError) or is_peer_lost_error(error):
            raise error  # a rank may still be writing under the same name; the next owner removes what remains
        if rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, StorageError):
            raise error
        raise StorageError(
            f"checkpoint {temporary.name.partition('.')[0]} could not be written to {temporary.parent}: {error}. "
            f"{_describe_free_space(temporary.parent)}What was written of it has been removed; "
            "earlier checkpoints are as they were"
        ) from error

    def _claimed(self, directory: CheckpointDirectory) -> OwnershipClaim:
        if self._claim is None:

            def claim() -> OwnershipClaim:
                mine = OwnershipClaim(uid=os.environ.get(Env.JOB_UID, ""), attempt=environment_integer(Env.ATTEMPT, 0))
                directory.claim(mine)
                if self.memory is None:
                    directory.forget_memory()
                return mine

            self._claim = broadcast_from_zero(claim)
        return self._claim

    def _manifest(self, state: TrainState, claim: OwnershipClaim) -> Manifest:
        parts = self._saved_parts()
        kind = "distributed" if self._config.parallel.use_distributed_optimizer else "plain"
        return Manifest(
            iteration=state.iteration,
            consumed_samples=state.consumed_samples,
            skipped_iterations=state.skipped_iterations,
            attempt=claim.attempt,
            layout=_sizes(self._layout),
            optimizer=kind if parts.optimizer else None,
            random_states=parts.random_states,
            arguments=arguments.record(self._config),
            order_samples=state.order_samples,
            perturbed=[dataclasses.asdict(entry) for entry in state.perturbed],
        )

    def _saved_parts(self) -> StateParts:
        flags = self._config.checkpoint
        return StateParts(optimizer=flags.save_optim, random_states=flags.save_rng, progress=True)

    def _load_other(self, state: TrainState) -> bool:
        flags = self._config.checkpoint
        if flags.load is None:
            return False
        found = not _loads_from_save(flags) and self._load_newest(
            CheckpointDirectory(pathlib.Path(flags.load)), state, finetune=flags.finetune
        )
        if not found and flags.exit_on_missing_checkpoint:
            raise CheckpointError(f"--load {flags.load} holds no checkpoint; check the path")
        if not found:
            _note(f"--load {flags.load} holds no checkpoint; training starts from the beginning")
        return found

    def _load_newest(
        self,
        directory: CheckpointDirectory,
        state: TrainState,
        *,
        finetune: bool,
        memory: "MemoryCheckpoints | None" = None,
    ) -> bool:
        candidates = broadcast_from_zero(lambda: [_inspect(path) for path in directory.checkpoints()])
        if all(candidate.manifest is None for candidate in candidates):
            other = broadcast_from_zero(lambda: foreign.answer(directory.path) or "")
            if other:
                raise CheckpointError(other)
        for candidate in candidates:
            manifest = candidate.manifest
            if memory is not None and manifest is not None and memory.resume(manifest.iteration, state):
                return True
            try:
                self._load(candidate, state, finetune=finetune)
            except BrokenCheckpointError as error:
                _note(f"checkpoint {candidate.path} is skipped: {error}")
            else:
                return True
        if memory is not None and memory.resume(NO_STEP, state):
            return True
        if candidates:
            raise CheckpointError(
                f"none of the {len(candidates)} checkpoints in {directory.path} is whole; bring one of them back, or "
                "start from the beginning with another directory for --save and --load"
            )
        return False

    def _load(self, candidate: _CheckpointCandidate, state: TrainState, *, finetune: bool) -> None:
        manifest = candidate.manifest
        if manifest is None:
            raise BrokenCheckpointError(candidate.flaw or "it cannot be read")
        parts = self._read_parts(manifest, candidate.path, finetune=finetune)
        if (reason := arguments.conflict(manifest.arguments, self._config, optimizer=parts.optimizer)) is not None:
            raise CheckpointError(f"{candidate.path}: {reason}")
        on_all_ranks(lambda: require_shared(candidate.path))
        verify(candidate.path, manifest, weights_alone=not parts.optimizer)
        if parts.optimizer and arguments.DECOUPLED not in manifest.arguments:
            self._check_decoupled(candidate.path)
        template = on_all_ranks(lambda: sharded_state(state, self._layout, parts, loading=True))
        loaded = read(template, candidate.path)
        agreement = Agreement()
        with agreement.attempt():
            groups = resume_rates.remember_groups(state)
            if parts.optimizer:
                resume_rates.mark_decoupled_groups(loaded["optimizer"])
            if parts.progress:
                self._check_schedules(loaded["opt_param_scheduler"], candidate.path, manifest, state)
            restore(state, loaded, parts)
            if parts.progress:
                resume_rates.settle(state, groups, loaded["opt_param_scheduler"], self._config.optimizer)
            self._text_tokens = _bytes_of(candidate.path / text_tokens.FILE)
        agreement.settle()
        if parts.progress:
            state.iteration = manifest.iteration
            state.consumed_samples = manifest.consumed_samples
            state.skipped_iterations = manifest.skipped_iterations
            state.perturbed = [PerturbedSteps(**entry) for entry in manifest.perturbed]
            state.order_samples = arguments.order_samples(manifest, self._config, self._layout.data_size)
        self._log_loaded(candidate.path, manifest, parts)

    def _check_decoupled(self, path: pathlib.Path) -> None:
        """Compare a setting that manifests of earlier releases lack. Collective."""
        there = any(resume_rates.decoupled_groups(read_common(path)["optimizer"]))
        reason = arguments.conflict({arguments.DECOUPLED: there}, self._config, optimizer=True)
        if reason is not None:
            raise CheckpointError(f"{path}: {reason}")

    def _check_schedules(
        self, stored: resume_rates.State, path: pathlib.Path, manifest: Manifest, state: TrainState
    ) -> None:
        reason = resume_rates.conflict(
            stored,
            resume_rates.state_of(state),
            arguments_there=manifest.arguments,
            config=self._config,
            optimizer=self._config.checkpoint.load_optim,
        )
        if reason is not None:
            raise CheckpointError(f"{path}: {reason}")

    def _read_parts(self, manifest: Manifest, path: pathlib.Path, *, finetune: bool) -> StateParts:
        flags = self._config.checkpoint
        if finetune:
            return StateParts(optimizer=False, random_states=False, progress=False)
        if arguments.holds_weights_alone(manifest.arguments):
            raise CheckpointError(f"{path} was converted and holds weights alone; give --finetune to start from them")
        if flags.load_optim and manifest.optimizer is None:
            raise CheckpointError(f"{path} holds no optimizer state; give --no-load-optim or --finetune to do without")
        here, there = _sizes(self._layout), manifest.layout
        same_states = all(here[name] == there.get(name) for name in ("tensor", "pipeline", "virtual"))
        loads_random_states = flags.load_rng and manifest.random_states
        if loads_random_states and not same_states:
            _note(f"random states in {path} belong to another layout; they start afresh from --seed")
        return StateParts(optimizer=flags.load_optim, random_states=loads_random_states and same_states, progress=True)

    def _log_loaded(self, path: pathlib.Path, manifest: Manifest, parts: StateParts) -> None:
        if not parts.progress:
            _print_notice(f"weights read from {path}")
            return
        _print_notice(
            f"resumed from {path}: iteration {manifest.iteration}, {manifest.consumed_samples} samples consumed"
        )
        if (note := arguments.notes(manifest.arguments, self._config)) is not None:
            _note(note)


def memory_checkpoints(config: TrainerConfig) -> "MemoryCheckpoints | None":
    """Open the checkpoints in memory; None, and nothing imported, without `--non-persistent-save-interval`."""
    if config.checkpoint.non_persistent_save_interval is None:
        return None
    from megatronapp_trainer.checkpoint.memory.checkpoints import MemoryCheckpoints

    return MemoryCheckpoints(config)


def _inspect(path: pathlib.Path) -> _CheckpointCandidate:
    try:
        return _CheckpointCandidate(path=path, manifest=read_manifest(path), flaw=None)
    except BrokenCheckpointError as error:
        return _CheckpointCandidate(path=path, manifest=None, flaw=str(error))


def _bytes_of(path: pathlib.Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _loads_from_save(flags: CheckpointConfig) -> bool:
    """Return True if `--load` and `--save` name the same directory."""
    if flags.load is None or flags.save is None:
        return False
    return pathlib.Path(flags.load).resolve() == pathlib.Path(flags.save).resolve()


def _note_unread(flags: CheckpointConfig) -> None:
    """Report that `--load` is not read, in the first attempt of a job; a restarted attempt has to continue."""
    if flags.load is not None and not _loads_from_save(flags) and environment_integer(Env.ATTEMPT, 0) == 0:
        _note(
            f"--load {flags.load} is not read, because --save {flags.save} holds checkpoints, from which this run "
            "continues; to start from --load, name an empty directory with --save"
        )


def _sizes(layout: Layout) -> dict[str, int]:
    return {
        "tensor": layout.tensor_size,
        "pipeline": layout.pipeline_size,
        "virtual": layout.virtual_size,
        "data": layout.data_size,
    }


def _describe_free_space(path: pathlib.Path) -> str:
    try:
        free_bytes = shutil.disk_usage(path).free
    except OSError:
        return ""
    return f"{free_bytes / 2**30:.2f} GiB are free there. "


def _print_notice(text: str) -> None:
    """Print a notice between rank 0's log lines."""
    if rank() == 0:
        print(text, flush=True)


def _note(text: str) -> None:
    if rank() == 0:
        logger.warning(text)
