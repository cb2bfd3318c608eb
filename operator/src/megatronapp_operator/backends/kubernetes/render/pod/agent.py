"""The analyzer's agent next to a trainer.

It is an ordinary container after the trainer's, and no init container: a cause that keeps it from starting must not
keep the training from starting (docs/adr/0010).
"""

from megatronapp_common.job import MegatronJob
from megatronapp_common.job.api.cluster import Resources
from megatronapp_common.names import Env
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.backends.kubernetes.render.pod import storage
from megatronapp_operator.backends.kubernetes.render.pod.environment import shared_environment, variables
from megatronapp_operator.backends.kubernetes.render.pod.security import container_security
from megatronapp_operator.backends.kubernetes.render.pod.worker_draft import AGENT, WorkerDraft
from megatronapp_operator.backends.kubernetes.render.settings import RenderSettings

LIMITS = {"cpu": "500m", "memory": "512Mi"}
REQUESTS = {"cpu": "50m", "memory": "128Mi"}
COMMAND = ("python3", "-m", "megatronapp_analyzer.agent", "--no-die-with-parent")


def agent(draft: WorkerDraft) -> Object:
    """Return the container's fields that a pod template may change."""
    made: Object = {
        "name": AGENT,
        **analyzer_image(draft.job, draft.settings),
        "resources": agent_resources(draft),
        "securityContext": container_security(read_only=True),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return made | ({"restartPolicy": "OnFailure"} if draft.settings.container_restarts else {})


def reserved_agent(draft: WorkerDraft) -> Object:
    """Return the container's fields that no template may change."""
    return {
        "name": AGENT,
        "command": list(COMMAND),
        "args": None,
        "env": [*shared_environment(draft), *variables({Env.RUN_DIR: storage.RUN})],
        "volumeMounts": storage.shared_mounts(draft),
    }


def analyzer_image(job: MegatronJob, settings: RenderSettings) -> Object:
    """Return image and pull policy of agent and hub."""
    own = job.spec.analyzer.image
    if own is None:
        return {"image": settings.analyzer_image, "imagePullPolicy": settings.image_pull_policy}
    return {"image": own, "imagePullPolicy": job.spec.image_pull_policy}


def agent_resources(draft: WorkerDraft) -> Object:
    """Return small limits, equal to the requests if the trainer's are: the pod keeps its class Guaranteed."""
    given = draft.spec.analyzer.resources
    if given.requests or given.limits:
        return given.to_dict()
    return {"requests": LIMITS if is_guaranteed(draft.group.resources) else REQUESTS, "limits": LIMITS}


def is_guaranteed(resources: Resources) -> bool:
    """Return True if the limits of CPU and memory equal the requests; a missing request defaults to the limit."""
    requested = resources.limits | resources.requests
    return all(name in resources.limits and resources.limits[name] == requested[name] for name in ("cpu", "memory"))
