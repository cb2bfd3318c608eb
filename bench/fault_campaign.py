"""Disturbs a running job in several ways, one after the other, and compares what its detector names with the truth."""

import dataclasses
import os
import pathlib
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import httpx
from rank_garbage.sitecustomize import COLLECT, RELEASE

LATE = 20
"""Steps after a disturbance in which its verdict still counts for it."""
BEFORE = 20
"""Steps before a disturbance that are its healthy steps, without the newest."""
LEAST_GROWN = 0.5
"""Part of the cost of a disturbance that a verdict which began before it must state in it to count for it."""
POLL_S = 0.1
BUSY = "while True: pass"
"""A program that uses a processor all the time."""


class ProcessDisturber:
    """Starts and ends disturbances that need no more than processes and signals."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._repeated: list[tuple[threading.Event, threading.Thread]] = []

    def run(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a process that is killed when the disturbance ends."""
        process = subprocess.Popen(command)
        self._processes.append(process)
        return process

    def stop_processes(self, pids: Sequence[int], duty: float, cycle_s: float) -> None:
        """Stop processes together for a part of each cycle."""
        self._repeat(pids, [(signal.SIGSTOP, duty * cycle_s), (signal.SIGCONT, (1 - duty) * cycle_s)])

    def collect(self, pid: int, pause_s: float) -> None:
        """Let a rank of a job with `collecting_environment` collect its garbage now and then, in the midst of steps."""
        self._repeat([pid], [(COLLECT, pause_s)], at_end=RELEASE)

    def _repeat(self, pids: Sequence[int], signals: Sequence[tuple[int, float]], *, at_end: int | None = None) -> None:
        """Send signals to processes again and again, each with a pause after it, and another one at the end."""
        ended = threading.Event()

        def send(number: int) -> None:
            for pid in pids:
                os.kill(pid, number)

        def repeat() -> None:
            while not ended.is_set():
                for number, seconds in signals:
                    send(number)
                    time.sleep(seconds)
            if at_end is not None:
                send(at_end)

        thread = threading.Thread(target=repeat)
        self._repeated.append((ended, thread))
        thread.start()

    def calm(self) -> None:
        """End what was started."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes.clear()
        for ended, thread in self._repeated:
            ended.set()
            thread.join()
        self._repeated.clear()


def collecting_environment() -> dict[str, str]:
    """Return the variable, as `spec.env` has it, by which the ranks of a job collect their garbage on a signal."""
    folder = str(pathlib.Path(__file__).with_name("rank_garbage"))
    paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"name": "PYTHONPATH", "value": os.pathsep.join(paths)}


AnyDisturber = TypeVar("AnyDisturber", bound=ProcessDisturber)


@dataclasses.dataclass(kw_only=True)
class Disturbance(Generic[AnyDisturber]):
    """A way to slow the job, and what should be named for it."""

    name: str
    start: Callable[[AnyDisturber], None]
    cause: str
    subjects: Sequence[Sequence[int]] = ((1,),)
    """Ranks of each subject that should be named."""
    also: str = ""
    """Another cause that is right."""
    begin: int = 0
    end: int = 0
    """First step, and first step after it: the planned ones, then the real ones."""

    def contains(self, step: int) -> bool:
        """Return true if a verdict that began at `step` belongs to the disturbance."""
        return self.begin - 1 <= step < self.end + LATE


@dataclasses.dataclass(kw_only=True)
class Named:
    """A verdict: the step of the job at which it was first seen, and its newest state while confirmed."""

    seen_at: int
    verdict: dict[str, Any]
    costs_s: dict[int, float] = dataclasses.field(default_factory=dict)
    """Its stated cost while it was confirmed, by step of the job."""

    def cost_in(self, steps: range) -> float | None:
        """Return what it said last in these steps; None if it was not confirmed in them."""
        return next((cost for step, cost in sorted(self.costs_s.items(), reverse=True) if step in steps), None)


class FaultCampaign(Generic[AnyDisturber]):
    """Disturbances of one job, and all verdicts that its users could see meanwhile."""

    def __init__(self, hub: httpx.Client, disturber: AnyDisturber, *, log: Callable[[str], None] = print) -> None:
        self.named: dict[str, Named] = {}
        self._hub = hub
        self._disturber = disturber
        self._log = log

    def step(self) -> int:
        """Return the newest step of the training, and note the verdicts of now."""
        step = newest_step(self._hub)
        for verdict in self._hub.get("/api/v1/verdicts").json():
            if verdict["state"] == "suspect":
                continue
            known = self.named.get(verdict["id"])
            if known is None:
                self._log(f"step {step:4}  {verdict['sentence']}")
                known = self.named[verdict["id"]] = Named(seen_at=step, verdict=verdict)
            if verdict["state"] == "confirmed":
                known.verdict = verdict
                known.costs_s[step] = verdict["effect"]["secondsPerStep"]
        return step

    def run(self, planned: Sequence[Disturbance[AnyDisturber]], *, deadline: float) -> list[Disturbance[AnyDisturber]]:
        """Disturb the job as its steps go by, until LATE steps after the last disturbance; note their real steps.

        Returns those that have ended before `deadline` (`time.monotonic`).
        """
        changes = [change for each in planned for change in ((each.begin, each, True), (each.end, each, False))]
        over: list[Disturbance[AnyDisturber]] = []
        step = 0
        try:
            while (changes or step < planned[-1].end + LATE) and time.monotonic() < deadline:
                step = self.step()
                if changes and step >= changes[0][0]:
                    _, disturbance, begins = changes.pop(0)
                    if begins:
                        disturbance.begin = step
                        disturbance.start(self._disturber)
                    else:
                        disturbance.end = step
                        self._disturber.calm()
                        over.append(disturbance)
                    self._log(f"step {step:4}  -- {disturbance.name} {'begins' if begins else 'ends'}")
                time.sleep(POLL_S)
        finally:
            self._disturber.calm()
        return over

    def judge(self, disturbances: Sequence[Disturbance[AnyDisturber]], *, least: float) -> list[dict[str, Any]]:
        """Return a row of each disturbance, and the last of verdicts that belong to none.

        A disturbance matters if steps are longer by at least `least` of the healthy ones. A verdict that began before
        it counts for it, too, by the cost that it had in it: where a rank was slow already, its verdict grows.
        """
        length_s = {step["step"]: step["durationNs"] * 1e-9 for step in self._hub.get("/api/v1/steps").json()}
        left = list(self.named.values())
        rows = []
        for each in disturbances:
            own = [found for found in left if each.contains(found.verdict["since"]["step"])]
            left = [found for found in left if found not in own]
            earlier = [found for found in left if found.verdict["since"]["step"] < each.begin - 1]
            rows.append(_row(each, own, earlier, length_s, least))
        rows.append({"name": "healthy steps", "matters": False, "parts": [], "others": _sentences(left)})
        return rows


def newest_step(hub: httpx.Client) -> int:
    """Return the newest step of the training; 0 before its first."""
    return int((hub.get("/api/v1/summary").json()["progress"] or {}).get("iteration") or 0)


def _sentences(found: Sequence[Named]) -> list[str]:
    return [each.verdict["sentence"] for each in found]


def _row(
    disturbance: Disturbance[Any],
    own: Sequence[Named],
    earlier: Sequence[Named],
    length_s: dict[int, float],
    least: float,
) -> dict[str, Any]:
    """Return the row of a disturbance: what was named with the right subject and cause, in part, and wrongly.

    In part is a verdict about some of the ranks of a subject, or about a tensor-parallel group with it among them.
    """
    begin = disturbance.begin
    healthy_s = statistics.median(length_s[step] for step in range(begin - BEFORE, begin - 1) if step in length_s)
    slow_s = statistics.median(length_s[step] for step in range(begin + 5, disturbance.end) if step in length_s)
    right: dict[tuple[int, ...], Named] = {}
    parts, others = [], []
    for found in own:
        ranks = set(found.verdict["subject"]["ranks"])
        is_cause = found.verdict["cause"] in {disturbance.cause, disturbance.also}
        whole = next((tuple(subject) for subject in disturbance.subjects if set(subject) == ranks), None)
        if is_cause and whole is not None and whole not in right:
            right[whole] = found
        elif is_cause and any(ranks < set(subject) or _is_among(found, subject) for subject in disturbance.subjects):
            parts.append(found)
        else:
            others.append(found)
    estimates_s = {subject: found.verdict["effect"]["secondsPerStep"] for subject, found in right.items()}
    for found in earlier:
        subject, cost_s = tuple(found.verdict["subject"]["ranks"]), found.cost_in(range(begin + 5, disturbance.end))
        is_cause = found.verdict["cause"] in {disturbance.cause, disturbance.also}
        is_missing = subject in set(map(tuple, disturbance.subjects)) - set(right)
        if is_cause and is_missing and cost_s is not None and cost_s > LEAST_GROWN * (slow_s - healthy_s):
            right[subject], estimates_s[subject] = found, cost_s
    row: dict[str, Any] = {
        "name": disturbance.name,
        "truth": {"subjects": [list(subject) for subject in disturbance.subjects], "cause": disturbance.cause},
        "step_s": healthy_s,
        "ratio": slow_s / healthy_s,
        "cost_s": slow_s - healthy_s,
        "matters": slow_s - healthy_s > least * healthy_s,
        "named": _sentences(list(right.values())),
        "parts": _sentences(parts),
        "others": _sentences(others),
    }
    if right:
        row["estimate_s"] = sum(estimates_s.values())
    if len(right) == len(disturbance.subjects):
        delays = [found.seen_at - begin for found in right.values() if found not in earlier]
        row["delay"] = max(delays) if delays else "before it"
    return row


def _is_among(found: Named, subject: Sequence[int]) -> bool:
    """Return whether a verdict is about one of several ranks, without saying which, with a subject among them."""
    named = found.verdict["subject"]
    return named["type"] == "rank" and set(named["ranks"]) > set(subject)


def is_right(rows: Sequence[dict[str, Any]]) -> bool:
    """Return true if all that matters was named with subject and cause, and nothing was named wrongly."""
    return all("delay" in row or not row["matters"] for row in rows) and not any(row["others"] for row in rows)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as a table of Markdown."""
    lines = [
        "| disturbance | subjects, cause | healthy step, s | step over healthy step | longer by, s | estimate, s "
        "| named after, steps | named right | named in part | else named |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        truth = row.get("truth")
        cells = [row["name"], f"{truth['subjects']}, {truth['cause']}" if truth else ""]
        cells += [f"{row[key]:.3f}" if key in row else "" for key in ("step_s", "ratio", "cost_s", "estimate_s")]
        cells.append(str(row.get("delay", "**not**" if row["matters"] else "")))
        cells += ["; ".join(row.get(key, [])) for key in ("named", "parts", "others")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
