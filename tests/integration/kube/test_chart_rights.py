"""Rights that the chart gives, on the real API server: what is needed is permitted, and all other requests are
refused."""

import contextlib
import functools
import itertools
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import kube
import pytest
import yaml
from shared_tls import SHARED_TLS

from megatronapp_common.names import ANNOTATION_RESTART
from megatronapp_operator.controller.main import LOST

Object = dict[str, Any]
Rights = dict[tuple[str, str], set[str]]
CHART = kube.ROOT / "charts" / "megatronapp"
HOME = "rights-home"
"""Namespace of operator and gateway."""
TEAM, OTHER = "rights-team", "rights-other"
MODES = {
    "cluster": (),
    "switches": tuple(
        f"rbac.{name}=true" for name in ("nodeAccess", "kueue", "volcano", "coscheduling", "kai", "kubernetes")
    ),
    "namespaces": (f"watchNamespaces[0]={TEAM}",),
}
OPERATOR: Rights = {
    ("megatronapp.io", "megatronjobs"): {"get", "list", "watch", "delete"},
    ("megatronapp.io", "megatronprofiles"): {"list", "watch"},
    ("megatronapp.io", "megatronjobs/status"): {"update"},
    ("megatronapp.io", "megatronjobs/finalizers"): {"update"},
    ("", "pods"): {"get", "list", "watch", "create", "delete", "patch"},
    ("", "services"): {"list", "create", "patch", "delete"},
    ("", "configmaps"): {"create", "patch", "delete"},
    ("networking.k8s.io", "networkpolicies"): {"list", "create", "patch", "delete"},
    ("policy", "poddisruptionbudgets"): {"list", "create", "patch", "delete"},
    ("", "secrets"): {"create"},
    ("", "persistentvolumeclaims"): {"get"},
    ("events.k8s.io", "events"): {"create"},
}
CLUSTER_PROFILES: Rights = {("megatronapp.io", "clustermegatronprofiles"): {"list", "watch"}}
SWITCHED: Rights = {
    ("", "nodes"): {"get"},
    ("kueue.x-k8s.io", "workloads"): {"get", "delete"},
    ("scheduling.volcano.sh", "podgroups"): {"get", "create", "patch", "delete"},
    ("scheduling.x-k8s.io", "podgroups"): {"get", "create", "patch", "delete"},
    ("scheduling.run.ai", "podgroups"): {"get", "create", "patch", "delete"},
    ("scheduling.k8s.io", "podgroups"): {"get", "create", "patch", "delete"},
    ("scheduling.k8s.io", "workloads"): {"get", "create", "patch", "delete"},
}
MERGE_PATCH = "application/merge-patch+json"
ANY_LEASE = (200, 404)
"""Read, whether or not an operator of an earlier test has left it."""
LEASE: Rights = {("coordination.k8s.io", "leases"): {"create", "get", "update"}}
GATEWAY: Rights = {("megatronapp.io", "megatronjobs"): {"get", "list"}, ("", "pods"): {"get"}}
REVIEWS: Rights = {
    ("authentication.k8s.io", "tokenreviews"): {"create"},
    ("authorization.k8s.io", "subjectaccessreviews"): {"create"},
}
EVERYBODY: Rights = {
    ("authorization.k8s.io", "selfsubjectaccessreviews"): {"create"},
    ("authorization.k8s.io", "selfsubjectrulesreviews"): {"create"},
    ("authentication.k8s.io", "selfsubjectreviews"): {"create"},
}


@pytest.fixture(scope="module")
def namespaces(plane: kube.ControlPlane) -> None:
    with plane.client() as client:
        for name in (HOME, TEAM, OTHER):
            client.post("/api/v1/namespaces", json={"metadata": {"name": name}}).raise_for_status()


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest, plane: kube.ControlPlane, namespaces: None) -> Iterator[str]:
    """The rights of a mode are given while its tests run."""
    with plane.given(rendered_rights(*settings_of(request.param))):
        yield request.param


def settings_of(mode: str) -> list[str]:
    return [flag for setting in MODES[mode] for flag in ("--set", setting)]


@functools.cache
def rendered(*settings: str) -> list[Object]:
    helm = kube.programs("helm") / "helm"
    place = ("megatronapp", str(CHART), "-n", HOME, "--kube-version", "1.35.4", "--set", "crds.enabled=false")
    done = subprocess.run(
        [helm, "template", *place, *settings], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if document]


def rendered_rights(*settings: str) -> list[Object]:
    documents = rendered(*settings)
    return [
        document
        for document in documents
        if document["apiVersion"].startswith("rbac.") or document["kind"] == "ServiceAccount"
    ]


class Account:
    """Requests as a service account of the chart."""

    def __init__(self, plane: kube.ControlPlane, name: str) -> None:
        self._client = plane.client()
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{HOME}", "system:authenticated"]
        user = f"system:serviceaccount:{HOME}:{name}"
        self._headers = [("Impersonate-User", user), *(("Impersonate-Group", group) for group in groups)]

    def close(self) -> None:
        self._client.close()

    def send(self, method: str, path: str, document: Object | None = None) -> httpx.Response:
        """Return the answer; repeat the request for as long as the API server is not ready to answer."""
        while True:
            headers = [*self._headers, *((("Content-Type", MERGE_PATCH),) if method == "PATCH" else ())]
            answer = self._client.request(method, path, json=document, headers=headers)
            if answer.status_code != httpx.codes.TOO_MANY_REQUESTS:
                return answer
            time.sleep(float(answer.headers.get("Retry-After", "1")))

    def rights(self, namespace: str) -> Rights:
        """All that the API server says of this account here, less what everybody may."""
        question = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectRulesReview",
            "spec": {"namespace": namespace},
        }
        answer = self.send("POST", "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", question).json()
        assert not answer["status"].get("evaluationError")
        found: Rights = {}
        for rule in answer["status"]["resourceRules"]:
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    found.setdefault((group, resource), set()).update(rule["verbs"])
        return {place: verbs for place, verbs in found.items() if place not in EVERYBODY}


@pytest.fixture
def operator(plane: kube.ControlPlane, mode: str) -> Iterator[Account]:
    account = Account(plane, "megatronapp-operator")
    yield account
    account.close()


@pytest.fixture
def gateway(plane: kube.ControlPlane, mode: str) -> Iterator[Account]:
    account = Account(plane, "megatronapp-gateway")
    yield account
    account.close()


def test_the_operator_has_these_rights_and_no_others(operator: Account, mode: str) -> None:
    everywhere = (
        OPERATOR | (SWITCHED if mode == "switches" else {}) | ({} if mode == "namespaces" else CLUSTER_PROFILES)
    )
    assert operator.rights(TEAM) == everywhere
    elsewhere = {} if mode == "namespaces" else everywhere
    assert operator.rights(OTHER) == elsewhere
    assert operator.rights(HOME) == elsewhere | LEASE


def test_the_gateway_has_these_rights_and_no_others(gateway: Account, mode: str) -> None:
    whole = {} if mode == "namespaces" else GATEWAY | REVIEWS
    assert gateway.rights(TEAM) == (GATEWAY if mode == "namespaces" else whole)
    assert gateway.rights(OTHER) == gateway.rights(HOME) == whole


def pod(name: str) -> Object:
    container = {"name": "c", "image": "image"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": [container]}}


def test_real_requests_pass_or_are_refused(operator: Account, gateway: Account, mode: str) -> None:
    core, team = f"/api/v1/namespaces/{TEAM}", f"/apis/megatronapp.io/v1alpha1/namespaces/{TEAM}/megatronjobs"
    secret: Object = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"{mode}-tokens"}}
    order: Object = {"metadata": {"annotations": {ANNOTATION_RESTART: "1 30"}}}  # to restart in place
    for account, method, path, document, code in (
        (operator, "POST", f"{core}/pods", pod(mode), 201),
        (operator, "PATCH", f"{core}/pods/{mode}", order, 200),
        (operator, "DELETE", f"{core}/pods/{mode}", None, 200),
        (operator, "POST", f"{core}/secrets", secret, 201),
        (operator, "GET", f"{core}/secrets/{mode}-tokens", None, 403),
        (operator, "GET", f"{core}/secrets", None, 403),
        (operator, "DELETE", f"{core}/secrets/{mode}-tokens", None, 403),
        (operator, "DELETE", f"{core}/pods", None, 403),
        (operator, "POST", team, {}, 403),
        (operator, "GET", "/apis/megatronapp.io/v1alpha1/megatronjobs", None, 403 if mode == "namespaces" else 200),
        (operator, "GET", "/api/v1/nodes/none", None, 404 if mode == "switches" else 403),
        (operator, "GET", "/api/v1/nodes", None, 403),
        (operator, "GET", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", None, 403),
        (operator, "GET", "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/x", None, 403),
        (operator, "GET", f"/apis/coordination.k8s.io/v1/namespaces/{HOME}/leases/another", None, 403),
        (
            operator,
            "GET",
            f"/apis/coordination.k8s.io/v1/namespaces/{HOME}/leases/megatronapp-operator",
            None,
            ANY_LEASE,
        ),
        (gateway, "GET", team, None, 200),
        (gateway, "GET", f"{core}/pods/none-hub", None, 404),
        (gateway, "POST", f"{core}/pods", pod("bad"), 403),
        (gateway, "GET", f"{core}/pods", None, 403),
        (gateway, "GET", f"{core}/secrets/{mode}-tokens", None, 403),
        (gateway, "PATCH", f"{team}/gpt", {}, 403),
    ):
        answer = account.send(method, path, document)
        codes = code if isinstance(code, tuple) else (code,)
        assert answer.status_code in codes, f"{method} {path}: {answer.status_code} {answer.text}"


def test_no_rule_has_a_wildcard_or_reads_secrets() -> None:
    rules = [
        rule
        for role in rendered_rights(*[w for s in MODES["switches"] for w in ("--set", s)])
        for rule in role.get("rules", ())
    ]
    assert len(rules) > 15
    for rule in rules:
        values = {value for key in ("apiGroups", "resources", "verbs") for value in rule[key]}
        assert not any("*" in value for value in values), rule
        assert "secrets" not in rule["resources"] or rule["verbs"] == ["create"]


def test_aggregated_roles_grant_the_documented_verbs() -> None:
    roles = {
        label: {verb for rule in role["rules"] if rule["resources"] == ["megatronjobs"] for verb in rule["verbs"]}
        for role in rendered_rights()
        for label in role["metadata"]["labels"]
        if role["kind"] == "ClusterRole" and label.startswith("rbac.authorization.k8s.io/aggregate-to-")
    }
    names = {label.rpartition("-")[2]: verbs for label, verbs in roles.items()}
    assert names["view"] == {"get", "list", "watch"}
    assert names["edit"] == names["view"] | {"create", "update", "patch", "delete"}
    assert names["admin"] == names["edit"] | {"deletecollection"}


def test_profiles_bind_others_so_administrators_write_them() -> None:
    aggregated = "rbac.authorization.k8s.io/aggregate-to-"
    verbs: dict[tuple[str, str], set[str]] = {}
    for right in rendered_rights():
        roles = [label.removeprefix(aggregated) for label in right["metadata"]["labels"] if aggregated in label]
        for role, rule in itertools.product(roles, right.get("rules", ())):
            for resource in rule["resources"]:
                verbs.setdefault((role, resource), set()).update(rule["verbs"])
    assert "create" in verbs["admin", "megatronprofiles"]
    for role in ("view", "edit"):
        assert verbs[role, "megatronprofiles"] == {"get", "list", "watch"}
    assert verbs["admin", "clustermegatronprofiles"] == {"get", "list", "watch"}
    some = ("--set", f"watchNamespaces[0]={TEAM}", "--set", "rbac.clusterProfiles=true")
    names = [right["metadata"]["name"] for right in rendered_rights(*some) if right["kind"] == "ClusterRoleBinding"]
    assert any(name.endswith("-profiles") for name in names)


def test_users_of_the_gateway_find_it_and_forward_a_port(plane: kube.ControlPlane, namespaces: None) -> None:
    """Check that they have no further rights: neither other Services, nor logs, nor commands in its pods."""
    settings = ("--set", "gateway.users[0].kind=Group", "--set", "gateway.users[0].name=researchers")
    found = [right for right in rendered_rights(*settings) if right["metadata"]["name"].endswith("-gateway-users")]
    client = plane.client()

    def may(verb: str, what: str, namespace: str = HOME) -> bool:
        place, _, subresource = what.partition(":")
        kind, _, name = place.partition("/")
        resource, _, group = kind.partition(".")
        attributes = {"verb": verb, "group": group, "resource": resource, "subresource": subresource, "name": name}
        who = {"user": "jane", "groups": ["researchers", "system:authenticated"]}
        spec = {**who, "resourceAttributes": attributes | {"namespace": namespace}}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
        answer = client.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", json=review).raise_for_status()
        return answer.json()["status"]["allowed"] is True

    with client, plane.given(found):
        definition = "customresourcedefinitions.apiextensions.k8s.io/megatronjobs.megatronapp.io"
        for verb, resource in (
            ("get", definition),
            ("get", "services/megatronapp"),
            ("list", "pods"),
            ("get", "pods:portforward"),
            ("create", "pods:portforward"),
        ):
            assert may(verb, resource), (verb, resource)
        for verb, resource in (
            ("list", "services"),
            ("get", "services/other"),
            ("get", "pods:log"),
            ("create", "pods:exec"),
            ("get", "secrets"),
            ("create", "serviceaccounts:token"),
            ("list", "megatronjobs.megatronapp.io"),
            ("list", "customresourcedefinitions.apiextensions.k8s.io"),
        ):
            assert not may(verb, resource), (verb, resource)
        assert not may("create", "pods:portforward", OTHER)
        assert not may("get", "pods:portforward", OTHER)


def test_the_viewer_account_has_read_rights_only(plane: kube.ControlPlane) -> None:
    rights = rendered_rights()
    assert "megatronapp-viewer" in {right["metadata"]["name"] for right in rights if right["kind"] == "ServiceAccount"}
    (binding,) = [right for right in rights if right.get("subjects", [{}])[0].get("name") == "megatronapp-viewer"]
    (role,) = [right for right in rights if right["kind"] == "ClusterRole" and right["metadata"] == binding["metadata"]]
    assert role["rules"] == [{"apiGroups": ["megatronapp.io"], "resources": ["megatronjobs"], "verbs": ["get", "list"]}]
    for off in (
        "gateway.viewerAccount=false",
        "gateway.reviews=false",
        "rbac.create=false",
        f"watchNamespaces[0]={TEAM}",
    ):
        accounts = {
            right["metadata"]["name"] for right in rendered_rights("--set", off) if right["kind"] == "ServiceAccount"
        }
        assert "megatronapp-viewer" not in accounts


def test_the_lists_here_are_what_the_code_asks_for() -> None:
    """Check that every kind of object that the operator's code names is listed in the tables above."""
    source = kube.ROOT / "operator" / "src" / "megatronapp_operator" / "backends" / "kubernetes"
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(pathlib.Path(source).rglob("*.py")))
    plurals = set(re.findall(r'Resource\("[^"]*", "([a-z]+)"\)', text))
    known = {resource for _, resource in OPERATOR | SWITCHED | LEASE}
    assert plurals - {"version"} <= known  # every account may ask for the server's version


def kubeconfig_of(plane: kube.ControlPlane, account: str, folder: pathlib.Path) -> pathlib.Path:
    """A file with which a program is that account."""
    token = plane.kubectl("create", "token", account, "-n", HOME)
    assert token.returncode == 0, token.stderr
    document = yaml.safe_load(plane.kubeconfig().read_text(encoding="utf-8"))
    document["users"][0]["user"] = {"token": token.stdout.strip()}
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def names(client: httpx.Client, kind: str, api: str = "api/v1") -> set[str]:
    path = f"/{api}/namespaces/{TEAM}/{kind}"
    answer = client.get(path, params={"labelSelector": "megatronapp.io/job-name=gpt"}).raise_for_status()
    return {item["metadata"]["name"] for item in answer.json()["items"]}


@pytest.mark.full("cases that differ in the values", but=("cluster",))
@pytest.mark.parametrize("mode", ["cluster", "namespaces"], indirect=True)
def test_the_real_operator_makes_and_stops_a_job_with_these_rights(
    plane: kube.ControlPlane, mode: str, tmp_path: pathlib.Path
) -> None:
    deployments = [document for document in rendered(*settings_of(mode)) if document["kind"] == "Deployment"]
    deployment = next(
        deployment for deployment in deployments if deployment["metadata"]["name"] == "megatronapp-operator"
    )
    key, log = tmp_path / "key", tmp_path / "operator.log"
    key.write_text("ab" * 32, encoding="ascii")
    flags = [*deployment["spec"]["template"]["spec"]["containers"][0]["args"], f"--key-file={key}", "--port=0"]
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "megatronapp_operator.controller", *flags]
    config = kubeconfig_of(plane, "megatronapp-operator", tmp_path)
    client = plane.client()
    plane.delete_jobs()  # of earlier tests, some of whose namespaces have a quota or are being terminated

    def start() -> "subprocess.Popen[bytes]":
        with log.open("ab") as out:
            return subprocess.Popen([*command, f"--kubeconfig={config}"], stdout=out, stderr=out)

    process = start()

    def wait(condition: Callable[[], bool]) -> None:
        nonlocal process
        deadline = time.monotonic() + 240
        while not condition():
            if process.poll() == LOST:  # its lease, on a busy machine: its pod would start again, too
                process = start()
            assert process.poll() is None and time.monotonic() < deadline, log.read_text(encoding="utf-8")
            time.sleep(0.1)

    try:
        made = plane.kubectl("create", "-f", "-", stdin=job_with_hub())
        assert made.returncode == 0, made.stderr
        wait(lambda: {"gpt-worker-0", "gpt-worker-1", "gpt-hub"} <= names(client, "pods"))
        assert "gpt-hub" in names(client, "services") and "gpt-job" in names(client, "configmaps")
        assert any(name.startswith("gpt-tokens-") for name in names(client, "secrets"))
        assert names(client, "networkpolicies", "apis/networking.k8s.io/v1")
        patch = ("patch", "mgj", "gpt", "-n", TEAM, "--type=merge", "-p", '{"spec":{"suspend":true}}')
        assert plane.kubectl(*patch).returncode == 0
        wait(lambda: not {name for name in names(client, "pods") if "worker" in name})
        port = re.findall(r"probes at port (\d+)", log.read_text(encoding="utf-8"))[-1]
        page = (
            httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, verify=SHARED_TLS, timeout=120)
            .raise_for_status()
            .text
        )
        assert 'verb="create"' in page or 'verb="POST"' in page
        refused = {re.sub('.*resource="([a-z]+)".*', r"\1", line) for line in page.splitlines() if 'code="403"' in line}
        assert refused == ({"clustermegatronprofiles"} if mode == "namespaces" else set())
        forbidden = [line for line in log.read_text(encoding="utf-8").splitlines() if "orbidden" in line]
        assert all("jobs are merged over no ClusterMegatronProfile" in line for line in forbidden), forbidden
        assert bool(forbidden) == (mode == "namespaces")
    finally:
        process.terminate()  # so that it gives its lease back, which the next one would wait for
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(120)
        process.kill()
        process.wait()
        client.close()
        plane.kubectl("delete", "mgj,pods,svc,secrets,configmaps,networkpolicies", "--all", "-n", TEAM, "--force")


def job_with_hub() -> Object:
    model = {"numLayers": 2, "hiddenSize": 16, "numAttentionHeads": 2, "seqLength": 16, "vocabSize": 64}
    training = {"microBatchSize": 1, "trainIters": 4, "lr": 0.01}
    spec = {"nodes": 2, "procPerNode": 1, "model": model, "training": training, "data": {"mock": True}}
    return {
        "apiVersion": "megatronapp.io/v1alpha1",
        "kind": "MegatronJob",
        "metadata": {"name": "gpt", "namespace": TEAM},
        "spec": spec | {"trace": {"enabled": True}, "analyzer": {"enabled": True}},
    }
