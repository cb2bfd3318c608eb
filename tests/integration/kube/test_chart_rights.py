"""The rights that the chart gives, on the real API server: what is needed works, and nothing else does."""

import pathlib
import re
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import kube
import pytest
import yaml

Object = dict[str, Any]
Rights = dict[tuple[str, str], set[str]]
CHART = kube.ROOT / "charts" / "megatronapp"
HOME = "rights-home"
"""Namespace of operator and door."""
TEAM, OTHER = "rights-team", "rights-other"
MODES = {
    "cluster": (),
    "switches": ("rbac.nodeAccess=true", "rbac.volcano=true", "rbac.coscheduling=true", "rbac.kai=true"),
    "namespaces": (f"watchNamespaces[0]={TEAM}",),
}
OPERATOR: Rights = {
    ("megatronapp.io", "megatronjobs"): {"get", "list", "watch", "delete"},
    ("megatronapp.io", "megatronjobs/status"): {"update"},
    ("megatronapp.io", "megatronjobs/finalizers"): {"update"},
    ("", "pods"): {"get", "list", "watch", "create", "delete"},
    ("", "services"): {"create", "patch"},
    ("", "configmaps"): {"create", "patch"},
    ("networking.k8s.io", "networkpolicies"): {"create", "patch"},
    ("", "secrets"): {"create"},
    ("", "persistentvolumeclaims"): {"get"},
    ("events.k8s.io", "events"): {"create"},
}
SWITCHED: Rights = {
    ("", "nodes"): {"get"},
    ("", "pods"): {"get", "list", "watch", "create", "delete", "patch"},
    ("scheduling.volcano.sh", "podgroups"): {"create", "patch"},
    ("scheduling.x-k8s.io", "podgroups"): {"create", "patch"},
    ("scheduling.run.ai", "podgroups"): {"create", "patch"},
}
LEASE: Rights = {("coordination.k8s.io", "leases"): {"create", "get", "update"}}
DOOR: Rights = {("megatronapp.io", "megatronjobs"): {"get", "list"}, ("", "pods"): {"get"}}
REVIEWS: Rights = {
    ("authentication.k8s.io", "tokenreviews"): {"create"},
    ("authorization.k8s.io", "subjectaccessreviews"): {"create"},
}
EVERYBODY: Rights = {
    ("authorization.k8s.io", "selfsubjectaccessreviews"): {"create"},
    ("authorization.k8s.io", "selfsubjectrulesreviews"): {"create"},
    ("authentication.k8s.io", "selfsubjectreviews"): {"create"},
}


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest, plane: kube.ControlPlane) -> Iterator[str]:
    """The rights of a mode are given while its tests run."""
    settings = [word for setting in MODES[request.param] for word in ("--set", setting)]
    for namespace in (HOME, TEAM, OTHER):
        plane.kubectl("create", "namespace", namespace)
    rights = {"apiVersion": "v1", "kind": "List", "items": rendered_rights(*settings)}
    done = plane.kubectl("apply", "-f", "-", stdin=rights)
    assert done.returncode == 0, done.stderr
    yield request.param
    assert plane.kubectl("delete", "-f", "-", stdin=rights).returncode == 0


def rendered_rights(*settings: str) -> list[Object]:
    helm = kube.programs("helm") / "helm"
    place = (
        "template",
        "megatronapp",
        str(CHART),
        "-n",
        HOME,
        "--kube-version",
        "1.35.4",
        "--set",
        "crds.enabled=false",
    )
    done = subprocess.run([helm, *place, *settings], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    documents = [one for one in yaml.safe_load_all(done.stdout) if one]
    return [one for one in documents if one["apiVersion"].startswith("rbac.") or one["kind"] == "ServiceAccount"]


class Account:
    """Requests as a service account of the chart."""

    def __init__(self, plane: kube.ControlPlane, name: str) -> None:
        self._client = plane.client()
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{HOME}", "system:authenticated"]
        user = f"system:serviceaccount:{HOME}:{name}"
        self._headers = [("Impersonate-User", user), *(("Impersonate-Group", group) for group in groups)]

    def close(self) -> None:
        self._client.close()

    def ask(self, method: str, path: str, document: Object | None = None) -> httpx.Response:
        """The answer; asked again for as long as the API server says that it is not ready to tell."""
        while True:
            answer = self._client.request(method, path, json=document, headers=self._headers)
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
        answer = self.ask("POST", "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", question).json()
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
def door(plane: kube.ControlPlane, mode: str) -> Iterator[Account]:
    account = Account(plane, "megatronapp-door")
    yield account
    account.close()


def test_the_operator_has_these_rights_and_no_others(operator: Account, mode: str) -> None:
    everywhere = OPERATOR | (SWITCHED if mode == "switches" else {})
    assert operator.rights(TEAM) == everywhere
    elsewhere = {} if mode == "namespaces" else everywhere
    assert operator.rights(OTHER) == elsewhere
    assert operator.rights(HOME) == elsewhere | LEASE


def test_the_door_has_these_rights_and_no_others(door: Account, mode: str) -> None:
    whole = {} if mode == "namespaces" else DOOR | REVIEWS
    assert door.rights(TEAM) == (DOOR if mode == "namespaces" else whole)
    assert door.rights(OTHER) == door.rights(HOME) == whole


def pod(name: str) -> Object:
    container = {"name": "c", "image": "image"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": [container]}}


def test_real_requests_pass_or_are_refused(operator: Account, door: Account, mode: str) -> None:
    core, team = f"/api/v1/namespaces/{TEAM}", f"/apis/megatronapp.io/v1alpha1/namespaces/{TEAM}/megatronjobs"
    secret: Object = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"{mode}-tokens"}}
    for account, method, path, document, code in (
        (operator, "POST", f"{core}/pods", pod(mode), 201),
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
        (operator, "GET", f"/apis/coordination.k8s.io/v1/namespaces/{HOME}/leases/megatronapp-operator", None, 404),
        (door, "GET", team, None, 200),
        (door, "GET", f"{core}/pods/none-hub", None, 404),
        (door, "POST", f"{core}/pods", pod("bad"), 403),
        (door, "GET", f"{core}/pods", None, 403),
        (door, "GET", f"{core}/secrets/{mode}-tokens", None, 403),
        (door, "PATCH", f"{team}/gpt", {}, 403),
    ):
        answer = account.ask(method, path, document)
        assert answer.status_code == code, f"{method} {path}: {answer.status_code} {answer.text}"


def test_no_rule_has_a_wildcard_or_reads_secrets() -> None:
    rules = [
        rule
        for one in rendered_rights(*[w for s in MODES["switches"] for w in ("--set", s)])
        for rule in one.get("rules", ())
    ]
    assert len(rules) > 15
    for rule in rules:
        words = {word for key in ("apiGroups", "resources", "verbs") for word in rule[key]}
        assert not any("*" in word for word in words), rule
        assert "secrets" not in rule["resources"] or rule["verbs"] == ["create"]


def test_people_get_what_their_role_says() -> None:
    roles = {
        label: {verb for rule in one["rules"] if rule["resources"] == ["megatronjobs"] for verb in rule["verbs"]}
        for one in rendered_rights()
        for label in one["metadata"]["labels"]
        if one["kind"] == "ClusterRole" and label.startswith("rbac.authorization.k8s.io/aggregate-to-")
    }
    names = {label.rpartition("-")[2]: verbs for label, verbs in roles.items()}
    assert names["view"] == {"get", "list", "watch"}
    assert names["edit"] == names["view"] | {"create", "update", "patch", "delete"}
    assert names["admin"] == names["edit"] | {"deletecollection"}


def test_the_lists_here_are_what_the_code_asks_for() -> None:
    """Every kind of object that the operator's code names stands in the tables above."""
    source = kube.ROOT / "operator" / "src" / "megatronapp_operator" / "backends" / "kubernetes"
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(pathlib.Path(source).rglob("*.py")))
    plurals = set(re.findall(r'Resource\("[^"]*", "([a-z]+)"\)', text))
    known = {resource for _, resource in OPERATOR | SWITCHED | LEASE}
    assert plurals <= known
