"""The part of the status that is not the plan's: sizes, where the ranks are, and what an attempt was made of. Pure."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatronapp_common.job import MegatronJob
from megatronapp_operator.backends.kubernetes.client.api import Object
from megatronapp_operator.plan import AttemptTemplate, Status

TABLE_ENTRIES = 32
"""A longer rank table goes to a ConfigMap; the status keeps its digest and where it is."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PinnedAttempt:
    """What the pods of an attempt are made of. An operator of another release goes on with it."""

    attempt: int
    trainer_image: str
    analyzer_image: str
    template_hash: str = ""
    key_id: str = ""
    """Of the installation's key; empty: pinned by a release that had one key only."""
    generation: int = 0
    """Of the job's spec; 0: pinned by a release that did not keep it."""

    @property
    def template(self) -> AttemptTemplate:
        """The same as the plan sees it."""
        return AttemptTemplate(attempt=self.attempt, template=self.template_hash, generation=self.generation)


def read_pinned(status: Mapping[str, Any]) -> PinnedAttempt | None:
    """What a stored status has pinned; None if that is nothing, or of a shape that we do not know."""
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
    """Fields beside those of `status_document`; `urls` are `hubUrl` and `serveUrl`, where somebody listens."""
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
    """The worker that holds rank 0 by this table; None where it is of another attempt, or too long for the status."""
    if table is None or table.get("attempt") != attempt:
        return None
    return next((one["index"] for one in table.get("workers") or () if 0 in (one.get("ranks") or ())), None)


def is_long(table: Mapping[str, Any]) -> bool:
    """Whether the table needs a ConfigMap of its own."""
    return len(table.get("workers") or ()) > TABLE_ENTRIES


def shortened(table: Mapping[str, Any], config_map: str) -> Object:
    """The table as it stands in the status."""
    if not is_long(table):
        return dict(table)
    return {key: value for key, value in table.items() if key != "workers"} | {"ref": config_map}
