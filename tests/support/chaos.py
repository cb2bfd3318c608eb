"""Kill or stop one process of a real job, and check that all which must be true afterwards is true.

Used by `bench/bench_kill.py` with many random cases and by the tests with a few seeded ones.
"""

import dataclasses
import random
import signal
import time
from typing import Any

from chaos_job import RANKS, WORKERS, ChaosJob, Cli, Process, Unmet, require, until

KILL, STOP, CONT = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
KINDS = tuple(
    (role, number) for role in ("rank", "launcher", "agent", "hub", "backend", "guardian") for number in (KILL, STOP)
)
STARTUP_FRACTION = 0.25
"""Part of the kills that hit a job before its first step."""
AFTER_MAX_S = 4.0
"""A process of a training job is hit at a random moment within this time."""
STEPS = 3
"""Iterations after which a gang is regarded as running."""

START_LIMIT_S = 300.0
NAMED_LIMIT_S = 240.0
SHOWN_LIMIT_S = 240.0
CLEANUP_LIMIT_S = 240.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChaosCase:
    """One action on one kind of process."""

    role: str
    number: signal.Signals
    in_startup: bool = False
    after_s: float = 0.0
    leave: bool = False
    """A stopped process is not continued: the job is deleted in its present state."""
    pick: float = 0.0
    """Which process of that role, as a share of their number."""

    @property
    def killed(self) -> bool:
        """True if the process is killed by kill -9; if not, it is stopped."""
        return self.number is KILL

    @property
    def kind(self) -> str:
        """Name of the case in tables."""
        return f"{'kill -9' if self.killed else 'SIGSTOP'} {self.role}"


def draw_cases(count: int, seed: int) -> list[ChaosCase]:
    """Return random cases; the counts of two kinds differ by one at most."""
    draw = random.Random(seed)
    cases: list[ChaosCase] = []
    while len(cases) < count:
        for role, number in draw.sample(KINDS, len(KINDS)):
            startup = number is KILL and draw.random() < STARTUP_FRACTION
            after_s, leave, pick = draw.uniform(0, AFTER_MAX_S), draw.random() < 0.5, draw.random()
            case = ChaosCase(role=role, number=number, in_startup=startup, after_s=after_s, leave=leave, pick=pick)
            cases.append(case)
    return cases[:count]


class Chaos:
    """Runner of cases, one after another; a job that is healthy after a case serves the next one, too."""

    def __init__(self, cli: Cli, *, cases_per_job: int) -> None:
        self._cli = cli
        self._cases_per_job = cases_per_job
        self._jobs = 0
        self._served = 0
        self._reference: dict[int, str] = {}
        self._stopped: set[int] = set()
        self.job: ChaosJob | None = None
        self._struck = 0.0
        self.times_s: dict[str, float] = {}
        """How long things took in the newest case, from the blow (for `deleted`, from the command) on."""

    def run(self, case: ChaosCase) -> None:
        """Run one case with all its checks. Raises Unmet; the job is removed at the end."""
        self.times_s = {}
        try:
            job = self._job_for(case)
            victim = self._strike(job, case)
            self._check(job, case, victim)
            self._served += 1
            if (case.leave and not case.killed) or self._served >= self._cases_per_job:
                self.end()
        except Unmet:
            if self.job is not None:
                self.job.wipe()
            self.job = None
            raise

    def end(self) -> None:
        """Delete the job, if there is one, and see that nothing of it is left."""
        job, self.job = self.job, None
        if job is None:
            return
        self._compare_losses(job)
        began = time.monotonic()
        job.cli.output("delete", job.name)
        self._nothing_is_left(job)
        self.times_s["deleted"] = time.monotonic() - began
        require(not job.root.exists(), f"{job.root} is left")

    def _job_for(self, case: ChaosCase) -> ChaosJob:
        if case.in_startup:
            self.end()
        if self.job is None:
            self.job, self._served, self._stopped = ChaosJob(self._cli, f"chaos-{self._jobs}"), 0, set()
            self._jobs += 1
        if not case.in_startup:
            job = self.job
            until(lambda: job.iteration() >= STEPS, "the job trains", START_LIMIT_S)
        return self.job

    def _strike(self, job: ChaosJob, case: ChaosCase) -> Process:
        """Hit a process of that kind at the case's moment."""
        until(lambda: _targets(job, case.role), f"there is a {case.role}", START_LIMIT_S)
        time.sleep(case.after_s)
        while True:
            found = _targets(job, case.role)
            require(found, f"there is still a {case.role}")
            victim = found[int(case.pick * len(found))]
            try:
                victim.send(case.number)
            except ProcessLookupError:  # the list was old
                continue
            self._struck = time.monotonic()
            return victim

    def _check(self, job: ChaosJob, case: ChaosCase, victim: Process) -> None:
        if not case.killed:
            self._check_stopped(job, case, victim)
        elif case.role == "backend":
            self._check_end(job)
            return
        elif case.role in {"rank", "launcher"}:
            self._check_restart(job, victim)
        else:
            self._check_replaced(job, victim)
        self._compare_losses(job)

    def _check_restart(self, job: ChaosJob, victim: Process) -> None:
        """The gang starts again as the next attempt, and the record names who was killed."""
        job.restarts += 1
        wait_for_progress(job)
        self._note("trains again")
        status = shown_is_true(job)
        failure = status["failures"][-1]
        shown = (failure["attempt"], failure["worker"], failure.get("rank"), failure.get("signal"))
        truth = (job.restarts - 1, victim.worker, victim.rank, int(KILL))
        require(shown == truth, f"the failure is said to be {shown}, and was {truth}: {failure}")
        self._no_false_hang(job)

    def _check_replaced(self, job: ChaosJob, victim: Process) -> None:
        """Training does not notice, and another process takes the place."""
        usual = {"agent": WORKERS, "hub": 1, "guardian": 1}[victim.role]

        def replaced() -> bool:
            pids = {target.pid for target in _targets(job, victim.role)}
            return len(pids) == usual and victim.pid not in pids

        until(replaced, f"a new {victim.role}", START_LIMIT_S)
        self._note("replaced")
        wait_for_progress(job)
        shown_is_true(job)
        self._no_false_hang(job)

    def _check_stopped(self, job: ChaosJob, case: ChaosCase, victim: Process) -> None:
        if victim.rank is not None:
            self._check_hung(job, victim.rank)
        else:
            wait_for_progress(job)
            shown_is_true(job, stale=victim.role == "backend")
        if case.leave:
            return
        victim.send(CONT)
        wait_for_progress(job)
        shown_is_true(job)
        self._no_false_hang(job)

    def _check_hung(self, job: ChaosJob, rank: int) -> None:
        """The hub names this rank and no other, and so does the CLI."""
        self._stopped.add(rank)

        def named() -> bool:
            found = job.hung() or []
            require(set(found) <= {rank}, f"rank {rank} is stopped, and {found} are named as hung")
            return found == [rank]

        until(named, f"rank {rank} is named as hung", NAMED_LIMIT_S)
        self._note("named")
        shown_is_true(job, hung=[rank])
        self._no_false_hang(job)

    def _check_end(self, job: ChaosJob) -> None:
        """Check that without its backend everything ends, and the CLI reports it."""
        self.job = None
        self._nothing_is_left(job)
        self._note("all gone")
        status = job.shown()
        reasons = [condition["reason"] for condition in status["conditions"] if condition["type"] == "Failed"]
        shown = (status["phase"], reasons, status["replicaStatuses"]["running"], "hubUrl" in status)
        require(shown == ("Failed", ["BackendLost"], 0, False), f"after the backend's death is shown {shown}")
        self._compare_losses(job)
        job.cli.output("delete", job.name)
        require(not job.root.exists(), f"{job.root} is left")

    def _note(self, what: str) -> None:
        self.times_s[what] = time.monotonic() - self._struck

    def _nothing_is_left(self, job: ChaosJob) -> None:
        def left() -> list[Any]:
            return [*job.processes(), *job.shared_memory()]

        try:
            until(lambda: not left(), "nothing of the job is left", CLEANUP_LIMIT_S)
        except Unmet as error:
            raise Unmet(f"{error}; left: {left()}") from error

    def _no_false_hang(self, job: ChaosJob) -> None:
        """No verdict of the hub, over or not, calls a rank hung that was never stopped."""
        answers: list[Any] = []

        def answered() -> bool:
            answers.append(job.query_hub("/api/v1/verdicts"))
            return answers[-1] is not None

        until(answered, "the hub answers", START_LIMIT_S)
        named = {rank for verdict in answers[-1] if verdict["cause"] == "hang" for rank in verdict["subject"]["ranks"]}
        require(named <= self._stopped, f"named as hung: {sorted(named)}; stopped: {sorted(self._stopped)}")

    def _compare_losses(self, job: ChaosJob) -> None:
        """Every iteration has the same loss in all attempts of all jobs."""
        for attempt, losses in job.losses().items():
            for iteration, loss in losses.items():
                known = self._reference.setdefault(iteration, loss)
                place = f"attempt {attempt}, iteration {iteration}"
                require(known == loss, f"{place}: loss {loss}, undisturbed {known}")


def _targets(job: ChaosJob, role: str) -> list[Process]:
    """Living processes of that role, of the attempt that must run now."""
    return [process for process in job.of(role) if process.attempt in {None, job.restarts}]


def wait_for_progress(job: ChaosJob) -> None:
    """The iteration of the attempt that must run rises, and there is no further attempt."""
    before = job.iteration()
    until(lambda: job.iteration() >= before + STEPS, f"iterations after {before}", START_LIMIT_S)
    attempts = {process.attempt for process in job.of("launcher")}
    require(attempts == {job.restarts}, f"launchers of attempts {attempts}; must be {job.restarts}")


def shown_is_true(job: ChaosJob, *, hung: list[int] | None = None, stale: bool = False) -> dict[str, Any]:
    """Wait until `get -o json` shows the truth, and check that it is never ahead of it. `stale`: no process can update
    it."""
    floor = 0 if stale else job.iteration()
    end = time.monotonic() + SHOWN_LIMIT_S
    while True:
        status = job.shown()
        found = _untrue(job, status, hung or [], floor)
        if not found:
            return status
        require(time.monotonic() < end, f"get shows what is not so: {'; '.join(found)}")


def _untrue(job: ChaosJob, status: dict[str, Any], hung: list[int], floor: int) -> list[str]:
    progress = status.get("progress") or {"attempt": -1, "iteration": -1}
    ahead = job.iteration(progress["attempt"]) + 1  # the page is written before the log line
    require(progress["iteration"] <= ahead, f"shown iteration {progress['iteration']}, but the newest is {ahead}")
    shown = {
        "phase": (status["phase"], "Running"),
        "attempt": (status["attempt"], job.restarts),
        "restarts": (status["restarts"], job.restarts),
        "running": (status["replicaStatuses"]["running"], WORKERS),
        "worldSize": (status["worldSize"], RANKS),
        "progress.attempt": (progress["attempt"], job.restarts),
        "hungRanks": (status["hungRanks"], hung),
    }
    found = [
        f"{name} is {displayed}, must be {truth}" for name, (displayed, truth) in shown.items() if displayed != truth
    ]
    if progress["iteration"] < floor:
        found.append(f"iteration {progress['iteration']} is old; it was {floor} before")
    return found
