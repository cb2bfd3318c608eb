"""Profiles of a cluster: which are below a job, and that no attempt begins with those of another."""

from collections.abc import Callable
from typing import Any

import pytest
import rendered

from megatronapp_common.errors import JobError
from megatronapp_common.job import PinnedSettings, read_status, status_document
from megatronapp_common.job.api.profile import Profile, ProfileKind
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.backends.kubernetes.profile_store import ProfileKey, ProfileStore, is_below
from megatronapp_operator.backends.kubernetes.spec_resolution import SpecSource, resolve_spec
from megatronapp_operator.cli.cluster.connection import ClusterJob
from megatronapp_operator.cli.cluster.describe import cluster_layers
from megatronapp_operator.plan import ConditionType, CreateWorker, ProfileState, RecordEvent, Status

Maker = Callable[..., Any]
VERSIONS = iter(range(1, 1000))


def stored(kind: ProfileKind, name: str, namespace: str = "", **spec: Any) -> Object:
    version = next(VERSIONS)
    metadata: Object = {"name": name, "uid": f"{kind}-{namespace}-{name}", "resourceVersion": str(version)}
    metadata |= {"namespace": namespace} if namespace else {}
    whole = {"template": {}} | spec
    return {"apiVersion": "megatronapp.io/v1alpha1", "kind": str(kind), "metadata": metadata, "spec": whole}


def job(profile: str | None = None) -> Object:
    document: Object = rendered.make_job().to_dict()
    document["spec"] |= {"profile": profile} if profile else {}
    return document


@pytest.fixture
def store() -> ProfileStore:
    made = ProfileStore()
    for kind, name, namespace in (
        (ProfileKind.CLUSTER, "default", ""),
        (ProfileKind.CLUSTER, "h100", ""),
        (ProfileKind.NAMESPACE, "default", "default"),
        (ProfileKind.NAMESPACE, "h100", "default"),
        (ProfileKind.NAMESPACE, "default", "other"),
    ):
        made.put(kind, stored(kind, name, namespace, template={"image": f"{namespace}/{name}:1"}))
    return made


@pytest.mark.parametrize(("named", "image"), [(None, "/default:1"), ("h100", "/h100:1")])
def test_a_job_is_over_its_own_or_the_default_profile_and_that_of_its_namespace(
    store: ProfileStore, named: str | None, image: str
) -> None:
    chosen = store.choose(job(named))
    assert [profile.template["image"] for profile in chosen.profiles] == [image, "default/default:1"]
    below = {key for key in store._entries if is_below(key, job(named))}
    assert below == {
        ProfileKey(ProfileKind.CLUSTER, "", named or "default"),
        ProfileKey(ProfileKind.NAMESPACE, "default", "default"),
    }


def test_a_missing_profile_is_named_with_those_that_exist(store: ProfileStore) -> None:
    chosen = store.choose(job("a100"))
    assert (chosen.profiles, chosen.reason) == ((), "ProfileNotFound")
    assert "no ClusterMegatronProfile is named a100 (existing ones: default, h100)" in chosen.problem
    store.readable.discard(ProfileKind.CLUSTER)
    assert "rbac.clusterProfiles" in store.choose(job("a100")).problem


def test_a_wrong_profile_is_reported_until_it_is_corrected(store: ProfileStore) -> None:
    store.put(ProfileKind.CLUSTER, stored(ProfileKind.CLUSTER, "h100", locked=["network.mod"]))
    chosen = store.choose(job("h100"))
    assert chosen.reason == "ProfileInvalid"
    assert "ClusterMegatronProfile/h100: spec.locked[0]: network.mod: unknown field" in chosen.problem
    store.put(ProfileKind.CLUSTER, stored(ProfileKind.CLUSTER, "h100"))
    assert not store.choose(job("h100")).problem


def nested(levels: int) -> Any:
    found: Any = {}
    for _ in range(levels - 1):
        found = {"a": found}
    return found


def test_a_profile_that_is_too_deep_is_wrong_and_its_managed_fields_are_not_read(store: ProfileStore) -> None:
    """Neither ends the list of all profiles, with which the operator begins."""
    deep = stored(ProfileKind.CLUSTER, "h100", template={"podTemplate": {"spec": nested(3000)}})
    managed = stored(ProfileKind.NAMESPACE, "default", "default", template={"image": "a:1"})
    managed["metadata"]["managedFields"] = [{"fieldsV1": nested(3000)}]
    store.replace(ProfileKind.CLUSTER, [deep], next(VERSIONS))
    store.replace(ProfileKind.NAMESPACE, [managed], next(VERSIONS))
    chosen = store.choose(job("h100"))
    assert chosen.reason == "ProfileInvalid" and chosen.problem == (
        "ClusterMegatronProfile/h100: spec.template.podTemplate: is nested more than 64 levels deep; write fewer"
    )
    assert [profile.template for profile in store.choose(job()).profiles] == [{"image": "a:1"}]


def test_a_job_that_is_too_deep_is_refused_also_while_it_waits_for_a_profile(store: ProfileStore) -> None:
    """Its status would be written with the whole of it."""
    document = job("a100")
    document["spec"]["affinity"] = nested(3000)
    source = SpecSource(document, (), store.choose(document), Status(), None)
    with pytest.raises(JobError, match=r"^spec\.affinity: is nested more than 64 levels deep"):
        resolve_spec(source)
    document["spec"]["affinity"] = nested(64)
    assert resolve_spec(source).state is not None, "no deeper than the limit"


def test_late_events_change_nothing(store: ProfileStore) -> None:
    late = stored(ProfileKind.CLUSTER, "h100")
    newest = stored(ProfileKind.CLUSTER, "h100", template={"image": "new:2"})
    assert store.put(ProfileKind.CLUSTER, newest) is not None
    assert store.put(ProfileKind.CLUSTER, late) is None
    assert store.drop(ProfileKind.CLUSTER, newest) is not None
    assert store.put(ProfileKind.CLUSTER, newest) is None
    version = next(VERSIONS)
    removed = store.replace(ProfileKind.CLUSTER, [], version)
    assert removed == {ProfileKey(ProfileKind.CLUSTER, "", "default")}


def state(attempt: int, *, ready: bool = True) -> ProfileState:
    return ProfileState(reason="Any", message="h100", applied=ready, attempt=attempt, ready=ready)


def created(made: Any) -> list[CreateWorker]:
    return [action for action in made.actions if isinstance(action, CreateWorker)]


def test_no_attempt_begins_with_the_spec_of_another_or_without_its_profile(plan_harness: Maker) -> None:
    scene = plan_harness()
    scene.see(profile=state(attempt=7))
    early = scene.plan()
    assert not created(early)
    assert early.wake_at is not None, "the spec is merged for the attempt, and the job planned again"
    scene.see(profile=state(attempt=0, ready=False))
    waiting = scene.plan()
    assert (created(waiting), waiting.wake_at) == ([], None)
    assert not waiting.status.is_true(ConditionType.PROFILE_APPLIED)
    assert scene.plan().actions == waiting.actions[1:], "an event is recorded once"
    scene.see(profile=state(attempt=0))
    begun = scene.plan()
    assert len(created(begun)) == 2
    assert begun.status.is_true(ConditionType.PROFILE_APPLIED)
    assert next(action.reason for action in begun.actions if isinstance(action, RecordEvent)) == "Any"


def test_the_status_keeps_the_profiles_of_an_attempt() -> None:
    profile = Profile(
        kind=ProfileKind.CLUSTER, name="h100", generation=3, template={"env": [{"name": "A"}]}, locked=("env[A]",)
    )
    pinned = PinnedSettings(attempt=1, trainer_image="a", analyzer_image="b", profiles=(profile,))
    again = read_status(status_document(Status(pinned=pinned))).pinned
    assert again == pinned
    assert (
        "profiles"
        not in status_document(Status(pinned=PinnedSettings(attempt=1, trainer_image="a", analyzer_image="b")))[
            "pinned"
        ]
    )


def test_commands_read_the_layout_that_a_profile_has_given() -> None:
    """Such as `logs --rank` and `inject`, which need the workers of ranks."""
    document: Object = rendered.make_job().to_dict()
    document["spec"] |= {"profile": "h100"}
    for name in ("nodes", "procPerNode", "parallelism"):
        document["spec"].pop(name, None)
    template = {"nodes": 4, "procPerNode": 2, "parallelism": {"data": 8}}
    profile = Profile(kind=ProfileKind.CLUSTER, name="h100", template=template)
    pinned = PinnedSettings(attempt=0, trainer_image="a", analyzer_image="b", profiles=(profile,))
    view = ClusterJob(document | {"status": status_document(Status(pinned=pinned))})
    assert cluster_layers(view).job.world.nodes == 4
