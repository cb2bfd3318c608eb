"""Sentences that describe verdicts to users."""

from megatronapp_analyzer.model import LINK_CAUSES, Cause, JobLayout, SubjectType, VerdictState, VerdictSubject

FEW_TIMES = 1.5
"""Slowdown below which two digits after the point are shown."""
_DOES = {
    Cause.COMPUTE: "computes {times} as long as expected",
    Cause.MEMORY: "computes {times} as long as expected, its memory-bound work most: its memory is busy",
    Cause.DATA: "waits for its data loader for {excess_ms:.1f} ms per microbatch",
    Cause.DATA_IMBALANCE: "gets more work than the others: its passes take {times} as long for their tokens",
    Cause.REGRESSION: "takes {times} as long as before in every pass",
    Cause.HOST: "stalls on its host for {excess_ms:.1f} ms per microbatch",
    Cause.UNDETERMINED: "takes {times} as long as the others: stage imbalance or slow rank, undetermined",
}


def name(subject: VerdictSubject, layout: JobLayout) -> str:
    """Name the subject and its place in the job."""
    if subject.type is SubjectType.LINK:
        source, destination = (f"{_role(rank, layout)}rank {rank}" for rank in subject.ranks)
        return f"The link from {source} to {destination}"
    if subject.type is SubjectType.GROUP:
        way = "The network" if subject.node is None else f"NVLink or PCIe of node {subject.node}"
        return f"{way} between {_role(subject.ranks[0], layout)}{_ranks(subject.ranks)}"
    titles = {
        SubjectType.NODE: f"Node {subject.node}",
        SubjectType.WORKER: f"Worker {subject.worker} on node {subject.node}",
        SubjectType.JOB: "The whole job",
    }
    if subject.type in titles:
        return f"{titles[subject.type]} ({_ranks(subject.ranks)})"
    at, role = layout.coordinates[subject.ranks[0]], _role(subject.ranks[0], layout)
    if subject.type in {SubjectType.STAGE, SubjectType.REPLICA}:
        part = f"Replica {at.dp} (" if subject.type is SubjectType.REPLICA else f"Stage {at.pp} ({role}"
        return f"{part}{_ranks(subject.ranks)})"
    if len(subject.ranks) == 1:
        return f"{_rank(subject.ranks[0], layout)} (stage {at.pp}, replica {at.dp}, node {subject.node})"
    return f"One of {_ranks(subject.ranks)} ({role}stage {at.pp}, replica {at.dp})"


def sentence(
    subject: VerdictSubject,
    cause: Cause,
    state: VerdictState,
    layout: JobLayout,
    *,
    launches_late: bool = False,
    not_running: bool = False,
    collects_garbage: bool = False,
    sends: bool = False,
    receives: bool = False,
    ratio: float,
    excess_s: float,
    lost_s: float,
    since: int,
) -> str:
    """Describe a slowness in one sentence.

    Of a host's fault, `launches_late` is true if late launches are most of it, `collects_garbage` if collections are,
    `not_running` if the process is stopped or waits for a processor otherwise. Of a rank whose messages are late,
    `sends` and `receives` say which.
    """
    if subject.type is SubjectType.GROUP:
        does = "makes steps longer: collectives transfer slowly"
    elif cause in LINK_CAUSES and subject.type is SubjectType.LINK:
        way = " (NVLink or PCIe)" if cause is Cause.NODE_LINK else ""
        does = f"delivers {excess_s * 1e3:.1f} ms late{way}"
    elif cause in LINK_CAUSES:
        ways = ["sends"] * sends + ["receives"] * (receives or not sends)
        does = f"{' and '.join(ways)} everything {excess_s * 1e3:.1f} ms late"
    elif cause is Cause.HOST and launches_late:
        does = f"waits for its host, which launches kernels {excess_s * 1e3:.1f} ms late per microbatch"
    elif cause is Cause.HOST and collects_garbage:
        does = f"does not train for {excess_s * 1e3:.1f} ms per microbatch: Python collects garbage"
    elif cause is Cause.HOST and not_running:
        does = f"does not run for {excess_s * 1e3:.1f} ms per microbatch: it is stopped, or waits for a processor"
    else:
        does = _DOES[cause].format(times=_times(ratio), excess_ms=excess_s * 1e3)
    if len(subject.ranks) > 1 and subject.type is SubjectType.RANK:
        does += "; they meet inside every span, so the slow one cannot be identified"
    when = f"since step {since}" if state is not VerdictState.CLEARED else f"from step {since}; it is over"
    return f"{name(subject, layout)} {does} {when}; it costs {lost_s:.3f} s per step."


def _times(ratio: float) -> str:
    """Write a slowdown with two digits after the point where one would hide it."""
    return f"{ratio:.2f} times" if ratio < FEW_TIMES else f"{ratio:.1f} times"


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    listed = [str(rank) for rank in ranks[:8]] + (["..."] if len(ranks) > 8 else [])
    return "ranks " + ", ".join(listed[:-1]) + " and " + listed[-1]


def _rank(rank: int, layout: JobLayout) -> str:
    """Name a rank at the start of a sentence, with its role if ranks have roles."""
    name = f"{_role(rank, layout)}rank {rank}"
    return name[0].upper() + name[1:]


def _role(rank: int, layout: JobLayout) -> str:
    return f"{layout.roles[rank]} " if layout.roles else ""


def hang_sentence(rank: int, victims: tuple[int, ...], silent_s: float, reason: str, layout: JobLayout) -> str:
    """Describe a hanging rank."""
    at = layout.coordinates[rank]
    place = f"{_rank(rank, layout)} (stage {at.pp}, replica {at.dp}, node {layout.nodes[rank]})"
    waiting = f" {_ranks(victims)[0].upper()}{_ranks(victims)[1:]} only wait for it." if victims else ""
    return f"{place} hangs: no progress for {silent_s:.0f} s; {reason}.{waiting}"
