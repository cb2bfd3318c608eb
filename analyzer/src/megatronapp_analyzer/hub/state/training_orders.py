"""Orders to the training, from their acceptance to the step from which the ranks obey them."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from megatronapp_analyzer.hub.ingest.spool import JsonFile
from megatronapp_analyzer.hub.state.progress import ControlProgress
from megatronapp_common.control.orders import ControlState, Order, OrderKind, PerturbationTarget, TrainingState
from megatronapp_common.errors import OrderError
from megatronapp_common.scope.perturbation.recipe import digest_of
from megatronapp_common.web.problems import HttpError

MAX_STORED = 32
"""Orders that are stored and shown, the newest."""
MAX_PENDING = 8
"""Orders that wait for the ranks; the control document is small."""
RESTARTED = "the ranks were restarted before it took effect"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoredOrder:
    """An order, and what became of it."""

    id: str
    number: int
    attempt: int
    kind: OrderKind
    steps: int
    who: str
    at: float
    """Seconds since 1970."""
    every: int | None = None
    """Interval of a `capture`; 0: none, None: the next step."""
    recipe: str | None = None
    """Canonical JSON of the recipe of a `perturb`."""
    target: str = PerturbationTarget.MODEL.value
    """Parameters that it changes."""
    replica: int | None = None
    """Data-parallel replica that it changes; None: all alike."""
    from_step: int | None = None
    """Steps done when it took effect; None until the ranks have decided."""
    refusal: str | None = None
    """Reason why it changes nothing."""

    @property
    def is_pending(self) -> bool:
        """Return True until the ranks have decided."""
        return self.from_step is None and self.refusal is None

    @property
    def order(self) -> Order:
        """Return the order as the ranks get it."""
        return Order(
            self.number,
            self.kind,
            self.steps,
            self.every,
            recipe=self.recipe,
            target=PerturbationTarget(self.target),
            replica=self.replica,
        )

    @property
    def digest(self) -> str | None:
        """Return the name of the recipe of a `perturb`."""
        return None if self.recipe is None else digest_of(self.recipe)


def described(order: StoredOrder) -> str:
    """Describe an order, and what became of it, as an action of its client."""
    if order.is_pending or order.refusal is not None:
        void = f", without effect: {order.refusal}" if order.refusal is not None else ""
        return f"ordered the training {_intent(order)}{void}"
    at = f"after {order.from_step} step{'s' * (order.from_step != 1)}"
    if order.kind is OrderKind.CAPTURE:
        return f"set the training {_intent(order)} {at}"
    if order.kind is OrderKind.UNDO:
        return f"ended the perturbation of the training {at}"
    if order.kind is OrderKind.PERTURB:
        return f"perturbed the training with recipe {order.digest} {at}"
    done = {"pause": "paused", "resume": "resumed", "step": "stepped", "stop": "stopped"}[order.kind]
    of_steps = f" by {_count(order.steps)}" if order.kind is OrderKind.STEP else ""
    return f"{done} the training{of_steps} {at}"


def _intent(order: StoredOrder) -> str:
    if order.kind is OrderKind.STEP:
        return f"to run {_count(order.steps)}"
    if order.kind is OrderKind.PERTURB:
        return f"to compute with perturbation {order.digest}"
    if order.kind is OrderKind.UNDO:
        return "to end its perturbation"
    if order.kind is not OrderKind.CAPTURE:
        return f"to {order.kind}"
    if order.every is None:
        return "to capture the next step"
    return f"to capture every {_count(order.every)}" if order.every else "to capture no step"


def _count(steps: int) -> str:
    return f"{steps} step{'s' * (steps != 1)}"


class TrainingOrders:
    """Orders of one job. They survive a restart of the hub, so that one is never given twice."""

    def __init__(self, path: pathlib.Path | None, *, writable: bool = True) -> None:
        self._file = JsonFile(path, writable=writable)
        stored = self._file.read() or {}
        self._orders = [StoredOrder(**entry | {"kind": OrderKind(entry["kind"])}) for entry in stored.get("orders", ())]
        self._newest = max((order.number for order in self._orders), default=0)
        self._attempt: int | None = None
        self._state: ControlState | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.on_decision: Callable[[StoredOrder], None] = lambda _: None
        """Takes each order once the ranks have decided on it."""

    @property
    def newest_first(self) -> list[StoredOrder]:
        """Return the stored orders."""
        return self._orders[::-1]

    @property
    def reported(self) -> ControlState | None:
        """Return the state that the ranks have reported; None before they have."""
        return self._state

    @property
    def expected(self) -> ControlState | None:
        """Return the state once the ranks have obeyed all orders; None before they have reported one."""
        state = self._state
        if state is None:
            return None
        for stored in self._pending():
            try:
                state = state.after(stored.order)
            except OrderError:  # the state has changed since it was accepted; the ranks refuse it, too
                continue
        return state

    def document(self, attempt: int) -> dict[str, Any]:
        """Return the orders that the ranks of an attempt have not decided yet, for the control document."""
        pending = [stored.order.to_json() for stored in self._orders if stored.attempt == attempt and stored.is_pending]
        return {"attempt": attempt, "orders": pending}

    def find(self, order_id: str) -> StoredOrder | None:
        """Return the order of this id."""
        return next((order for order in self._orders if order.id == order_id), None)

    def add(self, order_id: str, order: Order, *, who: str, at: float, saves: bool) -> StoredOrder:
        """Accept an order, whose number is set here. Raises HttpError 409 if it does not fit the state."""
        expected = self.expected
        if expected is None or self._attempt is None:
            raise HttpError(409, "not-training", "the ranks do not train yet", "Wait until the job is running.")
        if len(self._pending()) >= MAX_PENDING:
            raise HttpError(
                409, "orders-wait", f"{MAX_PENDING} orders wait for the ranks", "Wait until they have taken effect."
            )
        if order.kind is OrderKind.PERTURB and any(stored.kind is OrderKind.PERTURB for stored in self._pending()):
            raise HttpError(409, "orders-wait", "a perturbation waits for the ranks", "Wait until it has taken effect.")
        if order.kind is OrderKind.STOP and not saves:
            raise HttpError(
                409,
                "nothing-saved",
                "a stop writes a checkpoint, and this job saves none",
                "Delete or suspend the job, or start it with spec.checkpoint.save.",
            )
        try:
            expected.after(order)
        except OrderError as error:
            raise HttpError(409, "order-refused", error.reason, f"{error.hint[:1].upper()}{error.hint[1:]}.") from error
        self._newest += 1
        stored = StoredOrder(
            id=order_id,
            number=self._newest,
            attempt=self._attempt,
            kind=order.kind,
            steps=order.steps,
            every=order.every,
            recipe=order.recipe,
            target=order.target.value,
            replica=order.replica,
            who=who,
            at=at,
        )
        self._orders = [*self._orders, stored][-MAX_STORED:]
        self._changed()
        return stored

    def observe(self, attempt: int, report: ControlProgress | None) -> None:
        """Take over what the ranks of an attempt have reported."""
        if self._attempt is not None and attempt < self._attempt:
            return
        if attempt != self._attempt:
            self._attempt, self._state = attempt, None
        if report is None:
            return
        self._state = ControlState(TrainingState(report.state), report.steps_left)
        # A hub that has lost its orders must not use their numbers again: the ranks have seen them.
        self._newest = max(self._newest, *(order.number for order in report.orders), 0)
        decided = {order.number: order for order in report.orders}
        changed = [self._decided(order, decided.get(order.number)) for order in self._orders]
        if changed == self._orders:
            return
        before, self._orders = self._orders, changed
        self._changed()
        for former, order in zip(before, changed, strict=True):
            if former.is_pending and not order.is_pending:
                self.on_decision(order)

    def _decided(self, order: StoredOrder, found: Any | None) -> StoredOrder:  # noqa: ANN401 - ObeyedOrder of a report
        if not order.is_pending:
            return order
        if order.attempt != self._attempt:
            return dataclasses.replace(order, refusal=RESTARTED)
        if found is None:
            return order
        return dataclasses.replace(order, from_step=found.step, refusal=found.refusal)

    def _pending(self) -> list[StoredOrder]:
        return [order for order in self._orders if order.is_pending and order.attempt == self._attempt]

    def _changed(self) -> None:
        self._file.write({"orders": [_entry(order) for order in self._orders]})
        self.on_change()


def _entry(order: StoredOrder) -> Mapping[str, Any]:
    return dataclasses.asdict(order) | {"kind": order.kind.value}
