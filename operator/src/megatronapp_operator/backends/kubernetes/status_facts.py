"""The part of the status that is not the plan's: sizes, the nodes of ranks, and what an attempt was made of. Pure."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatronapp_common.job import MegatronJob
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.plan import AttemptTemplate, Status

TABLE_ENTRIES = 32
"""Most entries of a rank table in the status; of a longer one, in a ConfigMap, the status has digest and reference."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PinnedAttempt:
    """Images and template of the pods of an attempt. An operator of another release continues with them."""

    attempt: int
    trainer_image: str
    analyzer_image: str
    template_hash: str = ""
    key_id: str = ""
    """Id of the installation's key; empty: pinned by a release that had one key only."""
    generation: int = 0
    """Generation of the job's spec; 0: pinned by a release that did not store it."""

    @property
    def template(self) -> AttemptTemplate:
        """Template of the attempt for the plan."""
        return AttemptTemplate(attempt=self.attempt, template=self.template_hash, generation=self.generation)


def read_pinned(status: Mapping[str, Any]) -> PinnedAttempt | None:
    """Parse what a stored status has pinned; None if that is nothing, or of an unknown shape."""
    found = status.get("pinned") or {}
    try:
        return PinnedAttempt(
            attempt=int(found["attempt"]),
            trainer_image=str(found["trainerImage"]),
            analyzer_image=str(found["analyzerImage"]),
            template_hash=str(found.get("templateHash", "")),
            key_id=str(found.get("keyId", "")),
            generation=int(found.get("generation", 0)),
        )
    except (KeyError, TypeError, ValueError):
        return None


def status_facts(
    job: MegatronJob,
    status: Status,
    *,
    table: Mapping[str, Any] | None,
    pinned: PinnedAttempt | None,
    urls: Mapping[str, str],
) -> Object:
    """Return fields in addition to those of `status_document`; `urls` are `hubUrl` and `serveUrl`, if they exist."""
    document: Object = {"worldSize": job.world.world_size, "dataParallelSize": job.world.data_parallel_size}
    if pinned is not None:
        document["pinned"] = {
            "attempt": pinned.attempt,
            "trainerImage": pinned.trainer_image,
            "analyzerImage": pinned.analyzer_image,
            "templateHash": pinned.template_hash,
            "keyId": pinned.key_id,
            "generation": pinned.generation,
        }
    if table is not None and table.get("attempt") == status.attempt:
        document["rankTable"] = shortened(table, f"{job.metadata.name}-ranks")
    return document | dict(urls)


def rank_zero(table: Mapping[str, Any] | None, attempt: int) -> int | None:
    """Return the worker that holds rank 0 by this table; None for another attempt, or a table without workers."""
    if table is None or table.get("attempt") != attempt:
        return None
    return next((one["index"] for one in table.get("workers") or () if 0 in (one.get("ranks") or ())), None)


def is_long(table: Mapping[str, Any]) -> bool:
    """Return True if the table needs a ConfigMap."""
    return len(table.get("workers") or ()) > TABLE_ENTRIES


def shortened(table: Mapping[str, Any], config_map: str) -> Object:
    """Return the table as written in the status."""
    if not is_long(table):
        return dict(table)
    return {key: value for key, value in table.items() if key != "workers"} | {"ref": config_map}
