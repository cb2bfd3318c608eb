"""Observers of training steps. A loop without one pays nothing.

The loop holds ``observer: StepObserver | None``. The pipeline schedule announces forward and backward passes as they
happen. Other spans that megatron-core itself delimits (gradient reduction, optimizer, ...) reach the observer through
:class:`ObserverTimers`, which takes the place of Megatron's own timers in the model's and the optimizer's configuration
and exists only where there is an observer.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from megatronapp_common.trace import NO_MICROBATCH, RecordKind
from megatronapp_trainer.hooks.step_boundary import StepBoundary
from megatronapp_trainer.hooks.transfer_observer import TransferObserver
from megatronapp_trainer.parallel.transport import Transport

LM_LOSS = "lm loss"
"""Name of the loss of the language model in the log, as Megatron prints it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """Figures of one step, equal on all ranks except the gradient norm's last bits."""

    iteration: int
    """Steps done, this one included."""
    loss: float
    """Minimised sum: the mean over the step's unmasked tokens, and the means of further losses."""
    learning_rate: float
    grad_norm: float | None
    """None where the optimizer refused the update before it was computed."""
    tokens_per_second: float
    tflops_per_gpu: float
    """As Megatron-LM counts them: half of the attention, recomputation not counted."""
    mfu: float | None
    """`tflops_per_gpu` as a share of the device's peak; None where the peak is not known."""
    consumed_samples: int
    skipped: bool
    """True if the optimizer refused the update."""
    losses: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Mean of each loss by its name in the log; empty: there is only that of the language model."""
    loss_scale: float | None = None
    """Factor of the loss after the step, with fp16."""
    memory_gib: tuple[float, float] | None = None
    """Most memory that tensors took, and that torch reserved, since the last log line; None where none is due."""

    @property
    def named_losses(self) -> Mapping[str, float]:
        """Return the mean of each loss by its name in the log."""
        return self.losses or {LM_LOSS: self.loss}


CollectiveSpan = Callable[[Callable[[], None]], None]
"""Runs a function that replays a collective, and records when it began and ended, as part of the pass that is open."""


class CollectiveIsolator(Protocol):
    """Takes the first collective of a pass that is recorded, to be replayed apart from what is before and after it."""

    def __call__(self, call: Callable[[], Any], span: CollectiveSpan) -> Any:  # noqa: ANN401 - of the collective
        """Record `call` as a separate part, which each replay of the pass runs by `span`. Returns its result."""


class PassCollectives(Protocol):
    """Observer of the collectives over the tensor group within passes."""

    def recording(self, isolate: CollectiveIsolator) -> contextlib.AbstractContextManager[None]:
        """Within the context a pass is recorded: `isolate` gets its first collective, and none is observed.

        That collective does not overlap compute, also where it does in passes without a recording.
        """


class StepObserver(StepBoundary[int, StepMetrics | None], Protocol):
    """Observer of one rank's training loop, called on its thread.

    ``step_begin`` gets the number of the iteration, counted from 0 over the whole job; ``step_end`` the figures of the
    step, the optimizer's update included; None on a rank that only runs forward passes.

    Made by ``scan.start(RunContext)``, collectively, once groups, model and optimizer exist. ``begin`` and ``end``
    delimit DATA, FORWARD, BACKWARD, WEIGHT, GRAD_REDUCE, PARAM_GATHER, EMBED_REDUCE, GRAD_NORM, OPTIMIZER, LOSS_REDUCE,
    EVALUATE, CHECKPOINT, PAUSE, CAPTURE, PERTURB and GC; STEP is the observer's own, from ``step_begin`` to
    ``step_end``.
    DATA lies before FORWARD, never inside. Transfers are recorded by the transport that ``wrap_transport`` returns, and
    those of tasks by ``transfers``.
    """

    @property
    def transfers(self) -> TransferObserver:
        """Return the observer of transfers in any order."""

    @property
    def collectives(self) -> PassCollectives | None:
        """Return the observer of collectives within passes; None on a rank without tensor parallelism."""

    def observes_parts(self, *, anywhere: bool) -> bool:
        """Return True in a step in which parts of passes are observed, which replays do not show.

        That is the same on all ranks of a tensor group. With `anywhere` it is True on all ranks of the job if it is
        True on some of them.
        """

    def announcement(self) -> Sequence[float]:
        """Return figures that are added up over all ranks with the losses of the step: as many on each rank, most of
        the time 0. Called once its passes have been launched.
        """

    def agreed(self, sums: Sequence[float]) -> None:
        """Take the sums of these figures over all ranks, before the step ends."""

    def wrap_transport(self, transport: Transport) -> Transport:
        """Return the transport of training steps, which delegates to this one; called once where there are stages."""

    def begin(self, kind: RecordKind, chunk: int, microbatch: int, *, early: bool = False) -> None:
        """A span begins; microbatch is NO_MICROBATCH where the span belongs to none.

        `early`: a pass that runs before its turn in the plan.
        """

    def end(self, kind: RecordKind) -> None:
        """The span of this kind has ended."""

    def work(self, microbatch: int, *, tokens: int, pairs: int) -> None:
        """The work of a microbatch of this step is known, where microbatches differ in shape; called within DATA."""

    def validation(self, loss: float) -> None:
        """An evaluation has ended; called on every rank."""

    def heartbeat(self) -> None:
        """The rank lives, within a span that takes long."""

    def close(self) -> None:
        """Training has ended, or failed."""


class ObservedTimer:
    """A timer of megatron-core: an object with start and stop."""

    __slots__ = ("start", "stop")

    def __init__(self, start: Callable[..., None], stop: Callable[..., None]) -> None:
        self.start = start
        self.stop = stop


def ignore_timer(*_args: object, **_kwargs: object) -> None:
    """Megatron's timers that no observer wants."""


_TIMED_BY_MEGATRON = {
    "all-grads-sync": RecordKind.GRAD_REDUCE,
    "embedding-grads-all-reduce": RecordKind.EMBED_REDUCE,
    "non-tensor-parallel-grads-all-reduce": RecordKind.EMBED_REDUCE,
    "optimizer-inner-step": RecordKind.OPTIMIZER,
    "params-all-gather": RecordKind.PARAM_GATHER,
}
"""Megatron's timer names and the spans they delimit."""


class ObserverTimers:
    """A callable in the place of Megatron's timers: ``timers(name, log_level=...)`` gives start and stop."""

    def __init__(self, observer: StepObserver) -> None:
        self._observer = observer
        self._spans = {name: self._span(kind) for name, kind in _TIMED_BY_MEGATRON.items()}
        self._ignored = ObservedTimer(ignore_timer, ignore_timer)

    def __call__(self, name: str, log_level: int | None = None) -> ObservedTimer:
        """The span of that timer, or one that does nothing."""
        return self._spans.get(name, self._ignored)

    def timed(self, kind: RecordKind, function: Callable[[], Any]) -> Callable[[], Any]:
        """`function` with a span around it: megatron-core's ChainedOptimizer has no timer for the gradient norm."""

        def timed() -> Any:  # noqa: ANN401 - what the function gives
            self._observer.begin(kind, 0, NO_MICROBATCH)
            result = function()
            self._observer.end(kind)
            return result

        return timed

    def _span(self, kind: RecordKind) -> ObservedTimer:
        return ObservedTimer(
            lambda **_kwargs: self._observer.begin(kind, 0, NO_MICROBATCH), lambda: self._observer.end(kind)
        )
