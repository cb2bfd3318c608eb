"""Programs of the other parts understand the arguments and variables of rendered pods."""

import pathlib

import pytest
import rendered

from megatronapp_analyzer.agent.main import main as run_agent
from megatronapp_analyzer.agent.settings import load_settings
from megatronapp_analyzer.hub.main import build_parser as hub_parser
from megatronapp_analyzer.hub.settings import check_bind, load_job_file
from megatronapp_common.attempt_order import AttemptOrder
from megatronapp_common.names import (
    ANNOTATION_RESTART,
    ANNOTATION_TEMPLATE_HASH,
    LABEL_SPARE,
    STATUS_PORT,
    Env,
    RankOrder,
)
from megatronapp_common.web.tokens import TokenRole, derive_token
from megatronapp_operator.backends.kubernetes import render
from megatronapp_operator.backends.kubernetes.render import AttemptSettings
from megatronapp_trainer.launch.config.interface import attachment
from megatronapp_trainer.launch.config.settings import LauncherSettings
from megatronapp_trainer.launch.main import build_parser as launcher_parser

FIELDS = {
    "status.podIP": "10.1.2.3",
    "spec.nodeName": "gpu-7",
    "metadata.annotations['megatronapp.io/topology']": "rack-2",
    "metadata.annotations['k8s.v1.cni.cncf.io/network-status']": '[{"name": "fabric/ib-a", "ips": ["192.168.7.4"]}]',
}
"""Values that the kubelet puts in the place of fields."""


def kubelet(pod: rendered.Object, name: str = "trainer") -> dict[str, str]:
    """The environment that a container gets."""
    environment = rendered.environment(pod, name)
    return {key: FIELDS.get(value, value).replace("$$", "$") for key, value in environment.items()}


@pytest.mark.parametrize("kind", rendered.VARIETY)
def test_launchers_understand_their_environment(kind: str) -> None:
    job = rendered.make_job(rendered.VARIETY[kind])
    for index in range(job.world.nodes):
        pod = rendered.make_worker(job, index, attempt=2)
        found = LauncherSettings.from_environment(kubelet(pod), host_name="pod")
        assert (found.job, found.uid, found.attempt, found.index) == ("gpt", rendered.UID, 2, index)
        assert found.proc_per_node == job.world.proc_per_node
        assert found.node == "gpu-7"
        assert (found.status_port is not None) == (index == 0)
        assert found.log_to_stdout
        assert bool(found.hub_url) == job.spec.analyzer.enabled


def test_launchers_understand_rank_order_preflight_and_networks() -> None:
    environment = kubelet(rendered.make_worker(rendered.make_job(rendered.VARIETY["sriov"])))
    found = LauncherSettings.from_environment(environment, host_name="pod")
    assert (found.rank_order, found.topology) == (RankOrder.TOPOLOGY, "rack-2")
    assert found.preflight is not None
    assert attachment(environment[Env.NETWORK_STATUS]) == ("192.168.7.4", None)


def test_launcher_and_agent_of_a_worker_that_restarts_in_place_read_its_orders() -> None:
    """The kubelet writes the annotation into the file; a template of the user does not remove it."""
    job = rendered.make_job({"runPolicy": {"restart": "InPlace"}, "analyzer": {"enabled": True}})
    pod = rendered.make_worker(job, attempt=2)
    volume = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "restart")
    (item,) = volume["downwardAPI"]["items"]
    assert item["fieldRef"]["fieldPath"] == f"metadata.annotations['{ANNOTATION_RESTART}']"
    for name in ("trainer", "agent"):
        mounts = {mount["name"]: mount["mountPath"] for mount in rendered.container(pod, name)["volumeMounts"]}
        assert kubelet(pod, name)[Env.ATTEMPT_FILE] == f"{mounts['restart']}/{item['path']}"
    found = LauncherSettings.from_environment(kubelet(pod), host_name="pod")
    assert found.following(AttemptOrder(attempt=3, grace_s=30)).shm_prefix == f"megatronapp-{rendered.UID}-a3-w0"
    command = rendered.container(pod)["command"]
    parsed = launcher_parser().parse_args(command[3 : command.index("--")])
    assert parsed.standby_s == 600 + 2 * 300 + 120
    other = rendered.make_worker(rendered.make_job({"runPolicy": {"restart": "Pods"}}))
    assert "restart" not in {volume["name"] for volume in other["spec"]["volumes"]}


def test_launcher_and_agent_of_a_spare_take_the_place_that_an_order_names() -> None:
    job = rendered.make_job({"runPolicy": {"restart": "InPlace", "spares": 1}, "analyzer": {"enabled": True}})
    seat, life = job.world.nodes, AttemptSettings(number=3, first="gpt-spare-0-1")
    pod = render.worker_pod(job, rendered.owner_of(job), life, seat, rendered.with_settings(), spare=True)
    assert pod["metadata"]["name"] == pod["spec"]["hostname"] == "gpt-spare-0-3"
    assert pod["metadata"]["labels"][LABEL_SPARE] == "true"
    found = LauncherSettings.from_environment(kubelet(pod), host_name="pod")
    assert (found.spare, found.index, found.status_port) == (True, seat, STATUS_PORT)
    assert found.coordinator is not None and found.coordinator.host.startswith("gpt-spare-0-1.gpt-workers.")
    where = render.coordinator(rendered.owner_of(job), "gpt-spare-0-3", "cluster.local")
    placed = found.following(AttemptOrder(attempt=4, grace_s=0, worker=0, coordinator=where))
    assert (placed.spare, placed.index, placed.attempt) == (False, 0, 4)
    assert placed.shm_prefix == f"megatronapp-{rendered.UID}-a4-w0"
    assert placed.coordinator is not None and placed.coordinator.host.startswith("gpt-spare-0-3.gpt-workers.")
    assert kubelet(pod, "agent")[Env.SPARE] == "1"
    worker = rendered.make_worker(job)
    assert LABEL_SPARE not in worker["metadata"]["labels"] and Env.SPARE not in kubelet(worker)
    hashes = {given["metadata"]["annotations"][ANNOTATION_TEMPLATE_HASH] for given in (pod, worker)}
    assert len(hashes) == 1, "a spare may take the place of any worker"


def test_the_launchers_flags_end_where_those_of_the_ranks_begin() -> None:
    job = rendered.make_job({"runPolicy": {"startDeadlineSeconds": 77}})
    command = rendered.container(rendered.make_worker(job))["command"]
    flags = command[3 : command.index("--")]
    assert launcher_parser().parse_args(flags).gather_timeout_s == 4 * 77 + 120


def test_agents_understand_their_environment(tmp_path: pathlib.Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("ab" * 32 + "\n", encoding="ascii")
    pod = rendered.make_worker(rendered.make_job(rendered.ANALYZED), 1, attempt=3)
    environment = kubelet(pod, "agent") | {Env.SECRET_FILE: str(secret), Env.SHM_DIR: str(tmp_path)}
    found = load_settings(environment)
    assert (found.job, found.worker, found.attempt, found.node) == ("gpt", 1, 3, "gpu-7")
    assert found.socket_url == "ws://gpt-hub.default.svc.cluster.local:8080/api/v1/agent"
    assert found.token == derive_token("ab" * 32, TokenRole.AGENT)
    assert found.shm_prefix == kubelet(pod)[Env.SHM_PREFIX]


def test_agents_know_their_flags(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that each agent gets as far as its settings, which are missing."""
    for name in Env:
        monkeypatch.delenv(name, raising=False)
    command = rendered.container(rendered.make_worker(rendered.make_job(rendered.ANALYZED)), "agent")["command"]
    assert run_agent(command[3:]) == 64
    assert "is not set" in capsys.readouterr().err


def test_hubs_know_their_flags_and_their_job(tmp_path: pathlib.Path) -> None:
    job = rendered.make_job(rendered.ANALYZED)
    owner = rendered.owner_of(job)
    command = rendered.container(render.hub_pod(job, owner, rendered.SETTINGS, starts=1), "hub")["command"]
    flags = hub_parser().parse_args(command[3:])
    check_bind(flags.host, allow_remote=flags.allow_remote)
    assert (flags.port, flags.die_with_parent, flags.frontend) == (8080, False, None)
    objects = render.gang_objects(job, owner, AttemptSettings(number=0), rendered.SETTINGS)
    (text,) = [obj["data"]["job.yaml"] for _, obj in objects if obj["kind"] == "ConfigMap"]
    manifest = tmp_path / flags.job_file.name
    manifest.write_text(text, encoding="utf-8")
    found = load_job_file(manifest, name=None, uid=None)
    assert (found.name, found.uid, found.namespace, found.traced) == ("gpt", rendered.UID, "default", True)
