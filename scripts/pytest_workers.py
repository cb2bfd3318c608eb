"""Pytest plugin: distribute test files to processes longest first, and clean up when a run is interrupted.

`pytest -n 2` runs whole files in two processes (pytest-xdist). The order is that of the seconds in
tests/durations.json, which `--record-durations` (`make durations`) writes. Files not listed there are short.

A signal that is ignored when a run starts (by `nohup`, or a shell that starts it in the background) does not end the
run, but has its default meaning in the processes with `-n` and in all that tests start.

Tests marked `full` run only where MEGATRONAPP_FULL is set, as `make test-full` does:

    @pytest.mark.full("a sweep", but=("TP2", "PP2"))  # `make test` runs these cases (in `pytestmark`: functions)
"""

import contextlib
import gc
import json
import os
import pathlib
import resource
import shutil
import signal
import tempfile
from collections import defaultdict
from collections.abc import Generator
from types import FrameType
from typing import Any, NoReturn, Protocol

import psutil
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
DURATIONS = ROOT / "tests" / "durations.json"
LISTED_S = 2
"""Seconds from which a file is listed; the order of shorter ones does not matter."""
CLUSTER = "tests/integration/kube/"
"""Files that are run last: each process that runs one keeps an API server until the end, which takes processor time."""
FULL = bool(os.environ.get("MEGATRONAPP_FULL"))
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CLEANING_S = 60.0
"""How long an interrupted process may take to end its fixtures; an API server takes a few seconds."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help=f"write the seconds of each file to {DURATIONS}")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "full(reason, but=()): too long for each commit; all but these run only where MEGATRONAPP_FULL is set",
    )
    for number in (*SIGNALS, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, pass_over)
    if hasattr(config, "workerinput"):
        os.setpgid(0, 0)  # the controller passes Ctrl-C on; a second one would disturb fixtures that end
        config.pluginmanager.register(Worker(config.workeroutput))  # type: ignore[attr-defined]
    elif config.getoption("numprocesses", None):
        config.pluginmanager.register(Controller(config))


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and config.option.dist == "no":
        config.option.dist = "loadfile"
        config.option.loadscopereorder = False  # keep our order


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    """Keep what is imported and collected out of garbage collection: it lives until the end."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    some_cases = any("::" in path for path in config.args) or config.getoption("lf", False)
    if not some_cases:
        check_marks(items)  # before -k and -m deselect some
    yield
    if not FULL:
        long = [item for item in items if is_long(item)]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not is_long(item)]
    if hasattr(config, "workerinput"):
        durations = read_durations()
        items.sort(key=lambda item: sort_key(file_of(item.nodeid), durations))


def names_of(item: pytest.Item) -> set[str]:
    """Return the names of the function and of the case."""
    function, _, case = item.name.partition("[")
    return {function, case.removesuffix("]")}


def is_long(item: pytest.Item) -> bool:
    """Return true for a test that is marked `full`, unless the mark names its function or its case in `but`."""
    marker = item.get_closest_marker("full")
    return marker is not None and names_of(item).isdisjoint(marker.kwargs.get("but", ()))


def check_marks(items: list[pytest.Item]) -> None:
    """Refuse names in `but` that no test has: renamed, the test would run in `make test-full` only."""
    unknown: dict[str, set[str]] = {}
    known: dict[str, set[str]] = {}
    for item in items:
        if marker := item.get_closest_marker("full"):
            unknown.setdefault(file_of(item.nodeid), set()).update(marker.kwargs.get("but", ()))
            known.setdefault(file_of(item.nodeid), set()).update(names_of(item))
    for path, names in unknown.items():
        for name in sorted(names - known[path]):
            raise ValueError(f"{path}: {name!r} in but=... of the mark 'full' is no function and no case")


def read_durations() -> dict[str, float]:
    durations: dict[str, float] = json.loads(DURATIONS.read_text(encoding="utf-8"))
    return durations


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def sort_key(path: str, durations: dict[str, float]) -> tuple[bool, float, str]:
    return path.startswith(CLUSTER), -durations.get(path, 0.0), path


def processor_s() -> float:
    """Return the processor seconds of this process and of the children that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Node(Protocol):
    """A process of pytest-xdist."""

    channel: Any
    workerinput: dict[str, Any]


class Schedule(Protocol):
    """Files that wait for a process, with their tests and whether each has run."""

    workqueue: dict[str, dict[str, bool]]


class Worker:
    """Hooks of a process that runs tests. `output` is sent to the controller when the process ends."""

    def __init__(self, output: dict[str, Any]) -> None:
        self.output = output
        self.processor_s = processor_s()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.output["running"] = nodeid

    def pytest_runtest_logfinish(self) -> None:
        del self.output["running"]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        before, self.processor_s = self.processor_s, processor_s()
        report.__dict__["processor_s"] = self.processor_s - before  # reaches the controller as all attributes do
        return report

    def pytest_keyboard_interrupt(self) -> None:
        """Let fixtures end undisturbed: execnet interrupts its process again after five seconds."""
        signal.signal(signal.SIGINT, pass_over)


class Controller:
    """Hooks of the process that distributes tests."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.shared_folder = tempfile.mkdtemp(prefix="tests-")
        self.nodes: list[Node] = []
        self.ran = 0
        self.wall: defaultdict[str, float] = defaultdict(float)
        self.processor: defaultdict[str, float] = defaultdict(float)
        for number in SIGNALS:
            if signal.getsignal(number) is not pass_over:
                signal.signal(number, interrupt)

    def pytest_configure_node(self, node: Node) -> None:
        """Name what processes share: a folder that is removed at the end, and this process, with which servers end."""
        node.workerinput.update(shared_folder=self.shared_folder, controller_pid=os.getpid())

    def pytest_unconfigure(self) -> None:
        shutil.rmtree(self.shared_folder, ignore_errors=True)

    def pytest_testnodeready(self, node: Node) -> None:
        self.nodes.append(node)

    def pytest_runtest_logfinish(self) -> None:
        self.ran += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.wall[file_of(report.nodeid)] += report.duration
        self.processor[file_of(report.nodeid)] += getattr(report, "processor_s", 0.0)

    def pytest_handlecrashitem(self, crashitem: str, sched: Schedule) -> None:
        """Run what follows the test that ended its process; pytest-xdist would repeat that test until it gives up."""
        for path, unit in list(sched.workqueue.items()):
            if crashitem in unit:
                unit[crashitem] = True
            if all(unit.values()):  # pytest-xdist puts files back that have ended; the next process would wait in one
                del sched.workqueue[path]

    def pytest_keyboard_interrupt(self) -> None:
        """Interrupt the processes, and wait until their fixtures have ended."""
        for process in psutil.Process().children():
            process.send_signal(signal.SIGINT)
        for node in self.nodes:
            with contextlib.suppress(node.channel.RemoteError, node.channel.TimeoutError, EOFError):
                node.channel.waitclose(CLEANING_S)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK and self.ran != session.testscollected:
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
        if self.config.getoption("record_durations") and exitstatus != pytest.ExitCode.INTERRUPTED:
            seconds = read_durations() | self.wall  # a run of a part changes that part only
            listed = {
                path: round(wall)
                for path, wall in sorted(seconds.items())
                if wall >= LISTED_S and (ROOT / path).exists()
            }
            DURATIONS.write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.config.getoption("record_durations"):
            terminalreporter.section("seconds, processor seconds")
            for path, wall in sorted(self.wall.items(), key=lambda item: -item[1]):
                terminalreporter.line(f"{wall:7.1f} {self.processor[path]:7.1f}  {path}")
        for node in self.nodes:
            if running := getattr(node, "workeroutput", {}).get("running"):
                terminalreporter.line(f"interrupted: {running}")


def examples(count: int) -> int:
    """Return how many generated inputs of a costly property to try: half of them, unless `make test-full` runs."""
    return count if FULL else (count + 1) // 2


def pass_over(number: int, frame: FrameType | None) -> None:
    """Do nothing. Programs that are started do not inherit a handler, as they would inherit SIG_IGN."""


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """End the run once; the signals that follow change nothing, so that fixtures may end."""
    del frame
    for following in SIGNALS:
        signal.signal(following, pass_over)
    raise KeyboardInterrupt(signal.Signals(number).name)
