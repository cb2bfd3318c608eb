"""A job, and helpers of all steps that are carried out for it."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Sequence

from megatronapp_common.job import MegatronJob
from megatronapp_operator.backends.kubernetes.client.errors import NameTakenError
from megatronapp_operator.backends.kubernetes.client.resources import Object, Resource
from megatronapp_operator.backends.kubernetes.render.settings import AttemptSettings, JobOwner, RenderSettings


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """A job, and what its objects are rendered from."""

    document: Object
    """MegatronJob, as read from the API server."""
    job: MegatronJob
    owner: JobOwner
    attempt: AttemptSettings
    settings: RenderSettings


async def run_all(steps: Sequence[Awaitable[None]]) -> None:
    """Run all steps concurrently to their ends, and then raise the first error."""
    results = await asyncio.gather(*steps, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


def name_taken(resource: Resource, namespace: str, name: str) -> NameTakenError:
    """Return the error for an object of another owner."""
    return NameTakenError(
        f"{resource.plural} {namespace}/{name} exists and belongs to another owner; "
        "unless it vanishes with an earlier job of this name, delete it, or use another name for the job"
    )
