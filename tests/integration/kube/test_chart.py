"""The chart, rendered by helm and judged by the real API server: all kinds of values, installs, upgrades, rights."""

import contextlib
import copy
import json
import pathlib
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import kube
import pytest
import yaml
from rule_example import BASE, changed

from megatronapp_common.job import load_job
from megatronapp_operator.backends.kubernetes.client.resources import JOBS, SERVICES
from megatronapp_operator.backends.kubernetes.render.hub import hub_objects
from megatronapp_operator.backends.kubernetes.render.settings import JobOwner, RenderSettings
from megatronapp_operator.controller import settings as controller
from megatronapp_operator.gateway.gateway import MAX_SOCKETS
from megatronapp_operator.gateway.main import build_parser

Object = dict[str, Any]
CHART = kube.ROOT / "charts" / "megatronapp"
VALUES = [None, *sorted((CHART / "ci").glob("*-values.yaml"))]
HOME = "megatronapp"
"""Namespace of the release."""
TEAMS = ("team-a", "team-b")
MONITORING = ("monitoring.coreos.com/v1",)


def name_of(values: pathlib.Path | None) -> str:
    return "defaults" if values is None else values.stem.removesuffix("-values")


@pytest.fixture(scope="session")
def helm() -> pathlib.Path:
    return kube.programs("helm") / "helm"


class Chart:
    """Helm with our chart."""

    def __init__(self, helm: pathlib.Path, plane: kube.ControlPlane) -> None:
        self._helm, self._plane = helm, plane
        self._rendered: dict[Any, list[Object]] = {}

    def call(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        environment = {"HOME": str(self._plane.folder), "PATH": "/usr/bin:/bin"}
        command = [str(self._helm), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)

    def on_cluster(self, *arguments: str) -> str:
        done = self.call(*arguments, "--kubeconfig", str(self._plane.kubeconfig()), "-n", HOME)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def template(self, values: pathlib.Path | None = None, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Render as for a cluster that has the kinds of monitoring.coreos.com."""
        files = () if values is None else ("--values", str(values))
        apis = [flag for api in MONITORING for flag in ("--api-versions", api)]
        place = ("megatronapp", str(CHART), "-n", HOME, "--kube-version", "1.35.4")
        return self.call("template", *place, *apis, *files, *arguments)

    def render(self, values: pathlib.Path | None = None, *arguments: str) -> list[Object]:
        if (values, arguments) not in self._rendered:
            done = self.template(values, *arguments)
            assert done.returncode == 0, done.stderr
            documents = yaml.load_all(done.stdout, Loader=yaml.CSafeLoader)
            self._rendered[values, arguments] = [document for document in documents if document]
        return copy.deepcopy(self._rendered[values, arguments])


@pytest.fixture(scope="module")
def chart(helm: pathlib.Path, plane: kube.ControlPlane) -> Chart:
    plane.define(kube.ROOT / "tests" / "fixtures" / "kube" / "monitoring.yaml")
    for namespace in (HOME, *TEAMS):
        labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
        metadata = {"name": namespace, "labels": labels}
        made = plane.kubectl("create", "-f", "-", stdin={"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        assert made.returncode == 0, made.stderr
    return Chart(helm, plane)


def only(documents: list[Object], kind: str, name: str) -> Object:
    found = [document for document in documents if document["kind"] == kind and document["metadata"]["name"] == name]
    assert len(found) == 1, f"{kind} {name}: {len(found)}"
    return found[0]


def of_kind(documents: list[Object], kind: str) -> set[str]:
    return {document["metadata"]["name"] for document in documents if document["kind"] == kind}


@pytest.mark.full("cases that differ in the values", but=("defaults", "full"))
@pytest.mark.parametrize("values", VALUES, ids=name_of)
def test_lint_finds_nothing(chart: Chart, values: pathlib.Path | None) -> None:
    done = chart.call("lint", str(CHART), "--strict", *(() if values is None else ("--values", str(values))))
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


@pytest.mark.full(
    "cases that differ in the values",
    but=(
        "full",
        "namespaces",
    ),
)
@pytest.mark.parametrize("values", VALUES, ids=name_of)
def test_the_api_server_takes_all_that_is_rendered(
    chart: Chart, plane: kube.ControlPlane, values: pathlib.Path | None
) -> None:
    documents = chart.render(values)
    everything = {"apiVersion": "v1", "kind": "List", "items": documents}
    arguments = ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-f", "-")
    done = plane.kubectl(*arguments, stdin=everything)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no warning of pod security or of an old API
    assert len(done.stdout.splitlines()) == len(documents)


def test_two_namespaces_get_roles_and_nothing_of_the_whole_cluster(chart: Chart) -> None:
    documents = chart.render(CHART / "ci" / "namespaces-values.yaml")
    whole = {document["kind"] for document in documents if "namespace" not in document["metadata"]}
    assert whole == {"CustomResourceDefinition"}
    roles = {
        (document["metadata"]["namespace"], document["metadata"]["name"])
        for document in documents
        if document["kind"] == "Role"
    }
    parts = {(team, f"{HOME}-megatronapp-{part}") for team in TEAMS for part in ("operator", "gateway")}
    assert roles == parts | {(HOME, "megatronapp-lease")}
    gateway = only(documents, "Deployment", "megatronapp-gateway")["spec"]["template"]["spec"]["containers"][0]
    assert "--no-reviews" in gateway["args"]
    monitor = only(documents, "ServiceMonitor", "megatronapp-hubs")
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": list(TEAMS)}
    assert monitor["metadata"]["labels"]["release"] == "prometheus"


def test_everything_off_leaves_the_operator_alone(chart: Chart) -> None:
    documents = chart.render(CHART / "ci" / "bare-values.yaml")
    assert sorted(document["kind"] for document in documents) == ["Deployment", "Pod", "Service"]
    pod = only(documents, "Deployment", "megatronapp-operator")["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "megatron"
    assert pod["volumes"][0]["secret"]["secretName"] == "own-key"


def test_monitors_are_rendered_with_the_api_or_on_request(chart: Chart) -> None:
    place = ("template", "megatronapp", str(CHART), "--kube-version", "1.35.4")
    without, forced = chart.call(*place), chart.call(*place, "--set", "serviceMonitor.enabled=true")
    assert "kind: ServiceMonitor" not in without.stdout
    assert "kind: PrometheusRule" not in without.stdout
    assert "kind: ServiceMonitor" in forced.stdout


def test_wrong_values_are_named(chart: Chart) -> None:
    """All at once, as a user may give them."""
    wrong = {
        "opertor.replicaCount=2": "additional properties 'opertor' not allowed",
        "operator.replicaCount=two": "/operator/replicaCount",
        "images.pullPolicy=Sometimes": "/images/pullPolicy",
        "watchNamespaces[0]=Team_A": "/watchNamespaces/0",
        "serviceMonitor.enabled=maybe": "/serviceMonitor/enabled",
        "images.operator.digest=abc": "/images/operator/digest",
        "gateway.users[0].name=jane": "/gateway/users/0",
        "gateway.maxSockets=0": "/gateway/maxSockets",
        "gateway.controls=often": "/gateway/controls",
    }
    done = chart.template(None, *(flag for value in wrong for flag in ("--set", value)))
    assert done.returncode != 0
    for value, message in wrong.items():
        assert message in done.stderr, value


@pytest.mark.parametrize(
    ("old", "answer"),
    [
        (("door.maxSockets=3",), "the value door is named gateway now: move what is below door to gateway"),
        (("door.maxSockets=3", "gateway=null"), "the value door is named gateway now"),  # as with --reuse-values
        (
            ("networkPolicy.doorFrom[0].podSelector.a=b",),
            "networkPolicy.doorFrom is named networkPolicy.gatewayFrom now",
        ),
    ],
)
def test_a_former_value_is_answered_with_the_new_name(chart: Chart, old: tuple[str, ...], answer: str) -> None:
    done = chart.template(None, "--set", ",".join(old))
    assert done.returncode != 0
    assert answer in done.stderr


def test_a_wrong_value_that_no_schema_sees_is_explained(chart: Chart) -> None:
    done = chart.template(None, "--set", "operator.serviceAccount.create=false")
    assert "name the account in operator.serviceAccount.name" in done.stderr


def test_what_the_values_of_an_older_release_lack_is_as_by_default(chart: Chart) -> None:
    """`helm upgrade --reuse-values` takes the values of the old chart in place of ours."""
    own = ("--set", "key.existingSecret=own")  # else a new one each time
    older = (
        "gateway.maxSockets",
        "gateway.controls",
        "gateway.users",
        "gateway.viewerAccount",
        "admissionPolicy.authors",
        "serviceMonitor.hubSampleLimit",
    )
    missing = ",".join(f"{name}=null" for name in older)
    assert chart.render(None, *own, "--set", missing) == chart.render(None, *own)


@pytest.mark.parametrize(
    "missing",
    [
        ("gateway",),
        ("gateway.service", "gateway.pdb", "images.trainer", "crds", "operator.serviceAccount", "key", "rbac"),
        ("gateway.service.port", "images.operator.repository", "prometheus", "prometheusRule.runbookUrl"),
        ("clusterDomain",),
    ],
    ids=lambda missing: missing[0],
)
def test_required_values_are_requested_by_name(chart: Chart, missing: tuple[str, ...]) -> None:
    done = chart.template(None, "--set", ",".join(f"{name}=null" for name in missing))
    assert done.returncode == 1
    for whole in missing:
        *above, name = whole.split(".")
        place = "".join(f"/{part}" for part in above)
        found = re.search(rf"- at '{place}': missing propert(?:y|ies) (.*)", done.stderr)
        assert found is not None and f"'{name}'" in found[1], whole


def test_maps_of_the_users_own_may_be_empty(chart: Chart) -> None:
    maps = ("grafanaDashboards.labels", "prometheus.labels", "gateway.resources", "securityContext")
    empty = ",".join(f"{name}=null" for name in maps)
    assert chart.render(None, "--set", "key.existingSecret=own", "--set", empty)


def test_what_is_switched_off_stays_off(chart: Chart) -> None:
    off = ("--set", "gateway.viewerAccount=false,admissionPolicy.authors=false")
    documents = chart.render(None, *off)
    assert "megatronapp-viewer" not in of_kind(documents, "ServiceAccount")
    assert "authors.megatronapp.io" not in of_kind(documents, "ValidatingAdmissionPolicy")


@pytest.mark.parametrize("part", ["operator", "gateway"])
def test_a_crowded_node_has_five_minutes_to_start_them(chart: Chart, part: str) -> None:
    container = only(chart.render(), "Deployment", f"megatronapp-{part}")["spec"]["template"]["spec"]["containers"][0]
    start, live = container["startupProbe"], container["livenessProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 300
    assert start["httpGet"] == live["httpGet"]
    assert "initialDelaySeconds" not in start.keys() | live.keys()


@pytest.mark.parametrize("values", VALUES, ids=name_of)
def test_operator_and_gateway_understand_their_command_lines(chart: Chart, values: pathlib.Path | None) -> None:
    parsers = {
        "megatronapp_operator.controller": controller.build_parser(),
        "megatronapp_operator.gateway": build_parser(),
    }
    found = [
        document["spec"]["template"]["spec"] for document in chart.render(values) if document["kind"] == "Deployment"
    ]
    for pod in found:
        container = pod["containers"][0]
        assert container["command"][:2] == ["python", "-m"]
        parsers[container["command"][2]].parse_args(container["args"])
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert "--key-file=/run/megatronapp/key/key" in container["args"]
        assert "/run/megatronapp/key" in mounts


def test_the_labels_that_policies_of_jobs_let_in_are_those_of_the_pods(chart: Chart) -> None:
    documents = chart.render(CHART / "ci" / "full-values.yaml")
    flags = only(documents, "Deployment", "megatron-operator")["spec"]["template"]["spec"]["containers"][0]["args"]
    for part in ("operator", "gateway"):
        (text,) = [flag.partition("=")[2] for flag in flags if flag.startswith(f"--{part}-labels=")]
        expected = dict(pair.split("=") for pair in text.split(","))
        deployment = only(documents, "Deployment", f"megatron-{part}")["spec"]
        assert expected == deployment["selector"]["matchLabels"]
        assert expected.items() <= deployment["template"]["metadata"]["labels"].items()


def test_the_definition_is_that_of_the_types_and_is_retained(chart: Chart) -> None:
    made = only(chart.render(), "CustomResourceDefinition", "megatronjobs.megatronapp.io")
    assert made["metadata"]["annotations"].pop("helm.sh/resource-policy") == "keep"
    source = yaml.load((kube.ROOT / "crds" / "megatronjob.yaml").read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    assert made["spec"] == source["spec"]
    loose = only(
        chart.render(None, "--set", "crds.keep=false"), "CustomResourceDefinition", "megatronjobs.megatronapp.io"
    )
    assert "helm.sh/resource-policy" not in loose["metadata"]["annotations"]


def test_boards_and_alerts_arrive_unchanged(chart: Chart) -> None:
    documents = chart.render(CHART / "ci" / "full-values.yaml")
    boards = [document for document in documents if document["kind"] == "ConfigMap"]
    assert {dashboard["metadata"]["labels"]["grafana_dashboard"] for dashboard in boards} == {"1"}
    texts = {name: json.loads(text) for dashboard in boards for name, text in dashboard["data"].items()}
    assert texts == {
        f"megatronapp-{path.name}": json.loads(path.read_text()) for path in CHART.glob("dashboards/*.json")
    }
    rules = [document["spec"] for document in documents if document["kind"] == "PrometheusRule"]
    written = [rule for spec in rules for group in spec["groups"] for rule in group["rules"]]
    urls = {rule["annotations"]["runbook_url"] for rule in written if "alert" in rule}
    assert all(url.startswith("https://runbooks.example/megatronapp/M") for url in urls)
    sources = [yaml.safe_load(path.read_text()) for path in sorted(CHART.glob("rules/*.yaml"))]
    expressions = [rule["expr"] for spec in sources for group in spec["groups"] for rule in group["rules"]]
    own = [text.replace('service="megatronapp-operator"', 'service="megatron-operator"') for text in expressions]
    assert [rule["expr"] for spec in rules for group in spec["groups"] for rule in group["rules"]] == own


def test_the_alert_of_no_leader_is_about_the_operator_of_its_own_release(chart: Chart) -> None:
    for namespace, name in ((HOME, "megatron"), ("second", "megatron"), (HOME, "other")):
        flags = ("-n", namespace, "--set", f"fullnameOverride={name}")
        documents = chart.render(CHART / "ci" / "full-values.yaml", *flags)
        spec = only(documents, "PrometheusRule", f"{name}-operator")["spec"]
        assert only(documents, "Service", f"{name}-operator")["metadata"]["namespace"] == namespace
        expression = next(
            alert["expr"] for alert in spec["groups"][0]["rules"] if alert["alert"] == "MegatronOperatorNoLeader"
        )
        own = f'megatron_operator_is_leader{{namespace="{namespace}", service="{name}-operator"}}'
        assert expression.count(own) == 2
        assert "{" not in expression.replace(own, "")


def test_several_gateways_route_each_client_to_the_same_replica(chart: Chart) -> None:
    for flags, expected in (
        ((), None),
        (("--set", "gateway.replicaCount=2"), "ClientIP"),
        (("--set", "gateway.replicaCount=2", "--set", "gateway.service.sessionAffinity=None"), "None"),
    ):
        service = only(chart.render(None, *flags), "Service", "megatronapp")
        assert service["spec"].get("sessionAffinity") == expected


def test_two_releases_of_a_namespace_have_two_leases(chart: Chart) -> None:
    for options, lease in (((), "megatronapp-operator"), (("--set", "fullnameOverride=second"), "second-operator")):
        documents = chart.render(None, *options)
        flags = only(documents, "Deployment", lease)["spec"]["template"]["spec"]["containers"][0]["args"]
        rules = only(documents, "Role", lease.replace("-operator", "-lease"))["rules"]
        assert f"--lease-name={lease}" in flags and rules[1]["resourceNames"] == [lease]


def test_the_longest_name_fits_each_service(chart: Chart) -> None:
    longest = "m" * 47
    services = of_kind(chart.render(None, "--set", f"fullnameOverride={longest}"), "Service")
    assert max(map(len, services)) == 63
    refused = chart.template(None, "--set", f"fullnameOverride={longest}m")
    assert refused.returncode == 1 and "/fullnameOverride" in refused.stderr


def test_the_notes_name_the_gateway_where_the_definitions_may_not(chart: Chart) -> None:
    command = "  megatronapp ui JOB -n NAMESPACE"
    for flags, expected in (
        ((), command),
        (("--set", "crds.enabled=false,fullnameOverride=second"), f"{command} --gateway {HOME}/second"),
        (("--set", "watchNamespaces={team-a}"), f"{command} --gateway {HOME}/megatronapp"),
    ):
        notes = chart.on_cluster("install", "megatronapp", str(CHART), "--dry-run=client", "--take-ownership", *flags)
        assert expected in notes.splitlines()


def test_helm_test_reaches_a_gateway_that_lets_few_in(chart: Chart) -> None:
    documents = chart.render(None, "--set", "networkPolicy.gatewayFrom[0].podSelector.matchLabels.app=ingress")
    ingress = only(documents, "NetworkPolicy", "megatronapp-gateway")["spec"]["ingress"]
    labels = only(documents, "Pod", "megatronapp-test")["metadata"]["labels"]
    peers = [peer["podSelector"]["matchLabels"] for peer in ingress[0]["from"]]
    assert peers[1:] == [{"app": "ingress"}] and peers[0].items() <= labels.items()


@contextlib.contextmanager
def released(chart: Chart, plane: kube.ControlPlane) -> Iterator[None]:
    """Install the chart, and uninstall it. Its policies are in force meanwhile, and for no job of another test."""
    named_host = changed({"spec.podTemplate.spec": {"hostname": "a"}})
    deep = changed({"spec.affinity": json.loads('{"a":' * 100 + "1" + "}" * 100)})
    refused = {
        "pod-templates.megatronapp.io": (TEAMS[0], named_host),
        "authors.megatronapp.io": (HOME, BASE),
        "depth.megatronapp.io": (TEAMS[0], deep),
    }
    with plane.client() as client:

        def answers() -> dict[str, httpx.Response]:
            dry = {"dryRun": "All"}
            return {name: client.post(JOBS.path(place), json=job, params=dry) for name, (place, job) in refused.items()}

        try:
            chart.on_cluster("install", "megatronapp", str(CHART), "--take-ownership")
            kube.wait_until(lambda: all(name in found.text for name, found in answers().items()), "the policies")
            yield
        finally:
            chart.on_cluster("uninstall", "megatronapp", "--ignore-not-found")
            kube.wait_until(lambda: all(found.is_success for found in answers().values()), "the end of the policies")


def test_uninstalling_leaves_the_definitions_alone(chart: Chart, plane: kube.ControlPlane) -> None:
    with released(chart, plane):
        assert plane.kubectl("get", "deployment", "megatronapp-operator", "-n", HOME).returncode == 0
    assert plane.kubectl("get", "crd", "megatronjobs.megatronapp.io").returncode == 0
    assert plane.kubectl("get", "deployment,role,networkpolicy", "-n", HOME, "-o", "name").stdout == ""


def test_monitors_find_the_hubs_that_the_operator_makes(chart: Chart) -> None:
    owner = JobOwner(namespace="team-a", name="gpt", uid="7d1c")
    settings = RenderSettings(
        trainer_image="t", analyzer_image="a", operator_namespace=HOME, operator_labels={}, gateway_labels={}
    )
    job = load_job((kube.ROOT / "examples" / "demo.yaml").read_text(encoding="utf-8"))
    service = next(obj for resource, obj in hub_objects(job, owner, settings) if resource == SERVICES)
    spec = only(chart.render(), "ServiceMonitor", "megatronapp-hubs")["spec"]
    assert spec["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert spec["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
    (rule,) = [rule for rule in spec["endpoints"][0]["relabelings"] if rule["targetLabel"] == "job_id"]
    (source,) = rule["sourceLabels"]
    written = {re.sub(r"[^a-zA-Z0-9_]", "_", label): value for label, value in service["metadata"]["labels"].items()}
    assert written[source.removeprefix("__meta_kubernetes_service_label_")] == "gpt"


@pytest.mark.parametrize("values", [None, CHART / "ci" / "namespaces-values.yaml"], ids=name_of)
def test_a_hub_can_neither_flood_nor_steer_prometheus(chart: Chart, values: pathlib.Path | None) -> None:
    spec = only(
        chart.render(values, "--set", "serviceMonitor.hubSampleLimit=1234567"), "ServiceMonitor", "megatronapp-hubs"
    )["spec"]
    assert spec["sampleLimit"] == 1234567
    limits = {"labelLimit", "labelNameLengthLimit", "labelValueLengthLimit", "bodySizeLimit"}
    assert limits <= spec.keys()
    assert spec["endpoints"][0]["followRedirects"] is False
    assert spec["endpoints"][0]["honorLabels"] is False


def test_metrics_of_the_gateway_are_for_prometheus_alone(chart: Chart) -> None:
    documents = chart.render(None, "--set", "gateway.service.type=LoadBalancer")
    services = [document for document in documents if document["kind"] == "Service"]
    selector = {"app.kubernetes.io/component": "gateway", "app.kubernetes.io/part-of": "megatronapp"}
    (front,) = [service for service in services if selector.items() <= service["metadata"]["labels"].items()]
    assert [port["name"] for port in front["spec"]["ports"]] == ["http"]
    metrics_service = only(documents, "Service", "megatronapp-gateway-metrics")
    assert (metrics_service["spec"]["type"], metrics_service["spec"]["clusterIP"]) == ("ClusterIP", "None")
    assert metrics_service["spec"]["selector"] == front["spec"]["selector"]
    monitor = only(documents, "ServiceMonitor", "megatronapp-gateway")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= metrics_service["metadata"]["labels"].items()
    assert not monitor["selector"]["matchLabels"].items() <= front["metadata"]["labels"].items()
    assert [end["port"] for end in monitor["endpoints"]] == [port["name"] for port in metrics_service["spec"]["ports"]]
    pages, metrics = only(documents, "NetworkPolicy", "megatronapp-gateway")["spec"]["ingress"]
    assert [port["port"] for port in pages["ports"]] == [8080]
    assert [port["port"] for port in metrics["ports"]] == [8081]
    assert metrics["from"] == [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}},
            "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
        }
    ]


def test_without_a_prometheus_the_gateway_metrics_are_unreachable(chart: Chart) -> None:
    documents = chart.render(None, "--set", "prometheus.namespace=")
    (pages,) = only(documents, "NetworkPolicy", "megatronapp-gateway")["spec"]["ingress"]
    assert [port["port"] for port in pages["ports"]] == [8080]


def test_the_memory_of_the_gateway_suffices_for_its_sockets(chart: Chart) -> None:
    """Figures of docs/gateway.md: a gateway at rest, each socket and each request at its worst, all sessions."""
    pod = only(chart.render(), "Deployment", "megatronapp-gateway")["spec"]["template"]["spec"]["containers"][0]
    sockets = next(int(flag.partition("=")[2]) for flag in pod["args"] if flag.startswith("--max-sockets="))
    limit = pod["resources"]["limits"]["memory"]
    assert limit.endswith("Mi")
    assert int(limit.removesuffix("Mi")) >= 110 + 16 * sockets + 256 + 64
    assert sockets == MAX_SOCKETS
