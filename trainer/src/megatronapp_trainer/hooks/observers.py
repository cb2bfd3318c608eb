"""Two observers of the forward passes of one model."""

import dataclasses
from collections.abc import Hashable
from typing import Any

from megatronapp_trainer.hooks.forward_observer import ForwardObserver, ForwardResult, StepContext


@dataclasses.dataclass(frozen=True, slots=True)
class PairKey:
    """Keys of what two observers read of a step; None: the observer reads nothing."""

    first: Hashable
    second: Hashable


class ObserverPair:
    """Observer that calls two others. Steps that one of them ignores are as if it were not there."""

    def __init__(self, first: ForwardObserver, second: ForwardObserver) -> None:
        self._first = first
        self._second = second
        self._key = PairKey(None, None)

    def step_begin(self, step: StepContext, /) -> Hashable:
        """Begin a step of both; return the first one's key where the second reads nothing."""
        self._key = PairKey(self._first.step_begin(step), self._second.step_begin(step))
        return self._key.first if self._key.second is None else self._key

    def collect(self) -> Any:  # noqa: ANN401 - of the observers
        """Collect what each of them reads."""
        if self._key.second is None:
            return self._first.collect()
        return None if self._key.first is None else self._first.collect(), self._second.collect()

    def step_end(self, result: ForwardResult, /) -> None:
        """End the step for those that have read it."""
        key = self._key
        if key.second is None:
            self._first.step_end(result)
            return
        first, second = result.collected
        if key.first is not None:
            self._first.step_end(dataclasses.replace(result, collected=first))
        self._second.step_end(dataclasses.replace(result, collected=second))

    def settle(self) -> None:
        """Pass the call on to both."""
        self._first.settle()
        self._second.settle()

    def forget(self, key: Hashable) -> None:
        """Pass on the key to the observers that gave it."""
        if not isinstance(key, PairKey):
            self._first.forget(key)
            return
        if key.first is not None:
            self._first.forget(key.first)
        self._second.forget(key.second)
