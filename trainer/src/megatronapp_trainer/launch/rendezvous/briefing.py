"""Briefing that worker 0 sends to all others once the gang is complete. Pure functions."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from megatronapp_common.names import RankOrder
from megatronapp_common.topology import FbdWorld
from megatronapp_trainer.errors import MessageError, StoppedError
from megatronapp_trainer.launch.rendezvous.messages import JoinRequest
from megatronapp_trainer.launch.rendezvous.rank_table import RankTable, build_table


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Briefing:
    """The rank table, with ports and options of the gang."""

    table: RankTable
    probe_ports: Mapping[int, int]
    """Port at which each worker answers probes of the others; 0: no port."""
    report: bool
    """True if worker 0 wants the progress documents of the others."""

    @classmethod
    def of(cls, joins: Sequence[JoinRequest], order: RankOrder, *, report: bool, fbd: FbdWorld | None = None) -> Self:
        """Number the ranks of a complete gang; `fbd`: ranks of both roles of MegaFBD."""
        return cls(
            table=build_table(joins, order, fbd),
            probe_ports={join.index: join.probe_port for join in joins},
            report=report,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the body of the line that answers a join."""
        return {
            "type": "table",
            "table": self.table.to_json(),
            "probePorts": {str(index): port for index, port in self.probe_ports.items()},
            "report": self.report,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any], own: JoinRequest) -> Self:
        """Read the answer to `own`.

        Raises:
            StoppedError: the gang was asked to stop before it was complete.
            MessageError: it is not a table, or not one of our attempt with us in it.
        """
        if document.get("type") == "stop":
            raise StoppedError(f"worker {document.get('worker')} was asked to stop before the gang was complete")
        if document.get("type") != "table":
            raise MessageError(f"a message of type {document.get('type')!r} in place of the rank table")
        try:
            table = RankTable.from_json(document["table"])
            ports = {int(index): int(port) for index, port in document["probePorts"].items()}
            _check_own(table, own)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise MessageError(f"a rank table that cannot be used: {error}") from error
        return cls(table=table, probe_ports=ports, report=document.get("report") is True)


def _check_own(table: RankTable, own: JoinRequest) -> None:
    if table.attempt != own.attempt:
        raise ValueError(f"it is of attempt {table.attempt}, not {own.attempt}")
    line = table.worker(own.index)
    if (line.address, len(line.ranks)) != (own.address, own.num_ranks):
        raise ValueError(f"worker {own.index} has {len(line.ranks)} ranks at {line.address} there")
