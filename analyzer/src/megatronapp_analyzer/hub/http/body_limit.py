"""Limits of request bodies at the hub; lower for those who may not send prompts."""

from starlette.types import Scope

from megatronapp_analyzer.hub.http.access import API
from megatronapp_analyzer.web.roles import ROLE
from megatronapp_common.web.origin import READING
from megatronapp_common.web.tokens import TokenRole

MAX_BODY_BYTES = 64 << 10
"""Limit of JSON that users and programs send."""
MAX_PROMPT_BYTES = 4 << 20
"""Limit of prompts, which only controllers send; rank 0 accepts no more."""
PROMPTS_PATH = "/api/v1/scope/runs"


def limit_of(scope: Scope) -> int | None:
    """Return the number of bytes that the body of a request may have; None where no route reads one but by itself."""
    if not scope["path"].startswith(API) or scope["method"] in READING:
        return None
    prompts = scope["path"].rstrip("/") == PROMPTS_PATH and scope.get(ROLE) == TokenRole.CONTROLLER
    return MAX_PROMPT_BYTES if prompts else MAX_BODY_BYTES
