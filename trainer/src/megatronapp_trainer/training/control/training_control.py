"""Pause, resume, step, stop and captures of a running training, at the same step boundary on all ranks.

Rank 0 reads its control document at a step boundary and posts the orders to all ranks, which wait for them at the next
boundary and obey there: no step waits for an order, and no two ranks obey at different steps. In a pause the ranks meet
on the host every `PAUSE_ROUND_S`, so that no deadline of a collective strikes and nothing runs on a device.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from megatronapp_common.control.orders import BY_ITSELF, ControlState, Order, OrderKind, TrainingState
from megatronapp_common.errors import OrderError
from megatronapp_common.trace import NO_MICROBATCH, RecordKind
from megatronapp_trainer.hooks.boundary_control import BoundaryDecision
from megatronapp_trainer.hooks.step_observer import StepObserver
from megatronapp_trainer.hooks.training_capture import TrainingCapture
from megatronapp_trainer.hooks.training_perturbation import TrainingPerturbation
from megatronapp_trainer.training.control.group import ControlGroup, PendingOrders, fitting
from megatronapp_trainer.training.control.order_reader import OrderReader
from megatronapp_trainer.training.control.report import MAX_REPORTED, ControlReport, ObeyedOrder

log = logging.getLogger(__name__)
PAUSE_ROUND_S = 1.0
"""Most time between two exchanges of a paused training."""
POLL_S = 0.05
"""Time between two reads of the control document by rank 0 in a pause."""
SPAN_S = 30.0
"""Length after which the span of a pause ends and another one begins: a record holds at most 34 s."""


class ControlSurroundings(Protocol):
    """Effects of a rank around orders."""

    def announce(self) -> None:
        """Call the ranks that only run forward passes to the step boundary."""

    def stop_requested(self) -> bool:
        """Return whether this rank was asked to stop by a signal."""

    def settle(self) -> None:
        """Wait until the device has nothing left to do."""

    def publish(self, report: ControlReport) -> None:
        """Show the state to users; on the reporting rank."""


class RefusedOrderError(Exception):
    """Refusal of an order by some rank, in its words."""


class PauseSpan:
    """Spans of a pause, as long together as the pause."""

    def __init__(self, observer: StepObserver | None, now_s: Callable[[], float] = time.monotonic) -> None:
        """Begin the first one."""
        self._observer = observer
        self._now_s = now_s
        self._begin()

    def continues(self) -> None:
        """Report that the rank lives; begins another span where the open one is long."""
        if self._observer is None:
            return
        self._observer.heartbeat()
        if self._now_s() - self._began_s > SPAN_S:
            self.end()
            self._begin()

    def end(self) -> None:
        """End the open span."""
        if self._observer is not None:
            self._observer.end(RecordKind.PAUSE)

    def _begin(self) -> None:
        self._began_s = self._now_s()
        if self._observer is not None:
            self._observer.begin(RecordKind.PAUSE, 0, NO_MICROBATCH)


class TrainingControl:
    """Decides at every step boundary of a rank whether the training continues; all ranks decide the same."""

    def __init__(
        self,
        group: ControlGroup,
        reader: OrderReader | None,
        surroundings: ControlSurroundings,
        *,
        state: ControlState,
        saves: bool,
        resume_after_s: float | None = None,
        observer: StepObserver | None = None,
        capture: TrainingCapture | None = None,
        perturbation: TrainingPerturbation | None = None,
    ) -> None:
        """Take the group, and on rank 0 the reader of orders.

        Args:
            group: all ranks of the job.
            reader: of orders, on rank 0; None on the others.
            surroundings: effects of this rank.
            state: at the first boundary.
            saves: whether a stop can write a checkpoint.
            resume_after_s: length after which rank 0 ends a pause in which no client controls the training.
            observer: of this rank's spans.
            capture: of this rank; None where steps cannot be captured.
            perturbation: of this rank; None on all ranks where the training cannot be perturbed.
        """
        self._group = group
        self._reader = reader
        self._surroundings = surroundings
        self._state = state
        self._saves = saves
        self._resume_after_s = resume_after_s
        self._observer = observer
        self._capture = capture
        self._perturbation = perturbation
        self._pending: PendingOrders | None = None
        self._is_first_boundary = True
        self._paused_since: float | None = None
        self._paused_seconds = 0.0
        self._obeyed: list[ObeyedOrder] = []
        self._perturbed: list[dict[str, Any]] = []
        """Perturbed steps as they were published last."""

    @property
    def obeyed(self) -> list[ObeyedOrder]:
        """Return the newest orders with the steps from which they hold."""
        return list(self._obeyed)

    def at_boundary(self, iteration: int) -> BoundaryDecision:
        """Obey the orders that hold after `iteration` steps; returns once the training is to continue or to end.

        Collective over all ranks of the job. Raises RuntimeError of torch if a rank is lost.
        """
        self._surroundings.announce()
        before, orders = self._state, []
        if not self._is_first_boundary:
            self._state = self._state.after_step()
        if self._pending is not None:
            orders = self._pending.read()
            self._obey(orders, iteration)
            self._pending = None
        is_changed = self._is_first_boundary or self._state != before or orders or self._has_new_perturbed_steps()
        self._is_first_boundary = False
        if self._state.state is TrainingState.PAUSED:
            if self._pause(iteration):
                return self._ended(BoundaryDecision.PREEMPT)
        elif is_changed:
            self._publish()
        if self._state.state is TrainingState.STOPPING:
            return self._ended(BoundaryDecision.STOP)
        self._pending = self._group.post(iteration, self._next_orders())
        return BoundaryDecision.CONTINUE

    def close(self) -> None:
        """Wait for the last broadcast; orders after the last step have no effect."""
        if self._pending is not None:
            self._pending.read()
            self._pending = None

    def _ended(self, decision: BoundaryDecision) -> BoundaryDecision:
        """Undo what no step has used: the checkpoint that follows would have it, without a step that says so."""
        if self._perturbation is not None:
            self._perturbation.undo_unused()
            if self._has_new_perturbed_steps():
                self._publish()
        return decision

    def _pause(self, iteration: int) -> bool:
        """Wait for orders until the pause has ended; True if a signal to some rank ends it.

        The pause is published once the device has settled, with its beginning, and its end with its length.
        """
        self._surroundings.settle()
        self._paused_since = time.time()
        began_s = attended_s = time.monotonic()
        renewals = self._renewals()
        self._publish()
        stopped = False
        span = PauseSpan(self._observer)
        while self._state.state is TrainingState.PAUSED and not stopped:
            if self._renewals() != renewals:
                attended_s, renewals = time.monotonic(), self._renewals()
            orders = self._await_orders(attended_s)
            span.continues()
            orders, stopped = self._group.exchange(iteration, orders, stop=self._surroundings.stop_requested())
            self._obey(orders, iteration)
            if orders and self._state.state is TrainingState.PAUSED:
                self._publish()
        span.end()
        self._paused_seconds += time.monotonic() - began_s
        self._paused_since = None
        self._publish()
        return stopped and self._state.state is not TrainingState.STOPPING  # an order to stop is obeyed as such

    def _await_orders(self, attended_s: float) -> list[Order]:
        """Return the orders of the next exchange: on rank 0 once there are some or the round is over."""
        if self._reader is None:
            return []
        round_ends_s = time.monotonic() + PAUSE_ROUND_S
        while not (self._reader.read() or self._surroundings.stop_requested()):
            now_s = time.monotonic()
            if self._resume_after_s is not None and now_s - attended_s > self._resume_after_s:
                log.warning("no client has controlled the paused training for %g s: it resumes", self._resume_after_s)
                return [Order(BY_ITSELF, OrderKind.RESUME)]
            if now_s >= round_ends_s:
                return []
            time.sleep(POLL_S)
        return self._next_orders()

    def _next_orders(self) -> list[Order]:
        if self._reader is None:
            return []
        orders = fitting(self._reader.read())
        self._reader.taken(orders)
        return orders

    def _renewals(self) -> int:
        return 0 if self._reader is None else self._reader.renewals

    def _obey(self, orders: list[Order], iteration: int) -> None:
        for order in orders:
            refusal = None
            try:
                if order.kind is OrderKind.STOP and not self._saves:
                    raise OrderError(
                        "a stop writes a checkpoint, and this run has no --save", "delete the job, or give --save"
                    )
                self._state = self._state.after(order)
                if order.kind is OrderKind.CAPTURE:
                    self._order_capture(order)
                elif order.kind in {OrderKind.PERTURB, OrderKind.UNDO}:
                    self._order_perturbation(order, iteration)
            except (OrderError, RefusedOrderError) as error:
                refusal = str(error)
            log.info("order %d (%s) after %d steps: %s", order.number, order, iteration, refusal or self._state.state)
            self._obeyed = [*self._obeyed, ObeyedOrder(order.number, iteration, refusal)][-MAX_REPORTED:]

    def _order_capture(self, order: Order) -> None:
        if self._capture is None:
            raise OrderError("this training captures no steps", "start it by megatronapp run")
        self._capture.order(order.every)

    def _order_perturbation(self, order: Order, iteration: int) -> None:
        """Perturb, or undo. All ranks do it or none: one that lacks memory refuses for all."""
        perturbation = self._perturbation
        if perturbation is None:
            raise OrderError("this training cannot be perturbed", "start it by megatronapp run")
        if order.kind is OrderKind.UNDO:
            perturbation.undo()
            return
        problem = ""
        try:
            perturbation.prepare(order, iteration)
        except OrderError as error:
            problem = str(error)
        if problem := self._group.first_problem(problem):
            perturbation.discard()
            raise RefusedOrderError(problem)
        perturbation.commit()

    def _has_new_perturbed_steps(self) -> bool:
        return self._perturbation is not None and self._perturbation.steps != self._perturbed

    def _publish(self) -> None:
        if self._perturbation is not None:
            self._perturbed = self._perturbation.steps
        self._surroundings.publish(
            ControlReport(
                state=self._state,
                paused_since=self._paused_since,
                paused_seconds=self._paused_seconds,
                saves=self._saves,
                resume_after_s=self._resume_after_s,
                perturbation=None if self._perturbation is None else self._perturbation.active,
                perturbed_steps=self._perturbed,
                capture_every=None if self._capture is None else self._capture.every or None,
                orders=tuple(self._obeyed),
            )
        )
