"""Orders to a running training, and the states between which they lead.

running --pause--> paused --resume--> running
                   paused --step n--> stepping --n steps--> paused
any state --stop--> stopping
any state but stopping --capture, perturb, undo--> the same

Hub and ranks use the same rules: the hub refuses an order that does not fit before it sends it, and the ranks decide
again at the step boundary at which they obey.
"""

import dataclasses
import enum
import json
from collections.abc import Mapping
from typing import Any, Self

from megatronapp_common.errors import OrderError

MAX_STEPS = 1_000_000
"""Most steps of one order."""
MAX_RECIPE_BYTES = 1024
"""Most bytes of a recipe's canonical JSON."""
MAX_ORDER_BYTES = 2000
"""Most bytes of an order as JSON, without its number: the ranks exchange orders in messages of a fixed size."""
BY_ITSELF = 0
"""Number of an order that rank 0 gives by itself, because no client controls the training any more."""


class OrderKind(enum.StrEnum):
    """Kinds of orders that a training obeys."""

    PAUSE = "pause"
    RESUME = "resume"
    STEP = "step"
    """Run some steps, then pause again."""
    STOP = "stop"
    """Write a checkpoint and end."""
    CAPTURE = "capture"
    """Capture the next step, or every n-th one, or none."""
    PERTURB = "perturb"
    """Perturb parameters for a step, or activations until `undo` or for some steps."""
    UNDO = "undo"
    """End a perturbation; parameters are restored if no step has used them."""


class PerturbationTarget(enum.StrEnum):
    """Parameters that a perturbation of a training changes."""

    MODEL = "model"
    """Parameters that the passes of the next step compute with; the optimizer updates the undisturbed values."""
    MASTER = "master"
    """Parameters that the optimizer updates, with 32 bits; for good unless undone before the next step."""


class TrainingState(enum.StrEnum):
    """State of a training that can be controlled, equal on all its ranks at a step boundary."""

    RUNNING = "running"
    PAUSED = "paused"
    STEPPING = "stepping"
    STOPPING = "stopping"


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """An order. `number` grows from order to order of a job and identifies it between hub and ranks."""

    number: int
    kind: OrderKind
    steps: int = 0
    """Steps to run, for `step`; steps in which activations are perturbed, for `perturb` (0: until `undo`)."""
    every: int | None = None
    """Steps from one capture to the next, for `capture` alone; 0: none, None: the next step once."""
    recipe: str | None = None
    """Canonical JSON of the recipe, for `perturb` alone."""
    target: PerturbationTarget = PerturbationTarget.MODEL
    """Parameters that storage perturbations of the recipe change."""
    replica: int | None = None
    """Data-parallel replica that is perturbed; None: all alike."""

    def __str__(self) -> str:
        """Return kind and numbers, as `step x 3` and `capture every 50`."""
        if self.kind is OrderKind.STEP:
            return f"{self.kind} x {self.steps}"
        return self.kind if self.every is None else f"{self.kind} every {self.every}"

    @classmethod
    def from_json(cls, document: object) -> Self:
        """Parse an order of the control document. Raises OrderError for one of another shape or of an unknown kind."""
        if not isinstance(document, Mapping):
            raise OrderError(f"order {document!r} is no object", "give number, kind and, for step, steps")
        try:
            every = document.get("every")
            order = cls(
                int(document["number"]),
                OrderKind(document["kind"]),
                int(document.get("steps", 0)),
                None if every is None else int(every),
                document.get("recipe"),
                PerturbationTarget(document.get("target", PerturbationTarget.MODEL)),
                None if document.get("replica") is None else int(document["replica"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise OrderError(f"order {dict(document)}: {error!r}", "give number, kind and, for step, steps") from error
        if order.every is not None and not 0 <= order.every <= MAX_STEPS:
            raise OrderError(f"order {order.number}: every is {order.every}", f"give 0 to {MAX_STEPS}")
        if order.recipe is not None:
            check_recipe_size(order.recipe)
        if order.kind is OrderKind.STEP and not 1 <= order.steps <= MAX_STEPS:
            raise OrderError(f"order {order.number}: steps is {order.steps}", f"give 1 to {MAX_STEPS}")
        return order

    def to_json(self) -> dict[str, Any]:
        """Return the order as the control document holds it."""
        fields: dict[str, Any] = {"number": self.number, "kind": self.kind.value}
        if self.kind is OrderKind.PERTURB:
            perturbed = {"recipe": self.recipe, "target": self.target.value, "steps": self.steps}
            return fields | perturbed | ({} if self.replica is None else {"replica": self.replica})
        if self.kind is OrderKind.STEP:
            return fields | {"steps": self.steps}
        return fields | ({} if self.every is None else {"every": self.every})


def check_recipe_size(recipe: object) -> None:
    """Raise OrderError unless this is the canonical JSON of a recipe that fits into an order."""
    if not isinstance(recipe, str) or not recipe:
        raise OrderError("the order has no recipe", "give one with at least one perturbation")
    if (size := len(recipe.encode())) > MAX_RECIPE_BYTES:
        raise OrderError(
            f"the recipe takes {size} bytes, and an order to a training holds {MAX_RECIPE_BYTES}",
            "choose fewer perturbations, layers or positions",
        )


def check_order_size(order: Order) -> None:
    """Raise OrderError unless the ranks can exchange the order: quotes of its recipe are escaped again there."""
    if (size := len(json.dumps(order.to_json(), separators=(",", ":")))) > MAX_ORDER_BYTES:
        raise OrderError(
            f"the order takes {size} bytes, and an order to a training holds {MAX_ORDER_BYTES}",
            "choose fewer perturbations, layers or positions",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class ControlState:
    """State of a training, with the steps that a `step` order has left."""

    state: TrainingState
    steps_left: int = 0

    def after_step(self) -> "ControlState":
        """Return the state once a step has ended."""
        if self.state is not TrainingState.STEPPING:
            return self
        if self.steps_left > 1:
            return ControlState(TrainingState.STEPPING, self.steps_left - 1)
        return ControlState(TrainingState.PAUSED)

    def after(self, order: Order) -> "ControlState":
        """Return the state that an order leads to. Raises OrderError if it does not fit this state."""
        refusal = _REFUSALS.get((self.state, order.kind))
        if refusal is not None:
            raise OrderError(*refusal)
        if order.kind is OrderKind.STEP:
            return ControlState(TrainingState.STEPPING, order.steps)
        if order.kind in {OrderKind.CAPTURE, OrderKind.PERTURB, OrderKind.UNDO}:
            return self
        return ControlState(_TARGETS[order.kind])


RUNNING = ControlState(TrainingState.RUNNING)
PAUSED = ControlState(TrainingState.PAUSED)
_TARGETS = {
    OrderKind.PAUSE: TrainingState.PAUSED,
    OrderKind.RESUME: TrainingState.RUNNING,
    OrderKind.STOP: TrainingState.STOPPING,
}
_STOPPING = ("the training is stopping", "wait until it has ended, and start it again")
_REFUSALS = {
    (TrainingState.RUNNING, OrderKind.RESUME): ("the training runs already", "pause it first"),
    (TrainingState.RUNNING, OrderKind.STEP): ("the training runs, and single steps begin in a pause", "pause it first"),
    (TrainingState.PAUSED, OrderKind.PAUSE): ("the training is paused already", "resume it, or run single steps"),
    (TrainingState.STEPPING, OrderKind.STEP): (
        "the steps of an earlier order still run",
        "wait until they are done, or pause or resume the training",
    ),
    **{(TrainingState.STOPPING, kind): _STOPPING for kind in OrderKind},
}
"""Orders that do not fit a state: why, and what to do."""
