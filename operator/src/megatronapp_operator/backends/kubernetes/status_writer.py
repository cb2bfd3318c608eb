"""The part of the status that is not the plan's: sizes, the nodes of ranks, and what an attempt was made of. Pure."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatronapp_common.job import MegatronJob, PinnedSettings, Status, read_status
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.plan import AttemptTemplate

TABLE_ENTRIES = 32
"""Most entries of a rank table in the status; of a longer one, in a ConfigMap, the status has digest and reference."""


def attempt_template(pinned: PinnedSettings | None) -> AttemptTemplate | None:
    """Return the template of an attempt for the plan."""
    if pinned is None:
        return None
    return AttemptTemplate(attempt=pinned.attempt, template=pinned.template_hash, generation=pinned.generation)


def read_pinned(status: Mapping[str, Any]) -> PinnedSettings | None:
    """Parse what a stored status has pinned; None if that is nothing, or of an unknown shape."""
    return read_status({"pinned": status.get("pinned")}).pinned


def with_facts(
    job: MegatronJob,
    status: Status,
    *,
    manager: str,
    table: Object | None,
    pinned: PinnedSettings | None,
    urls: Mapping[str, str],
) -> Status:
    """Return the status with the fields that are not the plan's; `urls` has `hub_url` and `serve_url` if they exist."""
    current_table = None
    if table is not None and table.get("attempt") == status.attempt:
        current_table = shortened(table, f"{job.metadata.name}-ranks")
    return dataclasses.replace(
        status,
        world_size=job.world.world_size,
        data_parallel_size=job.world.data_parallel_size,
        manager=manager,
        pinned=pinned,
        rank_table=current_table,
        hub_url=urls.get("hub_url"),
        serve_url=urls.get("serve_url"),
    )


def rank_zero(table: Mapping[str, Any] | None, attempt: int) -> int | None:
    """Return the worker that holds rank 0 by this table; None for another attempt, or a table without workers."""
    if table is None or table.get("attempt") != attempt:
        return None
    return next((worker["index"] for worker in table.get("workers") or () if 0 in (worker.get("ranks") or ())), None)


def is_long(table: Mapping[str, Any]) -> bool:
    """Return True if the table needs a ConfigMap."""
    return len(table.get("workers") or ()) > TABLE_ENTRIES


def shortened(table: Mapping[str, Any], config_map: str) -> Object:
    """Return the table as written in the status."""
    if not is_long(table):
        return dict(table)
    return {key: value for key, value in table.items() if key != "workers"} | {"ref": config_map}
