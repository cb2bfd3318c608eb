"""Advice on the number of replicas that a forward rank serves, from measured times.

In a round a forward rank serves each of its k replicas once, while each of these runs backward. Its length is that of
the longest of three: k forward passes, one backward pass, and k copies of shipments, which leave the forward rank one
after another. Passes fill the rounds of all ranks alike, so that a microbatch costs (k + 1) / k ranks for a round.
Where forward ranks run on the CPU, the time of GPUs counts alone: a microbatch costs one of them for a round.
"""

from typing import NamedTuple

WORTHWHILE = 0.05
"""Least share of a microbatch's cost that another number must save to be advised: measured times vary by less."""
MOST_SERVED = 8
"""Largest number that is considered where it does not divide the replicas."""


class PassSeconds(NamedTuple):
    """Seconds of a microbatch through all chunks of a rank, on the slowest stage."""

    forward: float
    backward: float
    """With the weight gradients."""
    ship: float


class Roles(NamedTuple):
    """Numbers of the ranks of a run."""

    replicas: int
    served: int
    """Replicas that a forward rank serves."""
    stages: int
    """Backward ranks of a replica."""
    merged: int = 1
    """Ranks of the tensor group that a forward rank serves; 1 where forward ranks are not merged."""
    forward_on_cpu: bool = False
    """True if backward ranks alone have GPUs."""

    @property
    def costly(self) -> str:
        """Return whose time counts, for messages."""
        return "GPUs" if self.forward_on_cpu else "ranks"

    def ranks(self, served: int) -> int:
        """Return the ranks of both roles if a forward rank serves this number of replicas."""
        return self.stages * (self.replicas + self.replicas // served)


class Advice(NamedTuple):
    """Number of replicas that a forward rank should serve; None where the number cannot be chosen."""

    backward_per_forward: int | None
    sentence: str


def round_seconds(seconds: PassSeconds, served: int) -> float:
    """Return the time in which one microbatch of each replica passes a forward rank and its backward ranks."""
    return max(served * seconds.forward, seconds.backward, served * seconds.ship)


def cost(seconds: PassSeconds, served: int, *, forward_on_cpu: bool = False) -> float:
    """Return the time of ranks that a microbatch takes on a stage, both roles together; with forward ranks on the CPU
    the time of GPUs.
    """
    ranks = 1.0 if forward_on_cpu else (served + 1) / served
    return round_seconds(seconds, served) * ranks


def advise(seconds: PassSeconds, roles: Roles) -> Advice:
    """Return the number of replicas for which measured times cost least, among the divisors of the replicas."""
    if roles.merged > 1:
        return Advice(None, _merged_sentence(seconds, roles))
    divisors = [served for served in range(1, roles.replicas + 1) if roles.replicas % served == 0]
    on_cpu = roles.forward_on_cpu
    best = min(divisors, key=lambda served: cost(seconds, served, forward_on_cpu=on_cpu))
    if _saving(seconds, roles, roles.served, best) <= WORTHWHILE:
        best = roles.served
    sentence = _fitting_sentence(seconds, roles) if best == roles.served else _changed_sentence(seconds, roles, best)
    ideal = min(range(1, MOST_SERVED + 1), key=lambda served: cost(seconds, served, forward_on_cpu=on_cpu))
    if ideal not in divisors and _saving(seconds, roles, best, ideal) > WORTHWHILE:
        sentence += (
            f"; --fbd-backward-per-forward {ideal} would take {_saving(seconds, roles, best, ideal):.0%} less time of "
            f"{roles.costly}, but does not divide the {roles.replicas} replica{'s' if roles.replicas > 1 else ''}"
        )
    return Advice(best, sentence)


def _saving(seconds: PassSeconds, roles: Roles, served: int, better: int) -> float:
    """Return the share of a microbatch's cost that another number of replicas saves."""
    on_cpu = roles.forward_on_cpu
    whole = cost(seconds, served, forward_on_cpu=on_cpu)
    return 1 - cost(seconds, better, forward_on_cpu=on_cpu) / whole if whole else 0.0


def _changed_sentence(seconds: PassSeconds, roles: Roles, best: int) -> str:
    now, then = (_milliseconds(round_seconds(seconds, served)) for served in (roles.served, best))
    return (
        f"--fbd-backward-per-forward {best} fits better: {roles.replicas} replicas on {roles.ranks(best)} ranks, not "
        f"{roles.ranks(roles.served)}, with {then} a microbatch{f', not {now},' if now != then else ' as now'} take "
        f"{_saving(seconds, roles, roles.served, best):.0%} less time of {roles.costly}"
    )


def _fitting_sentence(seconds: PassSeconds, roles: Roles) -> str:
    ship = "copies of shipments are the limit, which --fbd-ship selective or full makes less"
    forward = "forward ranks are the limit"
    if roles.forward_on_cpu:
        ship = "copies of shipments are the limit"
        forward = (
            "forward ranks, which run on the CPU, are the limit, and the GPUs of backward ranks wait "
            f"{_idle_backward(seconds, roles)} of the time"
        )
    limit = {
        roles.served * seconds.ship: ship,
        roles.served * seconds.forward: forward,
        seconds.backward: f"backward ranks are the limit, and forward ranks wait {_idle(seconds, roles)} of the time",
    }[round_seconds(seconds, roles.served)]
    return f"--fbd-backward-per-forward {roles.served} fits: {limit}"


def _merged_sentence(seconds: PassSeconds, roles: Roles) -> str:
    if seconds.forward > (1 + WORTHWHILE) * max(seconds.backward, seconds.ship):
        return (
            f"merged forward ranks are the limit: {_milliseconds(seconds.forward)} a microbatch for a tensor group of "
            f"{roles.merged}, whose backward pass takes {_milliseconds(seconds.backward)}; without "
            "--ignore-forward-tensor-parallel each rank of the group has a forward rank"
        )
    return (
        f"a merged forward rank keeps up with its tensor group of {roles.merged} and waits {_idle(seconds, roles)} of "
        "the time; a forward rank that serves several replicas, too, is not possible"
    )


def _idle(seconds: PassSeconds, roles: Roles) -> str:
    """Return the share of a round in which a forward rank runs no pass."""
    length = round_seconds(seconds, roles.served)
    return f"{1 - roles.served * seconds.forward / length if length else 0:.0%}"


def _idle_backward(seconds: PassSeconds, roles: Roles) -> str:
    """Return the share of a round in which a backward rank runs no pass."""
    length = round_seconds(seconds, roles.served)
    return f"{1 - seconds.backward / length if length else 0:.0%}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
