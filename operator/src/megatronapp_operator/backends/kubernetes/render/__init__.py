"""Rendering of a MegatronJob to the objects that run it. Pure: equal job, attempt and settings give equal objects."""

from megatronapp_operator.backends.kubernetes.render.disruption import disruption_budget
from megatronapp_operator.backends.kubernetes.render.features import missing_features
from megatronapp_operator.backends.kubernetes.render.gang import gang_objects, ranks, secret
from megatronapp_operator.backends.kubernetes.render.hub import (
    ANNOTATION_STARTS,
    hub_hash,
    hub_objects,
    hub_pod,
    unwanted_hub_objects,
)
from megatronapp_operator.backends.kubernetes.render.objects import ObjectNames, serve_url
from megatronapp_operator.backends.kubernetes.render.pod.environment import ANNOTATION_TOPOLOGY, coordinator
from megatronapp_operator.backends.kubernetes.render.pod.initializers import init_pod
from megatronapp_operator.backends.kubernetes.render.pod.storage import loses_checkpoints
from megatronapp_operator.backends.kubernetes.render.pod.worker import may_have_spares, template_hash, worker_pod
from megatronapp_operator.backends.kubernetes.render.queueing import group_resource
from megatronapp_operator.backends.kubernetes.render.settings import AttemptSettings, JobOwner, Rendered, RenderSettings

__all__ = [
    "ANNOTATION_STARTS",
    "ANNOTATION_TOPOLOGY",
    "AttemptSettings",
    "JobOwner",
    "ObjectNames",
    "RenderSettings",
    "Rendered",
    "coordinator",
    "disruption_budget",
    "gang_objects",
    "group_resource",
    "hub_hash",
    "hub_objects",
    "hub_pod",
    "init_pod",
    "loses_checkpoints",
    "may_have_spares",
    "missing_features",
    "ranks",
    "secret",
    "serve_url",
    "template_hash",
    "unwanted_hub_objects",
    "worker_pod",
]
