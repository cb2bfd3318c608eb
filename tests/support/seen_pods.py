"""Workers as a backend sees those that restart in place, and the actions of a plan about them."""

import dataclasses
from typing import Any

from megatronapp_operator.plan import RecordEvent, WorkerOutcome, WorkerPhase


def actions(made: Any) -> list[Any]:
    """Actions that change something."""
    return [action for action in made.actions if not isinstance(action, RecordEvent)]


def sound(worker: Any, **changes: Any) -> Any:
    """A running pod that may continue."""
    return dataclasses.replace(worker, **{"reusable": True, "node": f"n{worker.index}", "started_at": 900.0} | changes)


def standby(worker: Any, code: int, reason: str = "RankFailed", **changes: Any) -> Any:
    """A pod whose ranks have ended while its launcher waits."""
    outcome = WorkerOutcome(code=code, reason=reason, message="words", rank=worker.index)
    return sound(
        dataclasses.replace(worker, phase=WorkerPhase.FAILED, finished_at=1000.0, outcome=outcome),
        standby=True,
        **changes,
    )
