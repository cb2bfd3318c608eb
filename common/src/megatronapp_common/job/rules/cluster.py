"""Rules about what a job requests from a cluster: resources, memory, volumes, initializers, pods."""

from megatronapp_common.job.rules.rule import Rule, cel_message, first_item, no_item
from megatronapp_common.names import GROUP

_DATA, _SAVED = "self.data.volume", "self.checkpoint.volume"
_PATH = "^(/[^/:]+)+/?$"
_UP = "matches('(^|/)[.][.](/|$)')"
_SHM, _LIMITS = "self.shm.sizeLimit", "self.resources.limits"
_STORE = "self.analyzer.volume.sizeLimit"
LEAST_STORE = "128Mi"
"""Least size of the hub's volume: in less, two segments of the spool, sums of steps and the archive have no space."""
_TAKEN = ("/dev", "/proc", "/sys", "/run/megatronapp")
"""Directories of the kernel, of the container runtime and of the operator's mounts."""
OUR_LABELS = tuple(f"app.kubernetes.io/{name}" for name in ("name", "instance", "component", "part-of", "managed-by"))


def given(*fields: str) -> str:
    """Return CEL text: the field is present, and so are the blocks above it."""
    return " && ".join(f"has({field})" for field in fields)


def is_path(place: str) -> str:
    """Return CEL text: an absolute path without `..`, which a mount may have."""
    return f"({place}.matches('{_PATH}') && !{place}.{_UP})"


def lies_on(path: str, volume: str) -> str:
    """Return CEL text: a path is on a volume of the job, which may be absent."""
    place = f"{volume}.mountPath"
    return f"(has({volume}) && ({path} + '/').startsWith({place}.endsWith('/') ? {place} : {place} + '/'))"


def is_taken(place: str) -> str:
    """Return CEL text: a mount there would hide a directory of the system or the operator."""
    listed = ", ".join(f"'{path}'" for path in _TAKEN)
    below = f"[{listed}].exists(taken, {place} == taken || {place}.startsWith(taken + '/'))"
    return f"({below} || {place} == '/run' || {place} == '/run/')"


def _above_zero(field: str, quantity: str) -> Rule:
    return Rule(
        id=f"{field}-above-zero",
        field=f".{field}",
        rule=f"!{given(quantity)} || quantity(string({quantity})).isGreaterThan(quantity('0'))",
        message="must be above 0, such as 16Gi",
    )


def named_once(rule_id: str, field: str, *, when: str, resource: str, count: str, source: str) -> Rule:
    """Return the rule that a resource that the operator adds has the same count if the resources list it, too."""

    def other(block: str) -> str:
        amounts = f"self{field}.{block}"
        return f"({resource} in {amounts} && string({amounts}[{resource}]) != string({count}))"

    return Rule(
        id=rule_id,
        field=field,
        rule=f"!({when}) || !({other('limits')} || {other('requests')})",
        message=f"names a resource of {source} with another count; leave it out",
        message_expression=cel_message(
            f"names {{{resource}}} with another count than {source} {{{count}}}; leave it out"
        ),
    )


def _within_limits(field: str, when: str = "true") -> Rule:
    """Return the rule that requests are within limits; the API server would refuse the pods.

    A rule of the admission policy: before Kubernetes 1.34 the schema's estimate of its cost, for quantities of any
    length, is beyond what a definition may have.
    """
    block = f"object.spec{field}"
    over = (
        f"name in {block}.limits && "
        f"quantity(string({block}.requests[name])).isGreaterThan(quantity(string({block}.limits[name])))"
    )
    return Rule(
        id=f"requests-within-limits-of{field}",
        field=field,
        rule=f"!({when}) || {no_item(f'{block}.requests', 'name', over)}",
        message="requests more of a resource than its limit; write less, or leave the request out",
    )


_FORWARD = "object.spec.fbd.forward"
WITHIN_LIMITS = (
    _within_limits(".resources"),
    _within_limits(".analyzer.resources"),
    _within_limits(".fbd.forward.resources", f"has({_FORWARD}) && has({_FORWARD}.resources)"),
)
_RESOURCES = (
    named_once(
        "gpus-named-once",
        ".resources",
        when="true",
        resource="self.gpuResourceName",
        count="self.gpusPerNode",
        source="gpusPerNode",
    ),
    named_once(
        "rdma-named-once",
        ".resources",
        when="self.network.rdma.enabled && has(self.network.rdma.resourceName)",
        resource="self.network.rdma.resourceName",
        count="self.network.rdma.count",
        source="network.rdma.count",
    ),
    _above_zero("shm.sizeLimit", _SHM),
    Rule(
        id="shm-within-memory",
        field=".shm.sizeLimit",
        rule=f"!has({_SHM}) || !('memory' in {_LIMITS}) || "
        f"quantity(string({_SHM})).isLessThan(quantity(string({_LIMITS}['memory'])))",
        message="must be below resources.limits.memory, which it is charged to",
        message_expression=cel_message(
            f"{{{_SHM}}} is not below resources.limits.memory {{{_LIMITS}['memory']}}, which it is charged to"
        ),
    ),
    Rule(
        id="analyzer-volume-has-space",
        field=".analyzer.volume.sizeLimit",
        rule=f"!{given(_STORE)} || !quantity(string({_STORE})).isLessThan(quantity('{LEAST_STORE}'))",
        message=f"must be at least {LEAST_STORE}, such as 10Gi: half of it is for archived traces",
        message_expression=cel_message(
            f"{{{_STORE}}} is less than {LEAST_STORE}; write more, such as 10Gi: half of it is for archived traces"
        ),
    ),
)


def _mount(name: str, volume: str) -> tuple[Rule, Rule, Rule]:
    place, sub = f"{volume}.mountPath", f"{volume}.subPath"
    return (
        Rule(
            id=f"{name}-mount-is-a-path",
            field=f".{name}.volume.mountPath",
            rule=f"!has({volume}) || {is_path(place)}",
            message="must be an absolute path below / without '..' and ':', such as /data",
            message_expression=cel_message(
                f"{{{place}}} is not an absolute path below / without '..' and ':'; write one such as /data"
            ),
        ),
        Rule(
            id=f"{name}-mount-is-free",
            field=f".{name}.volume.mountPath",
            rule=f"!has({volume}) || !{is_taken(place)}",
            message="is a directory of the system or of the operator; write another, such as /data",
            message_expression=cel_message(
                f"{{{place}}} belongs to the system or the operator; write another, such as /data"
            ),
        ),
        Rule(
            id=f"{name}-sub-path-is-relative",
            field=f".{name}.volume.subPath",
            rule=f"!has({volume}) || !has({sub}) || !({sub}.startsWith('/') || {sub}.{_UP})",
            message="must be a path inside of the volume, without / in front and without '..'",
        ),
    )


_MOUNTS = (
    *_mount("data", _DATA),
    *_mount("checkpoint", _SAVED),
    Rule(
        id="mounts-apart",
        field=".checkpoint.volume.mountPath",
        rule=f"!({given(_DATA, _SAVED)}) || "
        f"({_DATA}.mountPath != {_SAVED}.mountPath && {_DATA}.mountPath + '/' != {_SAVED}.mountPath && "
        f"{_DATA}.mountPath != {_SAVED}.mountPath + '/')",
        message="is that of data.volume too; write another",
        message_expression=cel_message(f"{{{_SAVED}.mountPath}} is the mountPath of data.volume too; write another"),
    ),
    Rule(
        id="checkpoints-are-written",
        field=".checkpoint.volume.readOnly",
        rule=f"!has({_SAVED}) || !{_SAVED}.readOnly || !has(self.checkpoint.save) || "
        f"!self.checkpoint.save.startsWith({_SAVED}.mountPath)",
        message="checkpoint.save lies on this volume; leave readOnly out",
    ),
)


_TWICE = "!self.initializers.exists_one(other, other.name == one.name)"
_ASTRAY = (
    f"has(one.target) && one.scope == 'Job' && !{lies_on('one.target', _DATA)} && !{lies_on('one.target', _SAVED)}"
)


def _of_initializers(rule_id: str, wrong: str, *, says: str, message: str, in_schema: bool = False) -> Rule:
    return Rule(
        id=rule_id,
        field=".initializers",
        rule=no_item("self.initializers", "one", wrong),
        message=says,
        message_expression=first_item("self.initializers", "one", wrong, message),
        in_schema=in_schema,
    )


_INITIALIZERS = (
    _of_initializers(
        "initializer-given-twice",
        _TWICE,
        says="hold a name twice; write another",
        message="{one.name} is given twice; write another name",
        in_schema=True,
    ),
    _of_initializers(
        "initializer-needs-target",
        "has(one.storageUri) && !has(one.target)",
        says="storageUri needs target: DIRECTORY",
        message="{one.name} has a storageUri and needs target: DIRECTORY",
    ),
    _of_initializers(
        "initializer-target-is-a-path",
        f"has(one.target) && (!{is_path('one.target')} || {is_taken('one.target')})",
        says="a target must be an absolute path without '..', not of the system or the operator",
        message="target {one.target} of {one.name} must be an absolute path without '..', not of the system or the "
        "operator; write one such as /data",
    ),
    _of_initializers(
        "initializer-target-on-a-volume",
        f"{_ASTRAY} && {is_path('one.target')} && !{is_taken('one.target')}",
        says="a target with scope Job must lie on data.volume or checkpoint.volume, which the workers see",
        message="target {one.target} of {one.name} is not on data.volume or checkpoint.volume, which the workers see; "
        "write one below their mountPath, or scope: Node",
    ),
)


def _reserved(what: str) -> Rule:
    keys = f"self.podTemplate.metadata.{what}"
    listed = ", ".join(f"'{label}'" for label in OUR_LABELS)
    ours = f"key.startsWith('{GROUP}/') || key in [{listed}]"
    return Rule(
        id=f"pod-{what}-are-not-ours",
        field=f".podTemplate.metadata.{what}",
        rule=no_item(keys, "key", ours),
        message=f"hold one that the operator sets ({GROUP}/... or a common one of app.kubernetes.io); leave it out",
    )


_PODS = (_reserved("labels"), _reserved("annotations"))
CLUSTER_RULES = (*_RESOURCES, *_MOUNTS, *_INITIALIZERS, *_PODS)
