"""The objects of a job that serves: the way to rank 0, who may go it, and what the pods run."""

from typing import Any

import pytest
import rendered
from network_policy import Place, may_connect

from megatronapp_common.names import LABEL_REPLICA_INDEX, LABEL_REPLICA_TYPE, SERVE_PORT, STATUS_PORT, Env
from megatronapp_operator.backends.kubernetes import render
from megatronapp_operator.backends.kubernetes.client.resources import NETWORK_POLICIES, SERVICES
from megatronapp_operator.backends.kubernetes.render import AttemptSettings

JOB = rendered.make_job(rendered.VARIETY["served"])
TRAINED = rendered.make_job(rendered.VARIETY["analyzed"])
OWNER = rendered.owner_of(JOB)
OBJECTS = render.gang_objects(JOB, OWNER, AttemptSettings(number=0), rendered.SETTINGS)
GATEWAY = Place(namespace="megatron-system", labels=rendered.SETTINGS.gateway_labels)
OPERATOR = Place(namespace="megatron-system", labels=rendered.SETTINGS.operator_labels)
NEIGHBOUR = Place(namespace="default", labels={"app": "client"})
ELSEWHERE = Place(namespace="other", labels={"app": "client"})


def trainer(index: int, job: Any = JOB) -> dict[str, Any]:
    pod = render.worker_pod(job, OWNER, AttemptSettings(number=0), index, rendered.SETTINGS)
    found: dict[str, Any] = next(container for container in pod["spec"]["containers"] if container["name"] == "trainer")
    return found


def test_the_service_leads_to_worker_0_alone() -> None:
    services = {obj["metadata"]["name"]: obj["spec"] for resource, obj in OBJECTS if resource == SERVICES}
    spec = services["gpt-serve"]
    assert spec["ports"] == [{"name": "serve", "port": SERVE_PORT, "targetPort": "serve", "protocol": "TCP"}]
    assert "publishNotReadyAddresses" not in spec
    pods = [render.worker_pod(JOB, OWNER, AttemptSettings(number=3), index, rendered.SETTINGS) for index in (0, 1)]
    pods.append(render.hub_pod(JOB, OWNER, rendered.SETTINGS, starts=1))
    chosen = [spec["selector"].items() <= pod["metadata"]["labels"].items() for pod in pods]
    assert chosen == [True, False, False]
    assert {LABEL_REPLICA_INDEX, LABEL_REPLICA_TYPE} <= spec["selector"].keys()


def test_a_job_that_trains_has_none_of_it() -> None:
    objects = render.gang_objects(TRAINED, OWNER, AttemptSettings(number=0), rendered.SETTINGS)
    assert "gpt-serve" not in {obj["metadata"]["name"] for _, obj in objects}
    container = trainer(0, TRAINED)
    assert "readinessProbe" not in container
    assert SERVE_PORT not in {port["containerPort"] for port in container["ports"]}
    assert "megatronapp_trainer.serve" not in " ".join(container["command"])


def test_workers_run_the_server_and_rank_0_has_the_readiness_probe() -> None:
    first, second = trainer(0), trainer(1)
    assert first["command"] == second["command"]
    launcher = first["command"][: first["command"].index("--")]
    assert launcher[-1] == "--program=-m megatronapp_trainer.serve"
    assert "--load" in first["command"]
    assert first["ports"] == second["ports"], "pods of one shape for a queue"
    assert first["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "serve"}
    assert "readinessProbe" not in second
    variables = {variable["name"]: variable.get("value") for variable in first["env"]}
    assert variables[Env.SERVE_ADDRESS] == f"0.0.0.0:{SERVE_PORT}"
    assert Env.SERVE_ADDRESS not in {variable["name"] for variable in second["env"]}


def test_the_hub_gets_the_url_of_the_model() -> None:
    (hub,) = render.hub_pod(JOB, OWNER, rendered.SETTINGS, starts=1)["spec"]["containers"]
    url = hub["command"][hub["command"].index("--serve-url") + 1]
    assert url == "http://gpt-serve.default.svc.cluster.local:8000"
    (other,) = render.hub_pod(TRAINED, OWNER, rendered.SETTINGS, starts=1)["spec"]["containers"]
    assert "--serve-url" not in other["command"]


@pytest.mark.parametrize(("nodes", "memory"), [(1, "2Gi"), (512, "2Gi"), (513, "3Gi"), (1250, "4Gi"), (2048, "5Gi")])
def test_a_hub_may_use_more_memory_for_more_ranks(nodes: int, memory: str) -> None:
    job = rendered.make_job({**rendered.ANALYZED, "nodes": nodes, "procPerNode": 8})
    (hub,) = render.hub_pod(job, rendered.owner_of(job), rendered.SETTINGS, starts=1)["spec"]["containers"]
    assert hub["resources"]["limits"] == {"cpu": "2", "memory": memory}


@pytest.mark.parametrize(
    ("source", "port", "allowed"),
    [
        (NEIGHBOUR, SERVE_PORT, True),
        (GATEWAY, SERVE_PORT, True),
        (ELSEWHERE, SERVE_PORT, False),
        (OPERATOR, SERVE_PORT, False),
        (NEIGHBOUR, STATUS_PORT, False),
        (GATEWAY, STATUS_PORT, False),
        (OPERATOR, STATUS_PORT, True),
    ],
)
def test_the_network_policy_admits_clients_of_the_model(source: Place, port: int, *, allowed: bool) -> None:
    meta = render.worker_pod(JOB, OWNER, AttemptSettings(number=0), 0, rendered.SETTINGS)["metadata"]
    worker = Place(namespace=meta["namespace"], labels=meta["labels"])
    policies = [obj for resource, obj in OBJECTS if resource == NETWORK_POLICIES]
    assert may_connect(policies, source, worker, port) is allowed


@pytest.mark.parametrize("job", [JOB, TRAINED])
def test_ranks_find_the_socket_of_their_agent(job: Any) -> None:
    """MegaScope's is in RUN_DIR: ranks that serve send captures by it, and those of a training that is captured."""
    pod = rendered.make_worker(job)
    for container in ("trainer", "agent"):
        mounts = rendered.container(pod, container)["volumeMounts"]
        assert {"name": "run", "mountPath": "/run/megatronapp/run"} in mounts
        assert rendered.environment(pod, container)[Env.RUN_DIR] == "/run/megatronapp/run"
