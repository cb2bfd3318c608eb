"""Errors of megatronapp_trainer. Each class has the exit code its process ends with.

TrainerError               1  any error of the trainer
├── UsageError            64  flags or configuration that cannot work
├── DataError             65  training data that is corrupt, empty, missing or does not fit the model
├── UnsavedStopError       1  asked to stop without --save: a restart begins from the start
├── TaskOrderError         1  tasks of a step in an order that would change its sums, or one that never ran
├── SlotsExhaustedError    1  more microbatches in flight than there are recordings of passes
├── NotFiniteError        66  a loss became NaN or Inf
├── StorageError          67  a checkpoint, prepared corpus or log could not be written
├── CheckpointError       65  a checkpoint that cannot be read back into this run
├── RendezvousError       68  the gang did not gather
│   ├── RefusedError      68  worker 0 does not let this worker in
│   └── MessageError      68  bytes that are not a message between launchers of this gang
├── StoppedError          75  a worker of the gang was asked to stop before its ranks began
├── PeerLostError         69  this process stopped because a peer was lost
├── TransferError          1  ranks that do not agree about a transfer, or damaged shared memory
│   └── WeightVersionError 1  forward passes of MegaFBD with other weights than those of the step
└── SupersededError       70  a newer attempt, or another job, owns the checkpoint directory
"""

from collections.abc import Sequence
from typing import ClassVar

from megatronapp_common.names import ExitCode


class TrainerError(Exception):
    """Base of every error this package raises. Its text says what is wrong, where, and what to do."""

    exit_code: ClassVar[ExitCode] = ExitCode.OWN_FAILURE


class UsageError(TrainerError):
    """Flags or a configuration that cannot work."""

    exit_code = ExitCode.USAGE


class UsageErrors(UsageError):
    """All problems of a command line; its text has one line for each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class DataError(TrainerError):
    """Training data that is corrupt, empty, missing or does not fit the model."""

    exit_code = ExitCode.DATA


class UnsavedStopError(TrainerError):
    """Asked to stop without `--save`. A failure, so that restarts from the start are counted against the budget."""


class TaskOrderError(TrainerError):
    """Tasks of a training step ran in an order that would change its sums of gradients, or one never ran."""


class SlotsExhaustedError(TrainerError):
    """More microbatches of a chunk were in flight than its schedule has, by which recordings of passes are counted."""


class NotFiniteError(TrainerError):
    """A loss became NaN or Inf."""

    exit_code = ExitCode.NOT_FINITE


class StorageError(TrainerError):
    """A checkpoint, prepared corpus or log could not be written."""

    exit_code = ExitCode.STORAGE


class SupersededError(TrainerError):
    """A newer attempt of this job, or another job, owns the checkpoint directory; this one must not write there."""

    exit_code = ExitCode.SUPERSEDED


class CheckpointError(TrainerError):
    """A checkpoint that cannot be read back into this run."""

    exit_code = ExitCode.DATA


class RendezvousError(TrainerError):
    """The gang did not gather."""

    exit_code = ExitCode.RENDEZVOUS


class RefusedError(RendezvousError):
    """Worker 0 does not let this worker in. `final`: trying again cannot help."""

    def __init__(self, reason: str, *, final: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.final = final


class MessageError(RendezvousError):
    """Bytes that are not a message between launchers of this gang."""


class StoppedError(TrainerError):
    """A worker of the gang was asked to stop before its ranks began."""

    exit_code = ExitCode.PREEMPTED


class PeerLostError(TrainerError):
    """This process stopped because a peer was lost; the evidence is with that peer."""

    exit_code = ExitCode.PEER_LOST


class TransferTimeoutError(PeerLostError):
    """A peer that lives sent or took nothing within the deadline."""


class TransferError(TrainerError):
    """Ranks that use transfers wrongly or do not agree about them, or damaged shared memory."""


class WeightVersionError(TransferError):
    """Forward passes of MegaFBD with other weights than those that the step is for."""
