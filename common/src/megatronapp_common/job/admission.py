"""Limits on podTemplate, and other rules that the schema of the CRD cannot hold, as an admission policy.

The API server stores `podTemplate.spec` unchanged, and rules of the schema cannot read it. A ValidatingAdmissionPolicy
can. It carries the texts of `ADMISSION_RULES`, over `object`; `judge` evaluates the same ones locally. Where a text
cannot be evaluated (a list that is no list, a broken expression), both sides refuse.
"""

import re
from typing import Any

from megatronapp_common.job.api.cluster import GPU_CLAIMS
from megatronapp_common.job.rules import ADMITTED_RULES
from megatronapp_common.job.rules.cluster import WITHIN_LIMITS, is_taken
from megatronapp_common.job.rules.policy import ELASTIC_RULES
from megatronapp_common.job.rules.rule import Rule, first_item, no_item
from megatronapp_common.job.rules.run import IS_RESERVED
from megatronapp_common.names import GROUP, VERSION

POLICY = f"pod-templates.{GROUP}"
"""Name of the policy and of its binding."""
SPEC_IS_NEW = "request.operation == 'CREATE' || object.spec != oldObject.spec"
"""CEL condition that exempts updates of labels or finalizers of an older job, the garbage collector's included."""
OUR_CONTAINERS = ("trainer", "agent")
_SPEC = "object.spec.podTemplate.spec"
_HINTS = {
    "restartPolicy": "is Never, as the operator restarts all workers together; leave it out",
    "hostname": "is how the ranks find each other; leave it out",
    "subdomain": "is how the ranks find each other; leave it out",
    "setHostnameAsFQDN": "would change the name by which the ranks find each other; leave it out",
    "hostIPC": "would mix the shared memory of jobs; leave it out",
    "hostPID": "would mix the processes of jobs; leave it out",
    "hostNetwork": "is set by another field: write network.mode: HostNetwork",
    "shareProcessNamespace": "would take the launcher the place of process 1, which reaps orphans; leave it out",
    "terminationGracePeriodSeconds": "is set by another field: write runPolicy.terminationGracePeriodSeconds",
    "activeDeadlineSeconds": "would end single workers; write runPolicy.activeDeadlineSeconds",
}
"""Fields of a pod that only the operator sets, with what to write instead."""
_OWN_FIELDS = ("image", "command", "args", "restartPolicy", "terminationMessagePath", "terminationMessagePolicy")
"""Fields of the operator's containers that only the operator sets."""


def _of_pod(name: str, hint: str) -> Rule:
    return Rule(id=f"pod-{name}", field=f".podTemplate.spec.{name}", rule=f"!has({_SPEC}.{name})", message=hint)


_NAMED = "type(one) == map && has(one.name) && type(one.name) == string"


def _are_named(name: str) -> Rule:
    items = f"{_SPEC}.{name}"
    return Rule(
        id=f"pod-{name}-have-names",
        field=f".podTemplate.spec.{name}",
        rule=f"!has({items}) || (type({items}) == list && {items}.all(one, {_NAMED}))",
        message="must be a list of blocks with a name each, by which they are merged",
    )


def _list(name: str) -> str:
    """Return CEL text of a list of containers, empty where it is omitted or no list."""
    return f"(has({_SPEC}.{name}) && type({_SPEC}.{name}) == list ? {_SPEC}.{name} : [])"


_NAMES = ", ".join(f"'{name}'" for name in OUR_CONTAINERS)
_OURS = f"({_list('containers')} + {_list('initContainers')}).filter(one, {_NAMED} && one.name in [{_NAMES}])"
_VARIABLES = f"{_OURS}.filter(one, has(one.env)).map(one, one.env)"
_MOUNTS = f"{_OURS}.filter(one, has(one.volumeMounts)).map(one, one.volumeMounts)"
OUR_VOLUMES = ("shm", "run", "secret", "restart", "save", "annotations")
"""Volumes of a worker's pod that its template cannot replace."""
_VOLUMES = f"{_list('volumes')}.filter(one, {_NAMED})"
_VOLUME_NAMES = ", ".join(f"'{name}'" for name in OUR_VOLUMES)
_IS_OURS = f"one.name in [{_VOLUME_NAMES}]"
_SHM = "object.spec.shm.sizeLimit"
_LIMITED = "has(one.resources) && has(one.resources.limits) && 'memory' in one.resources.limits"
_CLAIMING = "has(one.resources) && has(one.resources.claims) && one.resources.claims.size() > 0"


def _of_ours(name: str, instead: str) -> Rule:
    wrong = f"has(one.{name})"
    return Rule(
        id=f"container-{name}",
        field=".podTemplate.spec.containers",
        rule=no_item(_OURS, "one", wrong),
        message=f"sets {name} of trainer or agent, which is the operator's; {instead}",
        message_expression=first_item(
            _OURS, "one", wrong, f"sets {name} of {{one.name}}, which is the operator's; {instead}"
        ),
    )


_INSTEAD = {"image": "write image, or analyzer.image", "args": "write args, which the ranks get"}
ADMISSION_RULES = (
    *(_of_pod(name, hint) for name, hint in _HINTS.items()),
    *(_are_named(name) for name in ("containers", "initContainers", "volumes", "resourceClaims")),
    *(_of_ours(name, _INSTEAD.get(name, "leave it out")) for name in _OWN_FIELDS),
    Rule(
        id="container-env",
        field=".podTemplate.spec.containers",
        rule=no_item(_VARIABLES, "variables", f"variables.exists(variable, {IS_RESERVED})"),
        message="sets a variable of trainer or agent that the operator or the launcher sets; leave it out",
    ),
    Rule(
        id="container-mounts",
        field=".podTemplate.spec.containers",
        rule=no_item(_MOUNTS, "mounts", f"mounts.exists(mount, {is_taken('mount.mountPath')})"),
        message="mounts a volume where trainer or agent have what the system or the operator puts there; "
        "write another mountPath",
    ),
    Rule(
        id="template-volumes",
        field=".podTemplate.spec.volumes",
        rule=no_item(_VOLUMES, "one", _IS_OURS),
        message="has a volume with the name of a volume of the operator; write another name",
        message_expression=first_item(
            _VOLUMES, "one", _IS_OURS, "has {one.name}, the name of a volume of the operator; write my-{one.name}"
        ),
    ),
    Rule(
        id="shm-within-template-memory",
        field=".shm.sizeLimit",
        rule=f"!has({_SHM}) || !({_OURS}.exists(one, one.name == 'trainer' && {_LIMITED} && "
        f"!quantity(string({_SHM})).isLessThan(quantity(string(one.resources.limits['memory'])))))",
        message="must be below the memory limit of the trainer in podTemplate, which it is charged to",
    ),
    Rule(
        id="gpus-are-claimed",
        field=".gpuResourceName",
        rule=f"object.spec.gpuResourceName != '{GPU_CLAIMS}' || object.spec.gpusPerNode == 0 || "
        f"{_OURS}.exists(one, one.name == 'trainer' && {_CLAIMING})",
        message=f"is {GPU_CLAIMS}, and podTemplate claims nothing for the trainer; write its resources.claims there",
    ),
    *WITHIN_LIMITS,
    *ELASTIC_RULES,
    *ADMITTED_RULES,
    Rule(
        id="failure-rule-regex",
        field=".runPolicy.rules",
        rule="object.spec.runPolicy.rules.all(one, !has(one.match.messageRegex) || "
        "type(''.matches(one.match.messageRegex)) == bool)",
        message="holds a messageRegex that is no regular expression of RE2",
    ),
)
"""Rules over `object`, the whole job with its defaults."""
JUDGED_MERGED = frozenset({"gpus-are-claimed"})
"""Ids of rules that ask for something in podTemplate: of a job that names a profile, which may have it, the operator
judges them on the merged spec.
"""


def admission_policy() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the policy and its binding, as `kubectl apply` takes them. A policy that cannot be judged refuses."""
    return _policy(), _binding()


def _policy() -> dict[str, Any]:
    jobs = {
        "apiGroups": [GROUP],
        "apiVersions": [VERSION],
        "operations": ["CREATE", "UPDATE"],
        "resources": ["megatronjobs"],
    }
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": POLICY},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [jobs]},
            "matchConditions": [{"name": "spec-is-new", "expression": SPEC_IS_NEW}],
            "validations": [_validation(rule) for rule in ADMISSION_RULES],
        },
    }


def _validation(rule: Rule) -> dict[str, Any]:
    """Return a rule that judges only changes in an update, so that a stored job that breaks it may be edited.

    Its message names the field, because a refusal by a policy does not.
    """
    place = f"spec{rule.field}: "
    text = f"has(object.spec.profile) || {rule.rule}" if rule.id in JUDGED_MERGED else rule.rule
    before = re.sub(r"\bobject\.", "oldObject.", text)
    return {
        "expression": f"({text}) || (oldObject != null && !({before}))",
        "message": place + rule.message,
        **(
            {"messageExpression": f"'{place}%s'.format([{rule.message_expression}])"} if rule.message_expression else {}
        ),
        "reason": "Invalid",
    }


def _binding() -> dict[str, Any]:
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": POLICY},
        "spec": {"policyName": POLICY, "validationActions": ["Deny"]},
    }
