"""Spans of collectives over the tensor group: the first one of each pass in every step, all of them in a window.

megatron-core has no place to observe them, so that the functions that it calls are replaced: in each pass until the
first collective, or to its end in a window. A replaced function takes longer to call, and a pass calls hundreds. The
replacement adds no collective. It changes no argument, except that the first collective of a recorded pass is not
asynchronous: a CUDA graph cannot end between the begin of a collective and the wait for it.
"""

import contextlib
import functools
import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatronapp_common.trace import RecordKind, pass_ordinal
from megatronapp_trainer.hooks.step_observer import CollectiveIsolator
from megatronapp_trainer.scan.recorder import Recorder, RecordKey
from megatronapp_trainer.scan.windows.open_pass import OpenPass

_FUNCTIONS = {
    "all_reduce": RecordKind.TP_REDUCE,
    "reduce_scatter_tensor": RecordKind.TP_REDUCE,
    "all_gather_into_tensor": RecordKind.TP_GATHER,
}
_BOUND = {
    "dist_all_gather_func": RecordKind.TP_GATHER,
    "dist_reduce_scatter_func": RecordKind.TP_REDUCE,
}
"""Names under which modules of megatron-core hold functions of torch since they were imported."""
_BINDING_MODULES = ("megatron.core.tensor_parallel.mappings", "megatron.core.tensor_parallel.layers")


class TimedWork:
    """Handle of a collective that overlaps compute. Its span is what is left to wait for."""

    def __init__(self, work: Any, wait: Callable[[Callable[[], Any]], Any]) -> None:  # noqa: ANN401 - torch's Work
        self._work = work
        self._timed = wait

    def wait(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - torch's
        """Wait, recording how long."""
        return self._timed(lambda: self._work.wait(*arguments, **named))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - torch's
        return getattr(self._work, name)


class FinishedWork:
    """Handle of a collective that has ended for the stream that waits for it."""

    def wait(self, *_arguments: object, **_named: object) -> bool:
        """Return at once, as torch does for work that has ended."""
        return True


class ReplacedFunction:
    """A function of a module, and what takes its place for a while."""

    def __init__(self, module: object, name: str, timed: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Take the place of the function; `timed` makes the replacement."""
        self._module, self._name, self._timed = vars(module), name, timed
        self._original: Any = None
        self._replacement: Any = None

    def replace(self) -> None:
        """Put the replacement in its place."""
        found = self._module[self._name]
        if found is not self._original:
            self._original, self._replacement = found, self._timed(found)
        self._module[self._name] = self._replacement

    def restore(self) -> None:
        """Put the function back, unless another one has taken its place meanwhile."""
        if self._module[self._name] is self._replacement:
            self._module[self._name] = self._original


class TensorCollectives:
    """Records collectives of a rank over its tensor group, within passes."""

    def __init__(self, recorder: Recorder, group: dist.ProcessGroup, slot: int) -> None:
        """Take the group and its slot in the ring's table."""
        self._recorder = recorder
        self._group = group
        self._slot = slot
        self._pass: OpenPass | None = None
        self._numbers: Counter[RecordKind] = Counter()
        self._functions: list[ReplacedFunction] = []
        self._are_replaced = False
        self._is_recording = False
        self._isolate: CollectiveIsolator | None = None
        """Takes the next collective of the pass that is recorded."""
        self.recorded = 0
        """Spans so far."""
        self.records_all = False
        """True if all collectives are recorded, and not only the first of each pass."""

    def install(self) -> None:
        """Find the functions that run the collectives."""
        places: list[tuple[object, str, RecordKind]] = [(dist, name, kind) for name, kind in _FUNCTIONS.items()]
        for module_name in _BINDING_MODULES:
            module = importlib.import_module(module_name)
            places += [(module, name, kind) for name, kind in _BOUND.items() if hasattr(module, name)]
        self._functions = [
            ReplacedFunction(module, name, functools.partial(self._timed, kind)) for module, name, kind in places
        ]

    def remove(self) -> None:
        """Put the functions back, for good."""
        self._restore()
        self._functions.clear()

    def pass_begin(self, opened: OpenPass) -> None:
        """Record collectives of a pass from now on."""
        self._pass = opened
        self._numbers.clear()
        self._replace()

    def pass_end(self) -> None:
        """Record no collective until the next pass."""
        self._pass = None
        self._restore()

    @contextlib.contextmanager
    def recording(self, isolate: CollectiveIsolator) -> Iterator[None]:
        """Give the first collective of the pass that is recorded inside to `isolate`, and record no span of it.

        Each replay calls the span that `isolate` gets, which has kind and size of the collective from here, and the
        rest of its key from the pass that is replayed.
        """
        self._is_recording, self._isolate = True, isolate
        self._replace()
        try:
            yield
        finally:
            self._is_recording, self._isolate = False, None
            self._restore()

    def _replace(self) -> None:
        if not self._are_replaced:
            self._are_replaced = True
            for function in self._functions:
                function.replace()

    def _restore(self) -> None:
        if self._are_replaced:
            self._are_replaced = False
            for function in self._functions:
                function.restore()

    def _timed(self, kind: RecordKind, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - those of torch
            opened = self._pass
            if named.get("group") is not self._group:
                return function(*arguments, **named)
            if self._is_recording:
                return self._isolate_first(kind, function, arguments, named)
            if opened is None or not self._is_recorded():
                return function(*arguments, **named)
            key = self._next_key(kind, opened)
            if not self.records_all:
                self._restore()
            if not named.get("async_op"):
                size_bytes = functools.partial(_largest_bytes, arguments)
                return self._record(key, size_bytes, lambda: function(*arguments, **named))
            size = _largest_bytes(arguments)  # the handle must not keep the tensors
            work = function(*arguments, **named)
            return work if work is None else TimedWork(work, lambda wait: self._record(key, lambda: size, wait))

        return timed

    def _isolate_first(
        self,
        kind: RecordKind,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        named: Mapping[str, Any],
    ) -> Any:  # noqa: ANN401 - of the collective
        """Run a collective of a pass that is recorded; the first one by the function that isolates it."""
        isolate, self._isolate = self._isolate, None
        if isolate is None:
            return function(*arguments, **named)
        self._restore()
        size_bytes = _largest_bytes(arguments)  # the span must not keep the tensors

        def span(replay: Callable[[], None]) -> None:
            opened = self._pass
            assert opened is not None, "recordings are replayed within passes"
            self._record(self._next_key(kind, opened), lambda: size_bytes, replay)

        result = isolate(lambda: function(*arguments, **{**named, "async_op": False}), span)
        return FinishedWork() if named.get("async_op") else result

    def _next_key(self, kind: RecordKind, opened: OpenPass) -> RecordKey:
        number = self._numbers[kind]
        self._numbers[kind] = number + 1
        ordinal = pass_ordinal(opened.kind, opened.chunk, opened.microbatch, number)
        return RecordKey(kind, opened.microbatch, opened.chunk, self._slot, ordinal)

    def _is_recorded(self) -> bool:
        return self.records_all or not self._numbers

    def _record(self, key: RecordKey, size_bytes: Callable[[], int], call: Callable[[], Any]) -> Any:  # noqa: ANN401 - torch's
        mark = self._recorder.enter(key)
        result = call()
        self._recorder.leave_collective(key, mark, size_bytes)
        self.recorded += 1
        return result


def _largest_bytes(arguments: Sequence[Any]) -> int:
    """Return the size of the whole tensor, of which gathers and scatters have a part on each rank."""
    tensors = (argument for argument in arguments if isinstance(argument, torch.Tensor))
    return max((tensor.numel() * tensor.element_size() for tensor in tensors), default=0)
