"""Jobs whose stored spec breaks a rule that was added after it was accepted."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
import rendered

from megatronapp_common.errors import JobError
from megatronapp_common.job import PinnedSettings, judge
from megatronapp_common.job.rules import Rule
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi, ObjectList
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.backends.kubernetes.execution.budgets import DisruptionBudgets
from megatronapp_operator.backends.kubernetes.execution.events import EventWriter
from megatronapp_operator.backends.kubernetes.execution.executor import Executor
from megatronapp_operator.backends.kubernetes.execution.job_context import JobContext
from megatronapp_operator.backends.kubernetes.execution.objects import ObjectApplier
from megatronapp_operator.backends.kubernetes.job_memory import JobMemory
from megatronapp_operator.backends.kubernetes.maintenance import JobMaintenance
from megatronapp_operator.backends.kubernetes.reconciler import Reconciler
from megatronapp_operator.backends.kubernetes.render import template_hash
from megatronapp_operator.backends.kubernetes.render.settings import AttemptSettings, JobOwner
from megatronapp_operator.backends.kubernetes.store import ObjectStore, key_of
from megatronapp_operator.keys import KeyRing
from megatronapp_operator.plan import EventType, RecordEvent


class Remembering(Reconciler):
    """A reconciler that only reads objects."""

    def __init__(self) -> None:
        store, executor = ObjectStore(), cast("Executor", None)
        super().__init__(
            cast("KubernetesApi", None),
            store,
            executor,
            rendered.SETTINGS,
            keys=cast("KeyRing", None),
            installation="ns/lease",
        )

    def read(self, document: Object) -> str:
        memory = self._remember(("default", "gpt"), document)
        assert isinstance(memory, JobMemory)
        return memory.job.metadata.name

    def skipped(self) -> tuple[str, ...]:
        memory = self.memory(("default", "gpt"))
        assert memory is not None
        return memory.skipped_rules


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


def test_a_job_whose_first_spec_was_never_accepted_is_judged() -> None:
    with pytest.raises(JobError, match="NNODES"):
        Remembering().read(stored(observed=None))


@pytest.mark.parametrize("restarted", [False, True])
def test_an_edit_of_a_job_that_an_earlier_release_accepted_is_managed(restarted: bool) -> None:
    """The API server has judged the edit, and found no rule that it breaks and the old spec did not."""
    reconciler = Remembering()
    if not restarted:
        reconciler.read(stored())
    edited = stored(generation=4)
    edited["spec"]["suspend"] = True
    assert reconciler.read(edited) == "gpt"
    (rule,) = reconciler.skipped()
    assert rule.startswith("spec.env: ") and "NNODES" in rule and rule.endswith("(rule reserved-variable)")
    edited = stored(generation=5)
    edited["spec"]["env"] = []
    reconciler.read(edited)
    assert reconciler.skipped() == ()


class EventList(EventWriter):
    """A writer that only keeps the events it is given."""

    def __init__(self) -> None:
        self.written: list[RecordEvent] = []

    async def record(self, owner: JobOwner, event: RecordEvent) -> None:
        self.written.append(event)


class EventExecutor(Executor):
    """An executor that only keeps the events it is given, and remembers to have set two budgets."""

    events: EventList

    def __init__(self) -> None:
        self.events = EventList()
        api = NoObjects()
        self.budgets = DisruptionBudgets(api, ObjectApplier(api, KeyRing(["0" * 64]), self.events))
        self.budgets._known.update({"1": True, "2": True})


@pytest.mark.asyncio
async def test_rules_that_are_not_enforced_are_named_in_a_single_warning() -> None:
    reconciler, executor = Remembering(), EventExecutor()
    maintenance = JobMaintenance(cast("ObjectStore", Empty()), executor, lambda: 0.0)
    reconciler.read(stored())
    memory = reconciler.memory(("default", "gpt"))
    assert memory is not None
    work = JobContext(
        document=stored(), job=memory.job, owner=rendered.owner_of(memory.job), attempt=AttemptSettings(number=0),
        settings=rendered.SETTINGS,
    )  # fmt: skip
    for _ in range(3):
        await maintenance.run(memory, work)
    (event,) = executor.events.written
    assert (event.type, event.reason) == (EventType.WARNING, "RulesSkipped")
    assert "spec.env: " in event.message and "rule reserved-variable" in event.message


VOLUME = {"claim": "runs", "mountPath": "/checkpoints"}
BY_TOPOLOGY = {"network": {"rankOrder": "Topology", "topologyKey": "example.com/rack"}}


def mounted(volume: Object) -> Object:
    """Return a template that mounts another volume for checkpoints."""
    mount = {"name": "mine", "mountPath": "/checkpoints"}
    return {
        "spec": {"volumes": [{"name": "mine", **volume}], "containers": [{"name": "trainer", "volumeMounts": [mount]}]}
    }


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("spec", "node_access", "reasons"),
    [
        (BY_TOPOLOGY, False, ["RankOrderIgnored"]),
        (BY_TOPOLOGY, True, []),
        ({"checkpoint": {"save": "checkpoints", "volume": VOLUME}}, True, ["CheckpointsNotStored"]),
        ({"checkpoint": {"save": "/checkpoint/run", "volume": VOLUME}}, True, ["CheckpointsNotStored"]),
        ({"checkpoint": {"save": "/checkpoints/run", "volume": VOLUME}}, True, []),
        ({"checkpoint": {"save": "/data/run"}, "data": {"volume": VOLUME | {"mountPath": "/data/"}}}, True, []),
        (
            {"checkpoint": {"save": "/checkpoints"}, "podTemplate": mounted({"nfs": {"server": "store", "path": "/"}})},
            True,
            [],
        ),
        (
            {"checkpoint": {"save": "/checkpoints"}, "podTemplate": mounted({"emptyDir": {}})},
            True,
            ["CheckpointsNotStored"],
        ),
    ],
)
async def test_what_a_valid_spec_cannot_have_is_reported_once(
    spec: Object, node_access: bool, reasons: list[str]
) -> None:
    executor = EventExecutor()
    maintenance = JobMaintenance(cast("ObjectStore", Empty()), executor, lambda: 0.0)
    reconciler, document = Remembering(), rendered.make_job(spec).to_dict()
    document["metadata"] |= {"uid": rendered.UID, "generation": 1}
    reconciler.read(document)
    memory = reconciler.memory(("default", "gpt"))
    assert memory is not None
    work = JobContext(
        document=document, job=memory.job, owner=rendered.owner_of(memory.job), attempt=AttemptSettings(number=0),
        settings=rendered.with_settings(node_access=node_access),
    )  # fmt: skip
    for _ in range(3):
        await maintenance.run(memory, work)
    assert [event.reason for event in executor.events.written] == reasons


class Empty:
    """A store without pods."""

    def pods(self, namespace: str, uid: str) -> list[object]:
        return []


class NoObjects(KubernetesApi):
    """An API server that has no Services and no policies."""

    def __init__(self) -> None:
        pass

    async def list_objects(self, *given: Any, **options: Any) -> ObjectList:
        return ObjectList(items=[], resource_version="1")


class Comparing(Reconciler):
    """A reconciler that knows jobs of which it has begun an attempt."""

    def __init__(self, store: ObjectStore) -> None:
        keys = KeyRing(["0" * 64])
        super().__init__(NoObjects(), store, EventExecutor(), rendered.SETTINGS, keys=keys, installation="ns/lease")

    def know(self, document: Object, *, template: str | None = None) -> None:
        memory = self._remember(key_of(document), document)
        assert isinstance(memory, JobMemory)
        settings = rendered.SETTINGS
        memory.pinned = PinnedSettings(
            attempt=0,
            trainer_image=settings.trainer_image,
            analyzer_image=settings.analyzer_image,
            template_hash=template or template_hash(memory.job, settings),
        )


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "wrong_spec",
    [{"parallelism": {"tensor": 7}}, {"podTemplate": {"spec": {"affinity": "x"}}}],
    ids=["refused by a rule", "a form that no rule expects"],
)
async def test_a_job_that_cannot_be_rendered_leaves_the_objects_of_others_compared(wrong_spec: Object) -> None:
    store = ObjectStore()
    reconciler = Comparing(store)
    wrong, right = stored(name="first", uid="1"), stored(name="second", uid="2")
    wrong["spec"] |= wrong_spec
    for document in (wrong, right):
        document["status"] |= {"attempt": 0, "attemptTime": "2026-01-02T03:04:05Z"}
        store.put_job(document)
    reconciler.know(wrong, template="none")
    reconciler.know(right)
    assert ("default", "second") in await reconciler.compare_owned_objects([])


def test_a_new_job_is_judged_once_by_each_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judging takes milliseconds, which count where a thousand small jobs are created at once."""
    judged: list[Rule] = []
    real = judge._broken

    def counting(rules: Sequence[Rule], *arguments: Any, **options: Any) -> list[tuple[Rule, str]]:
        judged.extend(rules)
        return real(rules, *arguments, **options)

    document = stored(observed=None)
    del document["spec"]["env"]
    monkeypatch.setattr(judge, "_broken", counting)
    reconciler = Remembering()
    assert reconciler.read(document) == "gpt" and reconciler.skipped() == ()
    assert judged and len(judged) == len({rule.id for rule in judged})
    judged.clear()
    assert reconciler.read(document | {"status": {"phase": "Running"}}) == "gpt" and not judged, "by a status write"
