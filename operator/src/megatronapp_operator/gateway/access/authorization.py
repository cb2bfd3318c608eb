"""Authorization: what each caller of the gateway may do."""

import asyncio
import dataclasses
from collections.abc import Sequence

from megatronapp_common.web.problems import HttpError
from megatronapp_common.web.tokens import TokenRole
from megatronapp_operator.gateway.access.subject_access import AccessReviews, Permission, User, Verb
from megatronapp_operator.gateway.job_catalog import CatalogJob, JobCatalog

LOG_IN = "Open the address that `megatronapp ui` prints, or send 'Authorization: Bearer TOKEN'."
MAX_TOKEN_BYTES = 8 << 10
"""Tokens of a cluster are a few KiB."""
TOKEN_HOLDER = "a holder of the job's token"
AT_ONCE = 16
"""Questions about rights that one list asks at the same time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """A caller who has proved to be a user of the cluster, to hold tokens of jobs, or both."""

    user: User | None
    jobs: frozenset[str]
    """Uids of the jobs whose tokens they hold."""
    controlled: frozenset[str] = frozenset()
    """Jobs of which they hold the controller's token."""

    @property
    def name(self) -> str:
        """Name of the caller in the events of a job; tokens of jobs carry no user's name."""
        return self.user.name if self.user is not None else TOKEN_HOLDER

    @property
    def identity(self) -> str:
        """Whose share of sessions, connections and turns they use. Who looks takes nothing of who controls."""
        if self.user is not None:
            return f"user {self.user.name}"
        return f"controller of job {min(self.controlled)}" if self.controlled else f"viewer of job {min(self.jobs)}"


class Authorizer:
    """Decides. Without `reviews` only tokens of jobs count. Methods raise ApiError if the cluster does not answer."""

    def __init__(self, catalog: JobCatalog, reviews: AccessReviews | None) -> None:
        self._catalog = catalog
        self._reviews = reviews

    async def identify(self, tokens: Sequence[str]) -> Caller:
        """Identify the owner of these tokens. Raises HttpError (401) if none of them is valid."""
        if any(len(token.encode()) > MAX_TOKEN_BYTES for token in tokens):
            raise HttpError(401, "log-in", f"the token has more than {MAX_TOKEN_BYTES} bytes", LOG_IN)
        jobs, controlled = set[str](), set[str]()
        user = None
        found = await asyncio.gather(*map(self._catalog.job_of, tokens))  # who is not known waits for one listing
        for token, known in zip(tokens, found, strict=True):
            if known is not None:
                job, role = known
                jobs.add(job.uid)
                controlled |= {job.uid} if role is TokenRole.CONTROLLER else set()
            elif self._reviews is not None and user is None:
                user = await self._reviews.user_of(token)
        if user is None and not jobs:
            raise HttpError(401, "log-in", self._unknown(some=bool(tokens)), LOG_IN)
        return Caller(user, frozenset(jobs), frozenset(controlled))

    async def admit(self, caller: Caller, verb: Verb, namespace: str, name: str) -> CatalogJob:
        """The job, where the caller may. Raises HttpError: 403 without the right, 404 if there is no such job."""
        job = await self._catalog.find(namespace, name)
        if job is not None and job.uid in caller.jobs:
            return job
        right = Permission(verb, namespace, name)
        if caller.user is None or self._reviews is None:
            hint = "Open it with `megatronapp ui`, or ask for the right to read its Secret."
            raise HttpError(
                403, "other-job", f"this is not the token of {namespace}/{name}, or there is no such job", hint
            )
        if not await self._reviews.allows(caller.user, right):
            hint = f"Ask for a Role that allows to {right.verb} megatronjobs in namespace {namespace!r}."
            raise HttpError(403, "no-right", f"{caller.user.name} may not {right}", hint)
        if job is None:
            raise HttpError(404, "no-job", f"there is no job {namespace}/{name}", "`megatronapp get` lists the jobs.")
        return job

    async def role(self, caller: Caller, job: CatalogJob) -> TokenRole:
        """Return the role at its hub of a caller who may see the job: who may update it may control its model."""
        if job.uid in caller.controlled:
            return TokenRole.CONTROLLER
        if caller.user is None or self._reviews is None:
            return TokenRole.VIEWER
        may = await self._reviews.allows(caller.user, Permission(Verb.UPDATE, job.namespace, job.name))
        return TokenRole.CONTROLLER if may else TokenRole.VIEWER

    async def control(self, caller: Caller, namespace: str, name: str) -> CatalogJob:
        """The job, where the caller may generate and pin. Raises HttpError as `admit` does."""
        job = await self.admit(caller, Verb.UPDATE, namespace, name)
        if await self.role(caller, job) is not TokenRole.CONTROLLER:
            hint = "Open it with `megatronapp ui` as a user who may update the job."
            raise HttpError(403, "needs-controller", "the viewer's token of a job is read-only", hint)
        return job

    async def visible(self, caller: Caller) -> list[CatalogJob]:
        """The jobs that the caller may list, and those whose tokens they hold."""
        jobs = await self._catalog.jobs()
        namespaces = await self._listable(caller, {job.namespace for job in jobs})
        return [job for job in jobs if job.uid in caller.jobs or job.namespace in namespaces]

    async def _listable(self, caller: Caller, namespaces: set[str]) -> set[str]:
        user, reviews = caller.user, self._reviews
        if user is None or reviews is None:
            return set()
        if await reviews.allows(user, Permission(Verb.LIST, "")):
            return namespaces
        limit = asyncio.Semaphore(AT_ONCE)

        async def ask(namespace: str) -> bool:
            async with limit:
                return await reviews.allows(user, Permission(Verb.LIST, namespace))

        ordered = sorted(namespaces)
        allowed = await asyncio.gather(*map(ask, ordered))
        return {namespace for namespace, yes in zip(ordered, allowed, strict=True) if yes}

    def _unknown(self, *, some: bool) -> str:
        if not some:
            return "the gateway needs to know who you are"
        whose = "is no job's token" if self._reviews is None else "is not known to the cluster, nor a job's"
        return f"the token {whose}, or its time is over"
