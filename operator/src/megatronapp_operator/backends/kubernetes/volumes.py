"""Check that the volume claims of a job can be mounted by all its workers. Pure."""

from collections.abc import Mapping

from megatronapp_common.job import MegatronJob
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.backends.kubernetes.render.pod.storage import claims

SHARED = frozenset({"ReadWriteMany"})
READABLE = SHARED | {"ReadOnlyMany"}


def claim_names(job: MegatronJob) -> list[str]:
    """Return the names of the claims that workers mount."""
    return list(dict.fromkeys(volume.claim for volume in claims(job)))


def find_volume_problem(job: MegatronJob, found: Mapping[str, Object | None]) -> str:
    """Return what is wrong with the claims, and what to do; empty: nothing."""
    return "; ".join(text for volume in claims(job) if (text := _of_claim(job, volume.claim, found.get(volume.claim))))


def _of_claim(job: MegatronJob, name: str, claim: Object | None) -> str:
    if claim is None:
        return f"the volume claim {name} does not exist in the job's namespace; create it"
    if job.world.nodes == 1:
        return ""
    modes = frozenset(claim["spec"].get("accessModes") or ())
    written = any(volume.claim == name and not volume.read_only for volume in claims(job))
    if modes & (SHARED if written else READABLE):
        return ""
    mode = "ReadWriteMany" if written else "ReadWriteMany or ReadOnlyMany"
    return (
        f"the volume claim {name} is {', '.join(sorted(modes)) or 'of no access mode'}, and {job.world.nodes} workers "
        f"mount it; if they are on several nodes it must be {mode}"
    )
