"""Schemas of the gateway's own interface. The hub's interface (its OpenAPI document) has those of hubs."""

from typing import Annotated, Literal

from pydantic import Field

from megatronapp_common.web.models import ApiModel


class GatewayJob(ApiModel):
    """A job in the list of jobs; `/api/v1/jobs/{namespace}/{name}/` leads to its hub."""

    namespace: str
    name: str
    uid: str
    phase: str
    iteration: Annotated[int | None, Field(description="Finished steps; null before the first report.")]
    total_iterations: int | None
    restarts: int
    findings: Annotated[list[str], Field(description="Sentences of the verdicts that are not cleared.")]
    hung_ranks: list[int]
    created_at: Annotated[str, Field(description="RFC 3339.")]


class LoginTicket(ApiModel):
    """Opens the pages once, within five minutes, at `/#code=TICKET`, with the rights of who asked for it."""

    ticket: str


class Health(ApiModel):
    """Answer of the probes."""

    status: Literal["ok"]
