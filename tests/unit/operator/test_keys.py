"""The keys of an installation: reading them, rotating them, and what the plan makes of a job that refuses ours."""

import asyncio
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, cast

import pytest
import rendered
from prometheus_client import CollectorRegistry

from megatronapp_common.web.problems import HttpError
from megatronapp_common.web.tokens import TokenRole, derive_token, job_secret
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi, ObjectList
from megatronapp_operator.backends.kubernetes.client.errors import NotFoundError
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.backends.kubernetes.execution.executor import Executor
from megatronapp_operator.backends.kubernetes.execution.job_context import JobContext
from megatronapp_operator.backends.kubernetes.render.objects import ObjectNames
from megatronapp_operator.backends.kubernetes.render.settings import AttemptSettings
from megatronapp_operator.backends.kubernetes.store import ObjectStore
from megatronapp_operator.errors import SettingsError
from megatronapp_operator.gateway.app import GatewaySettings, create_app
from megatronapp_operator.gateway.job_catalog import JobCatalog
from megatronapp_operator.gateway.metrics import GatewayMetrics
from megatronapp_operator.keys import KeyRing, key_id
from megatronapp_operator.plan import ConditionType, CreateWorker, HubPhase, HubState, RecordEvent

OLD, NEW = "ab" * 32, "cd" * 32
DAY_S = 24 * 3600
PINNED = {"attempt": 0, "trainerImage": "t", "analyzerImage": "a"}


@pytest.mark.parametrize("content", [None, "", "\n", "ab", "zz" * 32, "AB" * 32, f"{NEW}\nab", "\xe4" * 64])
def test_a_file_without_keys_is_refused_with_what_to_write(tmp_path: pathlib.Path, content: str | None) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(SettingsError, match=r"--key-file .*openssl rand -hex 32"):
        KeyRing.read(path)


def test_a_prepended_key_becomes_current_and_the_previous_key_is_still_found(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "key"
    path.write_text(OLD, encoding="ascii")
    ring = KeyRing.read(path)
    assert (ring.current, ring.find(""), ring.find(key_id(NEW))) == (OLD, OLD, None)
    path.write_text(f"{NEW}\n{OLD}\n", encoding="ascii")
    assert ring.reload() and not ring.reload()
    assert (ring.current, ring.current_id, ring.find(key_id(OLD))) == (NEW, key_id(NEW), OLD)
    assert ring.find("") == OLD, "attempts of releases that had one key have the oldest"
    assert key_id(OLD) not in OLD


def test_a_file_that_became_unreadable_changes_nothing(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "key"
    path.write_text(OLD, encoding="ascii")
    ring = KeyRing.read(path)
    path.write_text("half", encoding="ascii")
    assert not ring.reload()
    path.unlink()
    assert not ring.reload()
    assert ring.values == (OLD,)


def event_reasons(made: Any) -> list[str]:
    return [action.reason for action in made.actions if isinstance(action, RecordEvent)]


@pytest.mark.parametrize("policy", [{"progress_deadline_s": 1800}, {"start_deadline_s": 900}])
def test_a_gang_that_refuses_our_token_is_never_restarted_for_it(
    running: Callable[..., Any], policy: dict[str, float]
) -> None:
    made = running(**policy, max_restarts=3)
    made.spec(hub=True)
    made.see(*made.observed.workers, hub=HubState(phase=HubPhase.READY), last_contact=0.0, progress=None)
    made.see(*made.observed.workers, token_refused=("hub", "launcher"))
    first = made.plan()
    condition = first.status.condition(ConditionType.TOKEN_ACCEPTED)
    assert (condition.status, condition.reason, event_reasons(first)) == (False, "TokenRefused", ["TokenRefused"])
    begin = made.now
    while made.now < begin + DAY_S:
        made.now += 600
        assert event_reasons(made.plan()) == []
    status = made.job.status
    assert (status.attempt, status.failures, status.is_true(ConditionType.STALLED)) == (0, (), False)
    made.see(*made.observed.workers, token_refused=(), since=made.now)  # a new process, which has sent no request yet
    assert event_reasons(made.plan()) == [] and not made.job.status.is_true(ConditionType.TOKEN_ACCEPTED)
    made.see(*made.observed.workers, last_contact=made.now)
    assert made.plan().status.is_true(ConditionType.TOKEN_ACCEPTED)


def test_a_token_is_accepted_only_after_an_answer_later_than_the_refusal(running: Callable[..., Any]) -> None:
    made = running()
    made.now = int(made.now) + 10.9
    made.see(*made.observed.workers, last_contact=made.now - 0.7, token_refused=("hub",))
    assert event_reasons(made.plan()) == ["TokenRefused"]
    made.see(*made.observed.workers, token_refused=())  # the hub is away; the last answer is older than its refusal
    assert not made.plan().status.is_true(ConditionType.TOKEN_ACCEPTED)
    made.see(*made.observed.workers, last_contact=made.now + 0.1)
    assert made.plan().status.is_true(ConditionType.TOKEN_ACCEPTED)


@pytest.mark.parametrize("policy", [{"progress_deadline_s": 1800}, {"start_deadline_s": 900}])
def test_a_gang_whose_key_is_lost_trains_on_and_its_condition_has_the_remedy(
    running: Callable[..., Any], policy: dict[str, float]
) -> None:
    made = running(**policy, max_restarts=3)
    made.see(*made.observed.workers, last_contact=0.0, progress=None, unknown_key=key_id(OLD))
    first = made.plan()
    condition = first.status.condition(ConditionType.TOKEN_ACCEPTED)
    assert (condition.status, condition.reason, event_reasons(first)) == (False, "KeyUnknown", ["KeyUnknown"])
    assert f"the installation key {key_id(OLD)}, which is not in the key file" in condition.message
    assert "add the key that the job was started with after the new one" in condition.message
    begin = made.now
    while made.now < begin + DAY_S:
        made.now += 600
        assert event_reasons(made.plan()) == []
    assert (made.job.status.attempt, made.job.status.is_true(ConditionType.STALLED)) == (0, False)


def test_a_hung_gang_is_restarted_though_the_hub_refuses_the_token(
    running: Callable[..., Any],
) -> None:
    made = running(progress_deadline_s=20)
    made.now += 25
    made.see(*made.observed.workers, last_contact=made.now, token_refused=("hub",))
    assert made.plan().status.failures[-1].reason == "ProgressDeadlineExceeded"
    assert dataclasses.asdict(made.observed)["token_refused"] == ("hub",)


@pytest.mark.asyncio
async def test_a_process_that_has_waited_reads_the_keys_before_it_waits_again(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "key"
    path.write_text(OLD, encoding="ascii")
    ring = KeyRing.read(path)
    path.write_text(f"{NEW}\n{OLD}", encoding="ascii")
    task = asyncio.create_task(ring.follow())
    await asyncio.sleep(0)
    task.cancel()
    assert ring.current == NEW


class SingleJobApi:
    """An API server with one job, whose attempt has begun under a key."""

    def __init__(self, key: str) -> None:
        metadata = {"namespace": "team", "name": "gpt", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
        self.document = {"metadata": metadata, "status": {"pinned": PINNED | {"keyId": key_id(key)}}}

    async def list_objects(self, *_: object) -> ObjectList:
        return ObjectList([self.document], "1")

    async def get(self, *_: object) -> Object:
        return self.document


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.asyncio
async def test_the_gateway_reads_a_key_that_the_operator_took_first(tmp_path: pathlib.Path, listed: bool) -> None:
    path = tmp_path / "key"
    path.write_text(OLD, encoding="ascii")
    catalog = JobCatalog(cast(KubernetesApi, SingleJobApi(NEW)), keys=KeyRing.read(path))
    path.write_text(f"{NEW}\n{OLD}", encoding="ascii")
    job = (await catalog.jobs())[0] if listed else await catalog.find("team", "gpt")
    assert job is not None
    token = derive_token(job_secret(NEW, "u"), TokenRole.VIEWER)
    assert catalog.token(job, TokenRole.VIEWER) == token
    assert await catalog.job_of(token) == (job, TokenRole.VIEWER)


@pytest.mark.asyncio
async def test_the_gateway_sends_no_token_of_another_key() -> None:
    catalog = JobCatalog(cast(KubernetesApi, SingleJobApi(NEW)), keys=KeyRing([OLD]))
    (job,) = await catalog.jobs()
    with pytest.raises(HttpError, match=rf"key {key_id(NEW)} of team/gpt is not in the gateway's key file") as refused:
        catalog.token(job, TokenRole.VIEWER)
    assert (refused.value.status, refused.value.code, refused.value.retry_s) == (503, "unknown-key", 10)


@pytest.mark.asyncio
async def test_the_gateway_follows_its_keys_while_it_serves(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "key"
    path.write_text(OLD, encoding="ascii")
    settings = GatewaySettings(keys=KeyRing.read(path))
    app = create_app(cast(KubernetesApi, SingleJobApi(OLD)), settings, GatewayMetrics(CollectorRegistry()))
    path.write_text(NEW, encoding="ascii")
    async with app.router.lifespan_context(app):
        await asyncio.sleep(0)
        assert settings.keys.current == NEW


class EmptyNamespace:
    """An API server that takes everything, and has nothing of another job."""

    def __init__(self) -> None:
        self.secrets: list[str] = []

    async def read_labelled(self, *_: object) -> Object:
        raise NotFoundError("nothing is here")

    async def apply(self, *_: object) -> None:
        return None

    async def create(self, _resource: object, obj: Object, **_: object) -> Object:
        if obj["kind"] == "Secret":
            self.secrets.append(obj["metadata"]["name"])
        return obj


@pytest.mark.asyncio
async def test_an_attempt_whose_key_changes_before_its_first_worker_has_the_secret_of_the_new_key() -> None:
    """Initializers run under the key of their time; what the gang is started with is pinned with its first worker."""
    job = rendered.make_job(rendered.GPUS)
    cluster, owner = EmptyNamespace(), rendered.owner_of(job)
    executor = Executor(cast(KubernetesApi, cluster), ObjectStore(), keys=KeyRing([NEW, OLD]), identity="one")
    for key in (OLD, NEW, NEW):
        settings = dataclasses.replace(rendered.SETTINGS, key_id=key_id(key))
        document = {"metadata": {"generation": 1}}
        work = JobContext(document=document, job=job, owner=owner, attempt=AttemptSettings(number=0), settings=settings)
        assert await executor.run(work, [CreateWorker(index=0, attempt=0)]) is None
    names = [ObjectNames(owner.name).secret(owner.uid, key_id(key)) for key in (OLD, NEW)]
    assert cluster.secrets == names
