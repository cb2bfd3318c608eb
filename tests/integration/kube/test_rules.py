"""Every rule of a MegatronJob, judged by the API server itself on the same examples as locally."""

from typing import Any

import httpx
import kube
import pytest
from rule_examples import EXAMPLES, Example, manifest, old_manifest

from megatronapp_operator.backends.kubernetes.client.resources import JOBS

STRICT = {"fieldValidation": "Strict"}
DRY = STRICT | {"dryRun": "All"}


@pytest.fixture(scope="module")
def client(plane: kube.ControlPlane) -> Any:
    with plane.client() as client:
        yield client


def named(examples: list[Example]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "example",
        [pytest.param(example, id=f"{example.rule_id}-{'good' if example.good else 'bad'}") for example in examples],
    )


def check(example: Example, answer: httpx.Response) -> None:
    """Check that a good example is taken, and a bad one refused once, at its field, with the message of its rule."""
    if example.good:
        assert answer.is_success, answer.text
        return
    assert answer.status_code == 422, answer.text
    ((field, message),) = {(cause["field"], cause["message"]) for cause in answer.json()["details"]["causes"]}
    assert field.partition("[")[0] == example.field, "the schema itself names the item, a rule its list"
    assert (example.server_message or example.message) in message


@named([example for example in EXAMPLES if example.old is None])
def test_an_object_is_judged_as_locally(client: httpx.Client, example: Example) -> None:
    answer = client.post(JOBS.path("default"), params=DRY, json=manifest(example))
    check(example, answer)


@named([example for example in EXAMPLES if example.old is not None])
def test_a_change_is_judged_as_locally(client: httpx.Client, namespace: str, example: Example) -> None:
    url, old = JOBS.path(namespace), old_manifest(example)
    assert old is not None
    stored = client.post(url, params=STRICT, json=old)
    assert stored.is_success, stored.text
    new = manifest(example)
    new["metadata"]["resourceVersion"] = stored.json()["metadata"]["resourceVersion"]
    check(example, client.put(f"{url}/{old['metadata']['name']}", params=DRY, json=new))
