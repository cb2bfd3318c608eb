"""Requirements that the preflight of a worker checks (Env.PREFLIGHT)."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Self

from megatronapp_common.names import Env
from megatronapp_trainer.errors import UsageError

DEFAULT_TIMEOUT_S = 120.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PreflightRequirements:
    """Minimum of each resource; None, false or empty: not checked."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    """Limit of all checks together, in seconds."""
    gpus: int | None = None
    shm_bytes: int | None = None
    rdma: bool = False
    hca: str = ""
    """Adapters that must be up, in the syntax of NCCL_IB_HCA; empty: any one."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse the JSON of Env.PREFLIGHT; None if no check is requested.

        Raises UsageError for any other text.
        """
        if not text.strip():
            return None
        try:
            document = json.loads(text)
        except ValueError as error:
            raise UsageError(f"{Env.PREFLIGHT} is not JSON: {error}") from None
        if not isinstance(document, dict):
            raise UsageError(f"{Env.PREFLIGHT} is not an object: {text[:100]!r}")
        if document.get("enabled") is False:
            return None
        return cls(
            timeout_s=_number(document, "timeoutSeconds") or DEFAULT_TIMEOUT_S,
            gpus=_number(document, "gpus"),
            shm_bytes=_number(document, "shmBytes"),
            rdma=document.get("rdma") is True,
            hca=str(document.get("hca") or ""),
        )


def _number(document: Mapping[str, Any], name: str) -> int | None:
    value = document.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UsageError(f"{Env.PREFLIGHT}: {name} is {value!r}; it must be an integer from 0 on")
    return value
