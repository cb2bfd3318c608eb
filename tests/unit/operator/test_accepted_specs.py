"""Jobs whose stored spec breaks a rule that came after it was accepted."""

from typing import Any, cast

import pytest
import rendered

from megatronapp_common.errors import JobError
from megatronapp_operator.backends.kubernetes.api import Api, Object
from megatronapp_operator.backends.kubernetes.executor import Executor
from megatronapp_operator.backends.kubernetes.reconciler import Reconciler
from megatronapp_operator.backends.kubernetes.store import Store
from megatronapp_operator.keys import KeyRing


class Remembering(Reconciler):
    """A reconciler that only reads objects."""

    def __init__(self) -> None:
        store, executor = cast("Store", None), cast("Executor", None)
        super().__init__(
            cast("Api", None), store, executor, rendered.SETTINGS, keys=cast("KeyRing", None), installation="ns/lease"
        )

    def read(self, document: Object) -> str:
        return self._remember(("default", "gpt"), document).job.metadata.name


def stored(generation: int = 3, observed: int | None = 3, **metadata: Any) -> Object:
    document = rendered.make_job().to_dict()
    document["metadata"] |= {"uid": rendered.UID, "generation": generation, **metadata}
    document["spec"]["env"] = [{"name": "NNODES", "value": "2"}]
    return document | {"status": {} if observed is None else {"phase": "Running", "observedGeneration": observed}}


def test_a_job_that_an_earlier_release_accepted_is_managed() -> None:
    assert Remembering().read(stored()) == "gpt"


def test_a_job_that_is_deleted_is_managed() -> None:
    """A deletion with finalizers raises the generation."""
    reconciler = Remembering()
    reconciler.read(stored())
    assert reconciler.read(stored(generation=4, deletionTimestamp="2026-01-02T03:04:05Z")) == "gpt"


@pytest.mark.parametrize("observed", [None, 2])
def test_a_spec_that_was_never_accepted_is_judged(observed: int | None) -> None:
    with pytest.raises(JobError, match="NNODES"):
        Remembering().read(stored(observed=observed))
