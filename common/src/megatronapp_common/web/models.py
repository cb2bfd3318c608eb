"""Base of the models of our interfaces, and the body of errors."""

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """Names are camelCase outside and snake_case inside; unknown fields are refused."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", serialize_by_alias=True)


class Problem(ApiModel):
    """Body of every answer that is not a success."""

    code: str
    message: str
    hint: str
