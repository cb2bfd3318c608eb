"""Operator in this process, on a real API server, that can be stopped at any request and started again."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import kube
from fake_nodes import FakeNodes

from megatronapp_common.job.api.profile import ProfileKind
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi, connect
from megatronapp_operator.backends.kubernetes.client.errors import (
    ApiError,
    ConflictError,
    RetryReconcileError,
    ThrottledError,
    UnavailableError,
)
from megatronapp_operator.backends.kubernetes.client.resources import JOBS, NODES, PODS, PROFILES, Object
from megatronapp_operator.backends.kubernetes.execution.executor import Executor
from megatronapp_operator.backends.kubernetes.observe import PollResult
from megatronapp_operator.backends.kubernetes.pod_record import read_pod
from megatronapp_operator.backends.kubernetes.reconciler import Reconciler
from megatronapp_operator.backends.kubernetes.render.settings import RenderSettings
from megatronapp_operator.backends.kubernetes.store import Key, ObjectStore
from megatronapp_operator.keys import KeyRing
from megatronapp_operator.plan import Progress

KEY = "ab" * 32
SETTINGS = RenderSettings(
    trainer_image="megatronapp/trainer:test",
    analyzer_image="megatronapp/analyzer:test",
    operator_namespace="megatronapp",
    operator_labels={"app.kubernetes.io/component": "operator"},
    gateway_labels={"app.kubernetes.io/component": "gateway"},
)
MAX_ROUNDS = 200


class OperatorKilled(BaseException):
    """The operator ends here, like a process that is killed."""


def refuse(kind: str) -> None:
    """Raise what the API client raises for an answer of this kind; other kinds are no refusals."""
    match kind:
        case "conflict":
            raise ConflictError("the object has been modified", status=409)
        case "throttled":
            raise ThrottledError("too many requests", status=429, details={"retryAfterSeconds": 1})
        case "unavailable":
            raise UnavailableError("the server fails", status=500)


class KillableApi(KubernetesApi):
    """Counts requests; `kill_at(number)` may say "before" or "after": the operator ends
    before or after that request; or "lost": the answer is lost."""

    kill_at: Callable[[int], str | None] = staticmethod(lambda _number: None)
    count = 0
    dead = False

    async def _send(self, *arguments: Any, **options: Any) -> Object:
        if self.dead:
            raise OperatorKilled
        self.count += 1
        when = self.kill_at(self.count)
        self.dead |= when == "before"
        if self.dead:
            raise OperatorKilled
        try:
            answer = await super()._send(*arguments, **options)
        finally:  # an answer that refuses is one, too
            self.dead |= when == "after"
        if self.dead:
            raise OperatorKilled
        if when == "lost":
            raise UnavailableError("no answer came")
        return answer


def manifest(namespace: str, name: str = "job", **spec: Any) -> Object:
    """A MegatronJob of two workers on the CPU."""
    model = {"numLayers": 2, "hiddenSize": 16, "numAttentionHeads": 2, "seqLength": 16, "vocabSize": 64}
    training = {"microBatchSize": 1, "trainIters": 4, "lr": 0.01}
    common = {"nodes": 2, "procPerNode": 1, "model": model, "training": training, "data": {"mock": True}}
    return {
        "apiVersion": JOBS.api_version,
        "kind": "MegatronJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": common | spec,
    }


@dataclasses.dataclass(slots=True)
class OperatorSimulation:
    """Sequence of operators, and the nodes under them. Time passes by `pass_time` alone, however slow the machine is,
    unless `clock` is a real one."""

    api: KillableApi
    nodes: FakeNodes
    namespace: str
    settings: RenderSettings = SETTINGS
    installation: str = "megatronapp/megatronapp-operator"
    keys: KeyRing = dataclasses.field(default_factory=lambda: KeyRing([KEY]))
    clock: Callable[[], float] = dataclasses.field(default_factory=lambda: functools.partial(float, int(time.time())))
    """At a whole second, which is the same after it was written into a status and read."""
    skipped_s: float = 0.0
    store: ObjectStore = dataclasses.field(init=False)
    reconciler: Reconciler = dataclasses.field(init=False)
    lives: int = 0
    due: dict[Key, float] = dataclasses.field(default_factory=dict)

    def now(self) -> float:
        """Seconds since the epoch, with what was skipped."""
        return self.clock() + self.skipped_s

    async def begin(self) -> None:
        """A new operator process: it remembers nothing and lists everything."""
        self.lives += 1
        self.api.dead = False
        self.store, self.due = ObjectStore(), {}
        executor = Executor(self.api, self.store, keys=self.keys, identity=f"life-{self.lives}")
        self.reconciler = Reconciler(
            self.api,
            self.store,
            executor,
            self.settings,
            keys=self.keys,
            installation=self.installation,
            clock=self.now,
        )
        await self.refresh()

    async def refresh(self) -> None:
        """Read the objects that the watches would deliver."""
        for kind, resource in PROFILES.items():
            place = None if kind is ProfileKind.CLUSTER else self.namespace
            profiles = await KubernetesApi.list_objects(self.nodes.api, resource, place)
            self.store.profiles.replace(kind, profiles.items, int(profiles.resource_version))
        jobs = await KubernetesApi.list_objects(self.nodes.api, JOBS, self.namespace)
        self.store.replace_jobs(jobs.items, int(jobs.resource_version))
        pods = await KubernetesApi.list_objects(self.nodes.api, PODS, self.namespace)
        self.store.replace_pods(map(read_pod, pods.items), int(pods.resource_version))

    async def reconcile(self) -> bool:
        """Reconcile every job once; return whether another pass is due at once. Starts a new operator after a cut."""
        again = False
        for key in self.store.keys:
            try:
                wake_at = await self.reconciler.reconcile(key)
                again |= wake_at is not None and wake_at <= self.now()
                self.due[key] = float("inf") if wake_at is None else wake_at
            except (
                RetryReconcileError,
                ApiError,
                OperatorKilled,
            ):  # of parallel requests another one may have failed first
                again = True
            if self.api.dead:
                await self.begin()
                return True
        return again

    async def rest(self, *, with_nodes: bool = True, rounds: int = MAX_ROUNDS) -> None:
        """Continue until nothing more happens by itself."""
        for _ in range(rounds):
            before = self.api.count
            await self.refresh()
            again = await self.reconcile()
            moved = with_nodes and await self.nodes.settle()
            if not again and not moved and self.api.count == before:
                return
        raise AssertionError("the operator does not come to rest")

    async def pass_time(self, seconds: float) -> None:
        """Skip some time, and see what it brings."""
        self.skipped_s += seconds
        await self.rest()

    async def train(self, job: Object) -> None:
        """Create a job, and let its pods start and train."""
        await self.api.create(JOBS, job)
        await self.begin()
        await self.rest()
        self.report_progress(job["metadata"]["name"])
        await self.rest()

    def report_progress(self, name: str, **progress: Any) -> None:
        """Send the operator a report of the hub or the launcher of a job."""
        memory = self.reconciler.memory((self.namespace, name))
        assert memory is not None
        page = Progress(attempt=memory.status.attempt, **({"iteration": 1} | progress))
        memory.poll_result = PollResult(progress=page)

    async def job(self, name: str = "job") -> Object:
        """Return the job with its present status."""
        found = await self.nodes.api.get(JOBS, self.namespace, name)
        assert found is not None
        return found


@contextlib.asynccontextmanager
async def simulated_operator(
    plane: kube.ControlPlane, namespace: str, **settings: Any
) -> AsyncIterator[OperatorSimulation]:
    """Yield an operator with all rights in a separate namespace; `settings` are fields of RenderSettings."""
    headers = {"Authorization": f"Bearer {plane.tokens[kube.ADMIN]}"}
    async with (
        connect(kubeconfig=str(plane.kubeconfig())) as api,
        httpx.AsyncClient(base_url=plane.url, headers=headers, verify=plane.context(), timeout=180) as client,
    ):
        killable = KillableApi(api._client)
        nodes = FakeNodes(api, namespace, client)
        stage = OperatorSimulation(
            api=killable, nodes=nodes, namespace=namespace, settings=dataclasses.replace(SETTINGS, **settings)
        )
        nodes.clock = stage.now
        yield stage


@contextlib.asynccontextmanager
async def cordoned_node(stage: OperatorSimulation, name: str) -> AsyncIterator[None]:
    """Add a node as it is after `kubectl cordon`, until the block ends: nodes are of no namespace."""
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {"unschedulable": True}}
    made = await stage.nodes.api.create(NODES, node)
    try:
        yield
    finally:
        await stage.nodes.api.delete(NODES, made)
