"""A campaign of seeded failures: restarts with new pods, in place, and with spares, by effective training time.

    python bench/restart_campaign.py
    python bench/restart_campaign.py --hours 48 --between-s 3600 --start-s 60

The operator's real plan decides about a gang in a model of a cluster: judgement, back-off, which pods are replaced. How
long pods, ranks and checkpoints take are parameters of the model, not measurements. Failures are errors of a rank, hung
ranks, evicted pods and lost nodes; all arms meet the same ones, at the same times. Prints a row for each arm: the
ratio of `status.timeSpent`, its other parts, the mean time from a failure until steps are made again, and the time for
which spares held nodes, as a fraction of that of the workers. New pods are those that a restart waits for; those that
replace used spares are created while the gang trains.
"""

import argparse
import dataclasses
import pathlib
import random
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "support"))

from worker_groups import worker_groups

from megatronapp_common.job.api.progress import TimeUse
from megatronapp_operator.plan import (
    CreateWorker,
    DeleteWorker,
    JobSpec,
    JobState,
    Observed,
    Progress,
    RestartWorker,
    RunPolicy,
    Worker,
    WorkerOutcome,
    WorkerPhase,
    plan,
)

POLL_S = 5.0
GRACE_S = 3.0
KINDS = {"rank": 0.70, "hang": 0.10, "evicted": 0.10, "node": 0.10}
"""Kinds of failures and their weights."""
UNREACHABLE_S = 50.0
"""Seconds until a cluster reports that a node does not answer."""


@dataclasses.dataclass(slots=True)
class Pod:
    """A worker's pod; `running_at` is when its launcher begins, `joins_at` when it joins the newest attempt."""

    index: int
    attempt: int
    node: str
    running_at: float
    joins_at: float
    end: WorkerOutcome | None = None
    ended_at: float = 0.0
    exited: bool = False
    lost_at: float | None = None
    spare: bool = False

    @property
    def name(self) -> str:
        return f"pod-on-{self.node}"


class Campaign:
    """One arm: a gang under the plan, from its submission on."""

    def __init__(self, options: argparse.Namespace, seed: int, *, in_place: bool, spares: int = 0) -> None:
        policy = RunPolicy(
            in_place=in_place,
            spares=spares,
            max_restarts=1000,
            progress_deadline_s=600.0,
            failed_grace_s=30.0,
            grace_s=600.0,
        )
        spec = JobSpec(name="job", uid="u", worker_groups=worker_groups(options.workers), hub=False, policy=policy)
        self.job = JobState(spec=spec)
        self.recoveries: list[float] = []
        self.replaced = 0
        self._options = options
        self._in_place = in_place
        self._failures = self._draw(random.Random(seed))
        self._pods: dict[tuple[int, bool], Pod] = {}
        """By index, and whether the pod waits as a spare."""
        self._trains_at: float | None = None
        self._hung = False
        self._failed_at: float | None = None
        self._iteration = 0.0
        self._saved = 0.0
        self._page: Progress | None = None
        self._nodes = 0

    def _draw(self, draw: random.Random) -> list[tuple[float, str, int]]:
        found, at = list[tuple[float, str, int]](), 0.0
        while at < self._options.hours * 3600:
            at += draw.expovariate(1 / self._options.between_s)
            kind = draw.choices(list(KINDS), weights=list(KINDS.values()))[0]
            found.append((at, kind, draw.randrange(self._options.workers)))
        return found

    def run(self) -> None:
        """Play the campaign to its end."""
        now = 0.0
        while now < self._options.hours * 3600:
            self._fail(now)
            self._train(now)
            made = plan(self.job, self._observe(now), now)
            self.job = dataclasses.replace(self.job, status=made.status)
            for action in made.actions:
                self._do(action, now)
            now += POLL_S

    def _fail(self, now: float) -> None:
        """Let the failures happen that are due; one that finds no gang at work has no effect."""
        while self._failures and self._failures[0][0] <= now:
            _, kind, index = self._failures.pop(0)
            if self._trains_at is None or self._hung or now < self._trains_at:
                continue
            self._failed_at, self._hung = now, True
            if kind == "hang":
                continue
            for pod in self._gang():
                own = pod.index == index
                pod.end = WorkerOutcome(
                    code=1 if own else 69, reason="RankFailed" if own else "PeerLost", rank=pod.index
                )
                pod.ended_at = now + (0.0 if own else GRACE_S)
                pod.exited = not self._in_place
            victim = self._pods[(index, False)]
            if kind == "evicted":
                victim.exited = True
            if kind == "node":
                victim.end, victim.exited, victim.lost_at = None, False, now + UNREACHABLE_S

    def _gang(self) -> list[Pod]:
        return [pod for pod in self._pods.values() if not pod.spare]

    def _train(self, now: float) -> None:
        """Make steps and checkpoints if the whole gang has joined and has loaded its checkpoint."""
        options, attempt = self._options, self.job.status.attempt
        gang = [pod for pod in self._gang() if pod.attempt == attempt and pod.end is None and pod.lost_at is None]
        if len(gang) < options.workers or self._hung:
            return
        if self._trains_at is None:
            self._trains_at = max(pod.joins_at for pod in gang) + options.gather_s + options.load_s + options.first_s
            self._iteration = self._saved
        if now < self._trains_at:
            return
        if self._failed_at is not None:
            self.recoveries.append(now - self._failed_at)
            self._failed_at = None
        self._iteration += POLL_S / options.step_s
        if self._iteration >= self._saved + options.save_every:
            self._saved = self._iteration
        self._page = Progress(attempt=attempt, iteration=int(self._iteration), state="training", updated_at=now)

    def _observe(self, now: float) -> Observed:
        pods = [self._view(pod, now) for _, pod in sorted(self._pods.items())]
        return Observed(
            secret=True,
            workers=tuple(pod for pod in pods if not pod.spare),
            spares=tuple(pod for pod in pods if pod.spare),
            progress=self._page,
            launcher_attempt=self.job.status.attempt,
        )

    def _view(self, pod: Pod, now: float) -> Worker:
        ended = pod.end is not None and now >= pod.ended_at
        phase = WorkerPhase.RUNNING if now >= pod.running_at else WorkerPhase.PENDING
        return Worker(
            index=pod.index,
            attempt=pod.attempt,
            phase=WorkerPhase.FAILED if ended else phase,
            started_at=pod.running_at if now >= pod.running_at else None,
            finished_at=pod.ended_at if ended else None,
            outcome=pod.end if ended else None,
            standby=ended and not pod.exited,
            node=pod.node,
            uid=pod.name,
            name=pod.name,
            spare=pod.spare,
            reusable=self._in_place,
            unreachable_since=pod.lost_at if pod.lost_at is not None and now >= pod.lost_at else None,
        )

    def _do(self, action: object, now: float) -> None:
        match action:
            case CreateWorker():
                self._nodes += 1
                begins = now + self._options.start_s
                key = action.index, action.spare
                self._pods[key] = Pod(
                    action.index, action.attempt, f"n{self._nodes}", begins, begins, spare=action.spare
                )
                if not action.spare:
                    self.replaced += action.attempt > 0
                    self._begin()
            case RestartWorker():
                pod = self._take(action)
                pod.attempt, pod.end, pod.joins_at = action.attempt, None, now + self._options.order_s + GRACE_S
                self._begin()
            case DeleteWorker():
                self._pods.pop((action.index, action.spare), None)

    def _take(self, action: RestartWorker) -> Pod:
        """Return the pod that is to run a worker, in the place of that worker."""
        if action.spare is None:
            return self._pods[(action.index, False)]
        key, pod = next((key, pod) for key, pod in self._pods.items() if pod.spare and pod.name == action.spare)
        del self._pods[key]
        pod.index, pod.spare = action.index, False
        self._pods[(action.index, False)] = pod
        return pod

    def _begin(self) -> None:
        """An attempt begins: nothing has joined it."""
        self._trains_at, self._hung = None, False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=12.0, help="length of a campaign")
    parser.add_argument("--seeds", type=int, default=2, help="campaigns of each arm")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--spares", type=int, default=1, help="spares of the third arm")
    parser.add_argument("--between-s", type=float, default=7200.0, help="mean seconds between failures")
    parser.add_argument("--start-s", type=float, default=30.0, help="from the creation of a pod to its launcher")
    parser.add_argument("--order-s", type=float, default=2.0, help="from a restart order to its launcher")
    parser.add_argument("--gather-s", type=float, default=5.0, help="gathering and preflight")
    parser.add_argument("--load-s", type=float, default=60.0, help="loading the checkpoint")
    parser.add_argument("--first-s", type=float, default=20.0, help="the first step, above the others")
    parser.add_argument("--step-s", type=float, default=5.0, help="length of a step")
    parser.add_argument("--save-every", type=int, default=60, help="steps between checkpoints")
    options = parser.parse_args()
    uses = [
        use for use in TimeUse if use not in {TimeUse.TRAINED, TimeUse.SLOW, TimeUse.CHECKPOINTS, TimeUse.SUSPENDED}
    ]
    print(f"| arm | ratio | {' | '.join(use.value for use in uses)} | recovery s | new pods a restart | spares |")
    print(f"|---|---|{'---|' * len(uses)}---|---|---|")
    for name, in_place, spares in (("Pods", False, 0), ("InPlace", True, 0), ("spares", True, options.spares)):
        runs = [Campaign(options, seed, in_place=in_place, spares=spares) for seed in range(options.seeds)]
        for run in runs:
            run.run()
        spent = [run.job.status.time_spent for run in runs if run.job.status.time_spent is not None]
        total = sum(sum(account.seconds().values()) for account in spent)
        parts_of_time = {use: sum(account.seconds()[use] for account in spent) / total for use in TimeUse}
        recovery = statistics.mean(second for run in runs for second in run.recoveries)
        pods = sum(run.replaced for run in runs) / sum(run.job.status.restarts for run in runs)
        parts = " | ".join(f"{parts_of_time[use]:.2%}" for use in uses)
        waited = sum(account.spare_seconds for account in spent) / (total * options.workers)
        print(
            f"| {name} | {parts_of_time[TimeUse.TRAINED]:.2%} | {parts} | {recovery:.0f} | {pods:.1f} | {waited:.1%} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
