"""The rank table: which ranks run at which address. Pure functions."""

import dataclasses
import hashlib
import ipaddress
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from megatronapp_common.names import RankOrder
from megatronapp_common.topology import FbdWorld, RankRole
from megatronapp_trainer.launch.rendezvous.messages import JoinRequest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEntry:
    """Entry of one worker in the table."""

    index: int
    address: str
    node: str
    ranks: tuple[int, ...]
    roles: tuple[RankRole, ...] = ()
    """Passes that each of the ranks runs, in the order of local ranks; empty if all ranks run all passes."""

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the document."""
        roles = {"roles": [role.value for role in self.roles]} if self.roles else {}
        return {"index": self.index, "address": self.address, "node": self.node, "ranks": list(self.ranks), **roles}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Read an entry of the document. Raises KeyError or ValueError."""
        return cls(
            index=document["index"],
            address=document["address"],
            node=document["node"],
            ranks=tuple(document["ranks"]),
            roles=tuple(RankRole(role) for role in document.get("roles", ())),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankTable:
    """All workers in the order of their ranks. The master is the worker where rank 0 runs."""

    attempt: int
    master_address: str
    master_port: int
    workers: tuple[WorkerEntry, ...]

    def worker(self, index: int) -> WorkerEntry:
        """Return the entry of a worker.

        Raises KeyError if the table lacks it.
        """
        for worker in self.workers:
            if worker.index == index:
                return worker
        raise KeyError(index)

    def node_rank(self, index: int) -> int:
        """Return the position of a worker in the order of ranks."""
        return self.workers.index(self.worker(index))

    @property
    def world_size(self) -> int:
        """Return the number of ranks of all workers."""
        return sum(len(worker.ranks) for worker in self.workers)

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the content; two launchers with the same digest have the same table."""
        content = json.dumps(self._content(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()

    def _content(self) -> dict[str, Any]:
        return {
            "attempt": self.attempt,
            "masterAddr": self.master_address,
            "masterPort": self.master_port,
            "workers": [worker.to_json() for worker in self.workers],
        }

    def to_json(self) -> dict[str, Any]:
        """Return the document of docs/contracts.md, section 3."""
        return {"digest": self.digest, **self._content()}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        """Read the table from a document that worker 0 has signed.

        Raises ValueError if the digest does not match its content.
        """
        table = cls(
            attempt=document["attempt"],
            master_address=document["masterAddr"],
            master_port=document["masterPort"],
            workers=tuple(WorkerEntry.from_json(worker) for worker in document["workers"]),
        )
        if table.digest != document["digest"]:
            raise ValueError("the digest of the rank table is not that of its content")
        return table


_KEYS: Mapping[RankOrder, Callable[[JoinRequest], tuple[Any, ...]]] = {
    RankOrder.INDEX: lambda join: (join.index,),
    RankOrder.IP: lambda join: (ipaddress.IPv4Address(join.address), join.index),
    RankOrder.TOPOLOGY: lambda join: (join.topology.split(","), join.index),
}
"""Sort key of workers for each order; the index makes every order a total one."""


def build_table(
    joins: Sequence[JoinRequest], order: RankOrder = RankOrder.INDEX, fbd: FbdWorld | None = None
) -> RankTable:
    """Number the ranks worker by worker, in this order. `joins` has every worker once, in any order.

    `fbd`: ranks of both roles of MegaFBD. If forward ranks have workers of their own, the backward workers are first in
    every order, as ranks are numbered by role.
    """
    forward = _forward_workers(joins, fbd)
    ordered = sorted(joins, key=lambda join: (join.index in forward, *_KEYS[order](join)))
    ends = list(itertools.accumulate(join.num_ranks for join in ordered))
    workers = tuple(
        _entry(join, range(end - join.num_ranks, end), fbd) for join, end in zip(ordered, ends, strict=True)
    )
    master = ordered[0]
    return RankTable(attempt=master.attempt, master_address=master.address, master_port=master.port, workers=workers)


def _entry(join: JoinRequest, ranks: range, fbd: FbdWorld | None) -> WorkerEntry:
    roles = () if fbd is None else tuple(fbd.role_of(rank) for rank in ranks)
    return WorkerEntry(index=join.index, address=join.address, node=join.node, ranks=tuple(ranks), roles=roles)


def _forward_workers(joins: Sequence[JoinRequest], fbd: FbdWorld | None) -> frozenset[int]:
    """Return the workers that have forward ranks alone: the last ones by index, as the backend numbers groups."""
    if fbd is None or not fbd.apart:
        return frozenset()
    by_index = sorted(joins, key=lambda join: join.index)
    firsts = itertools.accumulate((join.num_ranks for join in by_index), initial=0)
    return frozenset(join.index for join, first in zip(by_index, firsts, strict=False) if first >= fbd.backward_ranks)
