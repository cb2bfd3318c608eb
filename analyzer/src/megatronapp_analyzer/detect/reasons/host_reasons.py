"""Reason of a slow host: what took its processors, from the counters of its worker.

What a step costs is explained by a counter that is at least half as large. Time that a hypervisor has withdrawn is a
part of that of all processors of the node, so there is no such bound for it: it must be larger than elsewhere.
"""

import dataclasses
from collections.abc import Sequence

from megatronapp_analyzer.detect.reasons.explanation import Explanation, is_known, others_text
from megatronapp_analyzer.detect.reasons.readings import HostReading
from megatronapp_analyzer.model import Reason

EXPLAINED_PART = 0.5
"""Part of what a step costs that a counter must reach."""
LEAST_RATE = 0.02
"""Least seconds per second, or part of the processors' time, that is a reason."""
TIMES_OTHERS = 2.0
"""How many times as large as for the others, or as before, a counter must be."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ComparedHosts:
    """Host of a suspect and those that it is compared with, in the same steps and before the fault."""

    suspect: HostReading
    ranks: Sequence[HostReading] = ()
    """Hosts of the other ranks: each with its own queue."""
    workers: Sequence[HostReading] = ()
    """Hosts of the other workers."""
    nodes: Sequence[HostReading] = ()
    """Hosts of workers on other nodes."""
    before: HostReading = dataclasses.field(default_factory=HostReading)
    """The suspect before the fault."""


def explain_host(found: Reason | None, lost_part: float, hosts: ComparedHosts) -> Explanation:
    """Return why a host was slow.

    `found`: what the spans of its ranks show. `lost_part`: the part of a step that it costs. A collector is known
    exactly. That a process was stopped or waited for a processor says less than what stopped it.
    """
    if found is Reason.GARBAGE_COLLECTION:
        return Explanation()
    suspect, before, least = hosts.suspect, hosts.before, max(LEAST_RATE, EXPLAINED_PART * lost_part)
    workers, nodes, ranks = (HostReading.typical(each) for each in (hosts.workers, hosts.nodes, hosts.ranks))
    if _is_more(suspect.throttled, workers.throttled, before.throttled, least):
        text = f"the processor limit of its container stopped its threads for {suspect.throttled:.2f} s per second"
        compared = _compared(workers.throttled, before.throttled, len(hosts.workers), "worker", "{:.2f} s")
        return Explanation(Reason.CPU_THROTTLED, (text + compared,))
    if _is_more(suspect.steal, nodes.steal, before.steal, LEAST_RATE):
        text = f"the hypervisor withdrew {suspect.steal:.0%} of the processor time of its node"
        compared = _compared(nodes.steal, before.steal, len(hosts.nodes), "worker", "{:.0%}")
        return Explanation(Reason.CPU_STEAL, (text + compared,))
    if found is not Reason.STOPPED and _is_more(suspect.queued, ranks.queued, before.queued, least):
        text = f"its threads waited for a processor for {suspect.queued:.2f} s per second"
        compared = _compared(ranks.queued, before.queued, len(hosts.ranks), "rank", "{:.2f} s")
        return Explanation(Reason.CPU_CONTENTION, (text + compared,))
    return Explanation()


def _is_more(value: float, others: float, before: float, least: float) -> bool:
    """Return whether a counter is large, and larger than that of the others, or without others than before."""
    usual = others if is_known(others) else before if is_known(before) else 0.0
    return value >= max(least, TIMES_OTHERS * usual)


def _compared(others: float, before: float, count: int, what: str, form: str) -> str:
    """Return what to compare a counter with, in words."""
    text = f", {form.format(others)} on {others_text(count, what)}" if is_known(others) else ""
    return text + (f", {form.format(before)} before" if is_known(before) else "")
