"""Entrances and priorities of the chart: TLS, Ingress, HTTPRoute, PriorityClass, FlowSchemas."""

import json
import pathlib
import subprocess
from typing import Any

import kube
import pytest
import yaml

Object = dict[str, Any]
CHART = kube.ROOT / "charts" / "megatronapp"
HOME = "entrances"
CERT_MANAGER = ("gateway.tls.certManager.enabled=true", "gateway.tls.certManager.issuerRef.name=company")
INGRESS = ("gateway.ingress.enabled=true", "gateway.ingress.host=megatron.example.com")
ROUTE = (
    "gateway.httpRoute.enabled=true",
    "gateway.httpRoute.parentRefs[0].name=public",
    "gateway.httpRoute.parentRefs[0].namespace=gateways",
    "gateway.httpRoute.hostnames[0]=pages.example.com",
)
MODULES = {
    "sigs.k8s.io/gateway-api@v1.4.1": (
        "h1:NPxFutNkKNa8UfLd2CMlEuhIPMQgDQ6DXNKG9sHbJU8=",
        "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",
    ),
    "github.com/cert-manager/cert-manager@v1.19.2": (
        "h1:jSprN1h5pgNDSl7HClAmIzXuTxic/5FXJ32kbQHqjlM=",
        "deploy/crds/cert-manager.io_certificates.yaml",
    ),
}
"""Go modules of the projects, with the hash of their content and the definition that is taken from them."""


def template(*settings: str) -> "subprocess.CompletedProcess[str]":
    flags = [flag for setting in settings for flag in ("--set", setting)]
    place = ("megatronapp", str(CHART), "-n", HOME, "--kube-version", "1.35.4", "--set", "crds.enabled=false")
    helm = str(kube.programs("helm") / "helm")
    return subprocess.run([helm, "template", *place, *flags], capture_output=True, text=True, check=False, timeout=120)


def rendered(*settings: str) -> list[Object]:
    done = template(*settings)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if document]


def only(documents: list[Object], kind: str, name: str = "") -> Object:
    found = [each for each in documents if each["kind"] == kind and each["metadata"]["name"].endswith(name)]
    assert len(found) == 1, [each["metadata"]["name"] for each in found]
    return found[0]


def test_by_default_there_is_none_of_it() -> None:
    documents = rendered()
    kinds = {document["kind"] for document in documents}
    assert not kinds & {"Ingress", "HTTPRoute", "Certificate", "PriorityClass", "FlowSchema"}
    gateway = only(documents, "Deployment", "-gateway")["spec"]["template"]["spec"]
    assert [volume["name"] for volume in gateway["volumes"]] == ["key", "tmp"]
    assert not [flag for flag in gateway["containers"][0]["args"] if "tls" in flag]
    assert [port["name"] for port in only(documents, "Service", "megatronapp")["spec"]["ports"]] == ["http"]


def test_values_of_an_older_chart_lack_all_of_it() -> None:
    """As `helm upgrade --reuse-values` gives them."""
    absent = ("gateway.tls", "gateway.ingress", "gateway.httpRoute", "gateway.antiAffinity", "operator.antiAffinity")
    key = "key.existingSecret=key"  # the chart would make another one each time
    older = rendered(key, *(f"{name}=null" for name in (*absent, "priorityClass", "flowSchema")))
    assert older == rendered(key)


def test_the_same_certificate_is_for_gateway_and_ingress() -> None:
    documents = rendered(*CERT_MANAGER, *INGRESS, *ROUTE)
    certificate, ingress = only(documents, "Certificate")["spec"], only(documents, "Ingress")["spec"]
    assert certificate["issuerRef"] == {"group": "cert-manager.io", "kind": "ClusterIssuer", "name": "company"}
    names = ["megatron.example.com", "pages.example.com", f"megatronapp.{HOME}.svc"]
    assert certificate["dnsNames"] == [*names, f"megatronapp.{HOME}.svc.cluster.local"]
    assert ingress["tls"] == [{"hosts": ["megatron.example.com"], "secretName": certificate["secretName"]}]
    gateway = only(documents, "Deployment", "-gateway")["spec"]["template"]["spec"]
    mounted = {volume["name"]: volume.get("secret", {}).get("secretName") for volume in gateway["volumes"]}
    assert mounted["tls"] == certificate["secretName"] == "megatronapp-gateway-tls"
    service = only(documents, "Service", "megatronapp")["spec"]["ports"]
    assert [(port["name"], port["port"], port["targetPort"]) for port in service] == [
        ("http", 8080, "http"),
        ("https", 443, "https"),
    ]
    policy = only(documents, "NetworkPolicy", "-gateway")["spec"]["ingress"][0]["ports"]
    assert [port["port"] for port in policy] == [8080, 8443]


def test_a_given_secret_needs_no_certificate() -> None:
    documents = rendered("gateway.tls.secretName=pages", *INGRESS, "gateway.ingress.port=https")
    assert "Certificate" not in {document["kind"] for document in documents}
    ingress = only(documents, "Ingress")["spec"]
    assert ingress["tls"][0]["secretName"] == "pages"
    backend = ingress["rules"][0]["http"]["paths"][0]["backend"]["service"]
    assert backend == {"name": "megatronapp", "port": {"name": "https"}}


TLS = ("gateway.tls.secretName=pages",)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (INGRESS, "gateway.ingress.tls needs a certificate: name a Secret in gateway.tls.secretName"),
        ((*INGRESS, "gateway.ingress.tls=false", "gateway.ingress.port=https"), "and the gateway serves no TLS"),
        ((*ROUTE, "gateway.enabled=false"), "gateway.httpRoute leads to the gateway, and gateway.enabled is false"),
        ((*TLS, "gateway.service.port=443"), "gateway.service.port and gateway.tls.servicePort are both 443"),
        (
            ("priorityClass.create=true", "priorityClass.name=system-ours"),
            "a PriorityClass must not be called system-ours",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused(settings: tuple[str, ...], message: str) -> None:
    done = template(*settings)
    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.parametrize(
    ("switched_on", "missing"),
    [
        (("priorityClass.create=true",), "priorityClass.value"),
        (("flowSchema.create=true",), "flowSchema.matchingPrecedence"),
        ((*INGRESS, *TLS), "gateway.ingress.tls"),
        (CERT_MANAGER, "gateway.tls.certManager.issuerRef.kind"),
    ],
)
def test_a_default_that_an_older_chart_lacks_is_named(switched_on: tuple[str, ...], missing: str) -> None:
    """`helm upgrade --reuse-values` would make a PriorityClass of value 0, or an Ingress without TLS."""
    done = template(*switched_on, f"{missing}=null")
    assert done.returncode != 0
    assert f"the value {missing} is missing, as in values of an older chart" in done.stderr


def test_values_that_are_missing_or_wrong_are_named() -> None:
    """All at once, as a user may give them."""
    wrong = {
        "gateway.ingress.enabled=true": "/gateway/ingress/host",
        "gateway.httpRoute.enabled=true": "/gateway/httpRoute/parentRefs",
        "gateway.tls.certManager.enabled=true": "/gateway/tls/certManager/issuerRef/name",
        "gateway.antiAffinity=always": "/gateway/antiAffinity",
        "priorityClass.value=2000000000": "/priorityClass/value",
        "flowSchema.matchingPrecedence=1": "/flowSchema/matchingPrecedence",
    }
    done = template(*wrong)
    assert done.returncode != 0
    for value, place in wrong.items():
        assert place in done.stderr, value


def test_operator_and_gateway_have_the_class_that_is_created() -> None:
    documents = rendered("priorityClass.create=true", "gateway.priorityClassName=mine")
    made = only(documents, "PriorityClass")
    assert (made["metadata"]["name"], made["value"]) == (f"{HOME}-megatronapp", 100_000_000)
    classes = {
        part: only(documents, "Deployment", part)["spec"]["template"]["spec"]["priorityClassName"]
        for part in ("operator", "gateway")
    }
    assert classes == {"operator": f"{HOME}-megatronapp", "gateway": "mine"}


def test_the_api_server_takes_the_operators_requests_apart(plane: kube.ControlPlane) -> None:
    schemas = [each for each in rendered("flowSchema.create=true") if each["kind"] == "FlowSchema"]
    path = "/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas"
    account = {"Impersonate-User": f"system:serviceaccount:{HOME}:megatronapp-operator"}
    groups = {"Impersonate-Group": "system:authenticated"}
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{HOME}/leases/megatronapp-operator"

    with plane.client() as client:

        def schema_of(url: str, headers: dict[str, str]) -> str:
            return str(client.get(url, headers=headers | groups).headers.get("x-kubernetes-pf-flowschema-uid"))

        before = schema_of("/api/v1/pods", account)
        uids = {}
        try:
            for schema in schemas:
                made = plane.create(path, schema)
                uids[schema["metadata"]["name"].removeprefix(f"{HOME}-megatronapp-")] = made["metadata"]["uid"]
            kube.wait_until(lambda: schema_of("/api/v1/pods", account) == uids["operator"], "the operator's FlowSchema")
            kube.wait_until(lambda: schema_of(lease, account) == uids["operator-lease"], "that of its Lease")
            kube.wait_until(lambda: schema_of("/apis/resource.k8s.io/v1", account) == uids["operator"], "of discovery")
            assert schema_of("/api/v1/pods", {"Impersonate-User": "somebody"}) not in uids.values()
        finally:
            for schema in schemas:
                client.delete(f"{path}/{schema['metadata']['name']}")
        kube.wait_until(lambda: schema_of("/api/v1/pods", account) == before, "the end of the FlowSchemas")


@pytest.mark.full("downloads the definitions of Gateway API and cert-manager")
def test_the_definitions_of_other_projects_accept_route_and_certificate(
    plane: kube.ControlPlane, tmp_path: pathlib.Path
) -> None:
    for module, (digest, path) in MODULES.items():
        command = ["go", "mod", "download", "-json", module]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=600)
        answer = json.loads(done.stdout)
        assert answer["Sum"] == digest
        plane.define(pathlib.Path(answer["Dir"]) / path)
    times = ("gateway.tls.certManager.duration=2160h", "gateway.tls.certManager.renewBefore=720h")
    made = [each for each in rendered(*CERT_MANAGER, *times, *ROUTE) if each["kind"] in {"HTTPRoute", "Certificate"}]
    assert len(made) == 2
    assert plane.kubectl("create", "namespace", HOME).returncode == 0
    create = ("apply", "--server-side", "--validate=strict", "--dry-run=server", "-f", "-")
    accepted = plane.kubectl(*create, stdin={"apiVersion": "v1", "kind": "List", "items": made})
    assert (accepted.returncode, accepted.stderr) == (0, "")
    made[0]["spec"]["issuerName"] = made[1]["spec"]["issuerName"] = "misspelt"
    refused = plane.kubectl(*create, stdin={"apiVersion": "v1", "kind": "List", "items": made})
    assert refused.stderr.count("issuerName") == 2, refused.stderr
