"""Output of `megatronapp run` while the job runs in the foreground."""

import contextlib
import pathlib

from megatronapp_common.job import MegatronJob
from megatronapp_common.job.api.progress import Progress
from megatronapp_common.names import UNSAVED_STOP
from megatronapp_common.topology import RankRole
from megatronapp_operator.backends.process.state.paths import JobPaths
from megatronapp_operator.cli.addresses import api_access, page_address
from megatronapp_operator.cli.text.stop_messages import INTERRUPTED, stopped_line, stopping_line, was_interrupted
from megatronapp_operator.errors import HubError, OperatorError
from megatronapp_operator.plan import TERMINAL_PHASES, Action, EventType, Phase, RecordEvent, Status
from megatronapp_operator.plan.policies.report import NAMED_STATES

REPORTED_BY_VERDICTS = frozenset({"SlowNodeDetected", "RankHung"})
"""Events with the same text as verdicts, which --follow prints one by one."""


class JobFollower:
    """Listener of the backend. If the terminal disconnects, it prints nothing any more and the job is not harmed."""

    def __init__(self, job: MegatronJob, paths: JobPaths, *, verbose: bool, retain_hub: bool) -> None:
        self._job = job
        self._paths = paths
        self._verbose = verbose
        self._retain_hub = retain_hub
        self._phase: Phase | None = None
        self._told: set[str] = set()
        self._progress: Progress | None = None
        self._log: LogTail | None = None
        self._attempt = -1
        self._stopping = False
        self._silent = False
        self._pages_told = False

    def __call__(self, status: Status, actions: tuple[Action, ...]) -> None:
        self._print_page_address()
        for action in actions:
            if isinstance(action, RecordEvent) and not (self._verbose and action.reason in REPORTED_BY_VERDICTS):
                self._print_event(action, status)
        if self._verbose:
            self._print_progress(status)
            self._print_log(status)
            self._print_verdicts(status)
        if status.phase is not self._phase:
            self._phase = status.phase
            why = f" ({INTERRUPTED})" if was_interrupted(status) else ""
            self._print(f"{self._job.metadata.name}: {status.phase}{why}")
            if status.phase is Phase.RUNNING and self._job.spec.mode == "serve":
                self._print_api_address()
            if status.phase in TERMINAL_PHASES:
                self._print_retention()

    def finish(self, status: Status) -> None:
        """Print the rest of the log, and the result of a stop."""
        if self._verbose:
            self._print_log(status)
            self._print_remaining()
        if was_interrupted(status):
            self._print(stopped_line(self._job, status))

    def _print_event(self, event: RecordEvent, status: Status) -> None:
        if event.reason == INTERRUPTED:
            self._stopping = True
            self._print(stopping_line(self._job))
        elif event.reason in {"Failed", "Suspended"} and was_interrupted(status):
            pass  # printed by `finish`
        elif not self._is_expected(event.message):
            mark = "" if event.type is EventType.NORMAL else "warning: "
            self._print(f"{mark}{event.message}")

    def _is_expected(self, words: str) -> bool:
        """Return True for a message of a rank that stopped without saving, as requested; `finish` prints that once."""
        return self._stopping and UNSAVED_STOP in words

    def _print(self, line: str) -> None:
        if self._silent:
            return
        try:
            print(line, flush=True)
        except OSError:
            self._silent = True

    def _print_page_address(self) -> None:
        """Print the address of the pages as soon as the hub answers."""
        if not self._pages_told and self._job.spec.analyzer.enabled:
            with contextlib.suppress(HubError):
                address = page_address(self._paths, mode=self._job.spec.mode)
                self._pages_told = True
                name = self._job.metadata.name
                self._print(f"pages: {address} (opens once, within a minute; then `megatronapp ui {name}`)")

    def _print_api_address(self) -> None:
        with contextlib.suppress(OperatorError):
            url, key = api_access(self._paths)
            self._print(f"api: {url}/v1 (key: {key})")

    def _print_retention(self) -> None:
        if self._retain_hub and self._paths.hub.exists() and self._job.spec.analyzer.retain_seconds:
            self._print(f"the pages stay open for {self._job.spec.analyzer.retain_seconds} s; Ctrl-C closes them")

    def _print_progress(self, status: Status) -> None:
        new, old = status.progress, self._progress
        if new is None or (old is not None and (new.attempt, new.iteration) == (old.attempt, old.iteration)):
            return
        training = self._job.spec.training
        every = (training.log_interval if training is not None else None) or 1
        if old is None or new.iteration // every != old.iteration // every or new.attempt != old.attempt:
            self._progress = new
            self._print(progress_line(new))

    def _print_log(self, status: Status) -> None:
        if status.attempt != self._attempt:
            self._print_remaining()
            self._attempt = status.attempt
            self._log = LogTail(reporting_log(self._job, self._paths, status.attempt))
        assert self._log is not None
        self._say_lines(self._log.lines())

    def _print_remaining(self) -> None:
        """Print the rest of the log; a rank that was killed may have left half a line."""
        if self._log is not None:
            self._say_lines(self._log.lines(final=True))

    def _say_lines(self, lines: list[str]) -> None:
        for line in lines:
            if not self._is_expected(line):
                self._print(line)

    def _print_verdicts(self, status: Status) -> None:
        for verdict in status.slow_ranks:
            key = f"{verdict.id} {verdict.state}"
            if key not in self._told and verdict.state in NAMED_STATES | {"cleared"}:
                self._told.add(key)
                self._print(f">> {verdict.sentence}")


class LogTail:
    """Reader of new whole lines of a file that may not exist yet."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._offset = 0

    def lines(self, *, final: bool = False) -> list[str]:
        """Return the lines since the last call; with `final` also a last line without a line end."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data if final else data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode(errors="replace").splitlines()


def progress_line(page: Progress) -> str:
    """Format the progress of a job as one line."""
    if page.state == "serving":
        return f"{page.iteration} prompts answered  {page.tokens_per_second or 0:,.0f} tokens/s"
    total = "" if page.total_iterations is None else f"/{page.total_iterations}"
    words = [f"step {page.iteration}{total}"]
    if page.loss is not None:
        words.append(f"loss {page.loss:.4f}")
    if page.tokens_per_second is not None:
        words.append(f"{page.tokens_per_second:,.0f} tokens/s")
    if page.seconds_left is not None:
        words.append(f"{page.seconds_left:.0f} s left")
    return "  ".join(words)


def reporting_rank(job: MegatronJob) -> int:
    """Return the rank that reports the loss.

    It is the first of the last stage (docs/contracts.md, section 5), or 0 for a job that serves. With MegaFBD it is a
    backward rank, by its number among the ranks of both roles.
    """
    if job.spec.mode == "serve":
        return 0
    world = job.world
    rank = world.topology.rank(pp=world.topology.pipeline - 1)
    return rank if world.fbd is None else world.fbd.rank_of(RankRole.BACKWARD, rank)


def reporting_log(job: MegatronJob, paths: JobPaths, attempt: int) -> pathlib.Path:
    """Return the path of the log of the reporting rank."""
    return rank_log(job, paths, attempt, reporting_rank(job))


def rank_log(job: MegatronJob, paths: JobPaths, attempt: int, rank: int) -> pathlib.Path:
    """Return the path of the log of one rank. Raises TopologyError for a rank outside the world."""
    worker = job.world.placement.worker_of(rank)
    return paths.run_dir(attempt, worker) / f"rank-{rank}.log"
