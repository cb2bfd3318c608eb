"""Refusals of an API server, and whether they can ever change."""

import pytest

from megatronapp_operator.backends.kubernetes.client.errors import api_error_for
from megatronapp_operator.backends.kubernetes.client.rejections import classify_rejection

WEBHOOK = 'admission webhook "validate.kyverno.svc-fail" denied the request: no signature'
POLICY = "pods \"j-worker-0\" is forbidden: ValidatingAdmissionPolicy 'team' with binding 'team' denied request: no"


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (403, 'pods "x" is forbidden: exceeded quota: gpus, requested: 8, used: 8, limited: 8', "QuotaExceeded"),
        (403, 'pods "x" is forbidden: failed quota: compute: must specify limits.cpu for: trainer', "PodDenied"),
        (403, 'pods "x" is forbidden: error looking up service account ns/a: not found', "PodDenied"),
        (403, 'pods "x" is forbidden: no PriorityClass with name high was found', "PodDenied"),
        (403, WEBHOOK, "PodDenied"),
        (400, WEBHOOK, "PodDenied"),
        (422, POLICY, "PodDenied"),
        (403, 'pods "x" is forbidden: violates PodSecurity "restricted:latest": privileged', "PodForbidden"),
        (422, 'Pod "x" is invalid: spec.containers[0].image: Required value', "PodInvalid"),
        (400, "strict decoding error: unknown field", "PodInvalid"),
    ],
)
def test_only_what_no_change_around_the_pod_can_heal_is_final(status: int, message: str, kind: str) -> None:
    refusal = classify_rejection(api_error_for(status, {"message": message}, "POST /pods"), 3)
    assert refusal is not None
    assert (refusal.reason, refusal.attempt) == (kind, 3)
    assert refusal.final is (kind in {"PodForbidden", "PodInvalid"})
    assert refusal.denied is (kind == "PodDenied")


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (403, 'User "operator" cannot create resource "pods" in API group ""'),
        (403, "unable to create new content in namespace ns because it is being terminated"),
        (500, "etcd is slow"),
        (429, "too many requests"),
        (404, "namespaces not found"),
    ],
)
def test_what_does_not_speak_of_the_pod_is_no_refusal(status: int, message: str) -> None:
    assert classify_rejection(api_error_for(status, {"message": message}, "POST /pods"), 0) is None
