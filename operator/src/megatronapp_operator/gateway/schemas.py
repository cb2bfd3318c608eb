"""Schemas of the gateway's own interface. The hub's interface (its OpenAPI document) has those of hubs."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """Names are camelCase outside and snake_case inside."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", serialize_by_alias=True)


class Problem(ApiModel):
    """Body of every answer that is not a success."""

    code: str
    message: str
    hint: str


class GatewayJob(ApiModel):
    """A job in the list of jobs; `/api/v1/jobs/{namespace}/{name}/` leads to its hub."""

    namespace: str
    name: str
    uid: str
    phase: str
    iteration: Annotated[int | None, Field(description="Finished steps; null before the first report.")]
    total_iterations: int | None
    restarts: int
    findings: Annotated[list[str], Field(description="Sentences of the verdicts that stand.")]
    hung_ranks: list[int]
    created_at: Annotated[str, Field(description="RFC 3339.")]


class LoginTicket(ApiModel):
    """Opens the pages once, within five minutes, at `/#code=TICKET`, with the rights of who asked for it."""

    ticket: str


class Health(ApiModel):
    """Answer of the probes."""

    status: Literal["ok"]
