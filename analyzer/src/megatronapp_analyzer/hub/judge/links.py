"""The hub's end of a detector: in a separate process, or in a thread of the hub for tests and recorded sessions."""

import dataclasses
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Protocol

from megatronapp_analyzer.errors import JudgeLostError
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.hub.judge import channel
from megatronapp_analyzer.hub.judge.judging import DetectorFactory, Judgement, LivenessReport, StepJudging
from megatronapp_analyzer.hub.judge.liveness_rows import Row, ranks_of, rows_of
from megatronapp_analyzer.model import Communicator, JobLayout
from megatronapp_common import child

LOG = logging.getLogger(__name__)
READY = "ready"
PATIENCE_S = 300.0
"""Seconds without an answer after which the process is taken for lost; a step of 16,384 ranks takes a few."""
REAP_S = 10.0


class JudgeLink(Protocol):
    """A detector that can be lost. All but `stop` are called one at a time; those that block, in a thread.

    Each raises JudgeLostError once the detector is lost; `close` and then `start` begin with a fresh one.
    """

    def start(self) -> None:
        """Start the detector without waiting for it."""

    def wait_until_ready(self) -> None:
        """Block until it can judge."""

    def judge(self, layout: JobLayout, step: StoredStep) -> Judgement:
        """Block until a step is judged."""
        ...

    def judge_liveness(self, report: LivenessReport) -> Judgement:
        """Block until liveness is judged."""
        ...

    def stop(self) -> None:
        """End the detector at once, also while another thread waits for it; does not block."""

    def close(self) -> None:
        """Give back what a stopped or lost detector has left."""


class LocalJudge:
    """Detector in the hub's own process, which is never lost."""

    def __init__(self, factory: DetectorFactory) -> None:
        self._judging = StepJudging(factory)

    def start(self) -> None:
        pass

    def wait_until_ready(self) -> None:
        pass

    def judge(self, layout: JobLayout, step: StoredStep) -> Judgement:
        return self._judging.judge(layout, step)

    def judge_liveness(self, report: LivenessReport) -> Judgement:
        return self._judging.judge_liveness(report)

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobTables:
    """Tables that all steps of an attempt have in common; sent when they change, because each step has them."""

    comms: Mapping[int, Mapping[int, Communicator]]
    boot_ids: Mapping[int, str]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JudgeStep:
    """Request to judge a step, whose view is without its tables."""

    layout: JobLayout | None
    """Layout of this request and those after it; None: unchanged."""
    tables: JobTables | None
    """Tables of this step and those after it; None: unchanged."""
    step: StoredStep


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JudgeLiveness:
    """Request to judge a LivenessReport."""

    layout: JobLayout | None
    """As in JudgeStep."""
    now_ns: int
    rows: list[Row]


def judge_command(descriptor: int, threads: int | None = None) -> list[str]:
    """Return the command of the detector's process, which dies with this one.

    `descriptor`: its end of the pair. `threads`: those that judge a large step; None lets the process decide.
    """
    program = [sys.executable, "-m", "megatronapp_analyzer.hub.judge", "--descriptor", str(descriptor)]
    program += [] if threads is None else ["--threads", str(threads)]
    return [sys.executable, "-I", "-S", child.__file__, str(os.getpid()), *program]


class ProcessJudge:
    """Detector in a separate process."""

    def __init__(self, *, patience_s: float = PATIENCE_S, threads: int | None = None) -> None:
        """Create the link. `threads`: those that judge a large step; None: what the process finds (`process.py`)."""
        self._patience_s = patience_s
        self._threads = threads
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._layout: JobLayout | None = None
        self._tables: JobTables | None = None

    @property
    def pid(self) -> int | None:
        """Return the id of the process; None while it is not started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        self._layout = self._tables = None
        try:
            own, other = socket.socketpair()
        except OSError as error:
            raise JudgeLostError(f"no socket for the detector's process: {error}") from error
        own.settimeout(self._patience_s)
        with other:
            try:
                self._process = subprocess.Popen(
                    self.command(other.fileno()), stdin=subprocess.DEVNULL, pass_fds=[other.fileno()]
                )
            except OSError as error:
                own.close()
                raise JudgeLostError(f"the detector's process cannot be started: {error}") from error
        self._socket = own

    def command(self, descriptor: int) -> list[str]:
        """Return the command of the process."""
        return judge_command(descriptor, self._threads)

    def wait_until_ready(self) -> None:
        answer = self._receive()
        if answer != READY:
            raise JudgeLostError(f"the detector's process began with {answer!r} instead of {READY!r}")

    def judge(self, layout: JobLayout, step: StoredStep) -> Judgement:
        view = step.view
        tables = JobTables(comms=view.comms, boot_ids=view.boot_ids)
        changed = tables != self._tables
        bare = dataclasses.replace(step, view=dataclasses.replace(view, comms={}, boot_ids={}))
        judgement = self._request(
            JudgeStep(layout=self._if_changed(layout), tables=tables if changed else None, step=bare)
        )
        self._layout, self._tables = layout, tables
        return judgement

    def judge_liveness(self, report: LivenessReport) -> Judgement:
        request = JudgeLiveness(
            layout=self._if_changed(report.layout), now_ns=report.now_ns, rows=rows_of(report.ranks)
        )
        judgement = self._request(request)
        self._layout = report.layout
        return judgement

    def _if_changed(self, layout: JobLayout) -> JobLayout | None:
        """Return a layout if the process does not have it."""
        return None if layout is self._layout or layout == self._layout else layout

    def stop(self) -> None:
        process, sock = self._process, self._socket
        if process is not None:
            process.kill()
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError as error:  # the other end was faster
                LOG.debug("socket of the detector's process: %s", error)

    def close(self) -> None:
        self.stop()
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            try:
                self._process.wait(REAP_S)
            except subprocess.TimeoutExpired:
                LOG.error("the detector's process %d was killed and has not ended yet", self._process.pid)
        self._socket = self._process = None

    def _request(self, request: object) -> Judgement:
        assert self._socket is not None, "call start() first"
        try:
            channel.send_message(self._socket, request)
        except OSError as error:
            raise JudgeLostError(self._end(error)) from error
        answer = self._receive()
        if not isinstance(answer, Judgement):
            raise JudgeLostError(f"the detector's process answered with {type(answer).__name__}")
        return answer

    def _receive(self) -> object:
        assert self._socket is not None, "call start() first"
        try:
            return channel.receive_message(self._socket)
        except (EOFError, OSError) as error:
            raise JudgeLostError(self._end(error)) from error

    def _end(self, error: Exception) -> str:
        """Return how the process was lost."""
        if isinstance(error, TimeoutError):
            return f"the detector's process has not answered for {self._patience_s:g} s"
        assert self._process is not None
        try:
            code = self._process.wait(REAP_S)
        except subprocess.TimeoutExpired:
            return f"the detector's process has closed its socket: {error!r}"
        return f"the detector's process ended {_how(code)}"


def _how(code: int) -> str:
    if code >= 0:
        return f"with code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"


def serve(sock: socket.socket, judging: StepJudging) -> None:
    """Judge what the hub sends, in the detector's process, until the hub's end is closed."""
    layout: JobLayout | None = None
    tables: JobTables | None = None
    channel.send_message(sock, READY)
    while True:
        try:
            request = channel.receive_message(sock)
        except (EOFError, ConnectionResetError):
            return
        assert isinstance(request, JudgeStep | JudgeLiveness)
        layout = request.layout or layout
        assert layout is not None, "the first request brings the layout"
        if isinstance(request, JudgeStep):
            tables = request.tables or tables
            assert tables is not None, "the first step brings its tables"
            view = dataclasses.replace(request.step.view, comms=tables.comms, boot_ids=tables.boot_ids)
            answer = judging.judge(layout, dataclasses.replace(request.step, view=view))
        else:
            report = LivenessReport(layout=layout, now_ns=request.now_ns, ranks=ranks_of(request.rows))
            answer = judging.judge_liveness(report)
        try:
            channel.send_message(sock, answer)
        except (BrokenPipeError, ConnectionResetError):
            return
