"""All tests of Python, in parallel lanes: most tests wait, or compute on one core only.

Each lane is a pytest over all of tests/ with this module as its plugin. It runs a file that no lane has taken, and
takes the next one; the longest are first, so that all lanes end at about the same time. What judges measured times is
run alone at the end.

    python scripts/test_lanes.py --lanes 2
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import IO

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "--rootdir", "."]
"""Left to itself pytest looks for its settings above the folder of `--lane`, too."""
SETTINGS = ["-p", "no:cacheprovider", "-o", "console_output_style=classic"]
"""Lanes do not know how many tests the other ones ran; nor do they share the list of those that failed."""
ALONE = "tests/e2e"
PATIENCE_S = 10.0
"""For the last lines of a lane that has ended."""
TOGETHER = ("tests/integration/kube",)
"""Folders whose files share what a session builds once and slowly; one lane takes all of such a folder."""
LONGEST = (
    "tests/integration/hub/test_scope_chain.py",
    "tests/integration/hub/test_hub_schema.py",
    "tests/unit/detect/test_detector.py",
    "tests/integration/operator/test_process_serve.py",
    "tests/integration/test_kill_real.py",
    "tests/unit/trainer/test_checkpoint_resume.py",
    "tests/unit/trainer/test_serve_schema.py",
    "tests/unit/trainer/test_resume_rates.py",
    "tests/unit/trainer/test_trainer_layouts.py",
    "tests/unit/trainer/test_generate_layouts.py",
    "tests/integration/operator/test_process_life.py",
    "tests/integration/test_bad_inputs.py",
    "tests/browser/test_scope.py",
    "tests/browser/test_scope_live.py",
    "tests/browser/test_scope_gateway.py",
    "tests/browser/test_ui_states.py",
    "tests/unit/trainer/test_trainer_process.py",
    "tests/integration/kube",
)
"""Groups of about a minute and more; Kubernetes last, whose programs run until its lane ends."""


def group_of(path: str) -> str:
    """The folder or file that a lane takes as a whole; `path` is relative to the project."""
    return next((folder for folder in TOGETHER if path.startswith(f"{folder}/")), path)


def in_turn(groups: Sequence[str]) -> list[str]:
    """The order in which groups are offered."""
    return sorted(groups, key=lambda group: LONGEST.index(group) if group in LONGEST else len(LONGEST))


@dataclasses.dataclass(eq=False)  # pytest keeps its plugins in sets
class Lane:
    """The plugin of one lane. `folder` is shared: a file in it says that its group is taken."""

    folder: pathlib.Path
    ran: int = 0
    failed: list[str] = dataclasses.field(default_factory=list)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """As pytest's own, with the items that this lane takes."""
        if session.testsfailed:
            raise session.Interrupted("errors during collection")
        items = self.taken(session.items)
        item = next(items, None)
        while item is not None:
            following = next(items, None)  # fixtures that it shares with this one are kept
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self.ran += 1
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = following
        return True

    def taken(self, items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
        groups: dict[str, list[pytest.Item]] = {}
        for item in items:
            groups.setdefault(group_of(item.nodeid.partition("::")[0]), []).append(item)
        for group in in_turn(list(groups)):
            if self.take(group):
                yield from groups[group]

    def take(self, group: str) -> bool:
        try:
            os.close(os.open(self.folder / f"of-{group.replace('/', '+')}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(f"{report.nodeid} failed ({report.when})")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        counts = {"collected": session.testscollected, "ran": self.ran, "failed": self.failed}
        with contextlib.suppress(OSError):  # fixtures end after this, even if the folder is lost
            (self.folder / f"counts-{os.getpid()}").write_text(json.dumps(counts), encoding="utf-8")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lane", type=pathlib.Path, help="run only what no other lane with this folder has taken")


def pytest_configure(config: pytest.Config) -> None:
    if folder := config.getoption("--lane"):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have what is in the background ignore it
        config.pluginmanager.register(Lane(folder))


class Runs:
    """Pytests, and what ends them: each is interrupted when we are to end, so that its fixtures clean up.

    They have process groups of their own: Ctrl-C reaches them by us alone, and not a second time amid their cleaning.
    """

    def __init__(self) -> None:
        self.ended_by: signal.Signals | None = None
        self._running: list[subprocess.Popen[bytes]] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._end)

    def start(self, command: Sequence[str], *, stdout: int | None = None) -> subprocess.Popen[bytes]:
        """Begin one; from the project's folder."""
        run = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=stdout, process_group=0)
        self._running.append(run)
        if self.ended_by is not None:
            run.send_signal(signal.SIGINT)
        return run

    def _end(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.ended_by = signal.Signals(number)
        for run in self._running:
            run.send_signal(signal.SIGINT)


def run_lanes(runs: Runs, count: int, paths: Sequence[str]) -> list[str]:
    """Run these tests, or everything that need not be alone; what went wrong."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        command = [*PYTEST, "-p", "scripts.test_lanes", f"--lane={name}", f"--ignore={ALONE}", *SETTINGS, *paths]
        lanes = [runs.start(command, stdout=subprocess.PIPE) for _ in range(count)]
        printers = [
            threading.Thread(target=pass_on, args=(lane.stdout, number), daemon=True)
            for number, lane in enumerate(lanes)
        ]
        for printer in printers:
            printer.start()
        codes = [lane.wait() for lane in lanes]
        for printer in printers:
            printer.join(PATIENCE_S)
        counts = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("counts-*")]
    wrong = [f"lane {number} ended with code {code}" for number, code in enumerate(codes) if code]
    collected, ran = {one["collected"] for one in counts}, sum(one["ran"] for one in counts)
    if collected != {ran}:
        wrong.append(f"{ran} tests ran of {sorted(collected)} collected")
    wrong += [failure for one in counts for failure in one["failed"]]  # last: a log may be kept by its end only
    return wrong


def pass_on(lines: IO[bytes] | None, number: int) -> None:
    """Print a lane's output, even if it is not text; read on without a reader of ours, or the lane would wait."""
    for line in lines or ():
        with contextlib.suppress(OSError):
            sys.stdout.buffer.write(b"%d| %b" % (number, line))
            sys.stdout.buffer.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", type=int, default=2, help="how many tests run at the same time (default: 2)")
    parser.add_argument("paths", nargs="*", help="tests to run (default: all)")
    options = parser.parse_args()
    runs = Runs()
    wrong = run_lanes(runs, options.lanes, options.paths)
    if not options.paths and runs.ended_by is None and (code := runs.start([*PYTEST, ALONE]).wait()):
        wrong.append(f"{ALONE} ended with code {code}")
    if runs.ended_by is not None:
        wrong.append(f"ended by {runs.ended_by.name}")
    print("\n".join(f"error: {one}" for one in wrong) or "All tests of Python passed.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
