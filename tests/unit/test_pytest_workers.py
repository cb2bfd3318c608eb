"""Runs of pytest in several processes clean up when they are interrupted, and report failures last."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest
import pytest_workers

ROOT = pathlib.Path(__file__).parents[2]
PYTEST = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "pytest_workers"]
ENVIRONMENT = {"PYTHONPATH": str(ROOT / "scripts"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "MEGATRONAPP_FULL": ""}
LONG = """
import pathlib, time, pytest

HERE = pathlib.Path(__file__).parent

@pytest.fixture(scope="session")
def job():
    yield
    time.sleep(CLEANING_S)
    (HERE / "cleaned").touch()

def test_that_goes_on(job):
    (HERE / "begun").write_text("begun")
    while True:
        time.sleep(0.1)  # a signal that arrives just before a sleep is handled after it
"""


def begin(
    folder: pathlib.Path,
    content: str,
    environment: dict[str, str] | None = None,
    *,
    command: tuple[str, ...] = (),
    workers: int = 1,
) -> subprocess.Popen[str]:
    (folder / "test_file.py").write_text(content, encoding="utf-8")
    (folder / "pytest.ini").touch()
    return subprocess.Popen(
        [*command, *PYTEST, "-n", str(workers)],
        cwd=folder,
        env=os.environ | ENVIRONMENT | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(folder: pathlib.Path, content: str, **environment: str) -> tuple[int, str]:
    with begin(folder, content, environment) as process:
        output = process.communicate()[0]
        return process.returncode, output


@pytest.mark.parametrize(
    ("number", "to_all", "cleaning_s"),
    [
        pytest.param(signal.SIGINT, True, 0, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, False, 0, id="TERM", marks=pytest.mark.full("has the same handler")),
        pytest.param(signal.SIGTERM, False, 20, id="slow", marks=pytest.mark.full("longer than execnet waits: 20 s")),
    ],
)
def test_fixtures_end_before_an_interrupted_run_does(
    tmp_path: pathlib.Path, number: signal.Signals, to_all: bool, cleaning_s: float
) -> None:
    os.mkfifo(tmp_path / "begun")
    with begin(tmp_path, LONG.replace("CLEANING_S", str(cleaning_s))) as process:
        assert (tmp_path / "begun").read_text(encoding="utf-8") == "begun"
        (os.killpg if to_all else os.kill)(process.pid, number)
        output = process.communicate()[0]
    assert (tmp_path / "cleaned").exists(), output
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert number.name in output
    assert "\ninterrupted: test_file.py::test_that_goes_on\n" in output


@pytest.mark.full("waits for the controller's connection to be found broken")
def test_fixtures_end_after_the_controller_is_killed(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "begun")
    content = LONG.replace("CLEANING_S", "0").replace(").touch()", ').write_text("cleaned")')
    os.mkfifo(tmp_path / "cleaned")
    with begin(tmp_path, content) as process:
        assert (tmp_path / "begun").read_text(encoding="utf-8") == "begun"
        process.kill()
        assert (tmp_path / "cleaned").read_text(encoding="utf-8") == "cleaned"


IGNORING = ("bash", "-c", 'trap "" INT HUP QUIT; exec "$@"', "bash")
MEANINGS = """
import pathlib, subprocess, sys

HERE = pathlib.Path(__file__).parent
PROGRAM = "import signal as s; print(s.SIG_IGN in map(s.getsignal, (s.SIGINT, s.SIGHUP, s.SIGQUIT)))"

def test_meanings():
    (HERE / "begun").write_text("begun")
    with (HERE / "signal").open() as sent:
        assert sent.readline().strip() == "sent"
    child = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, check=True)
    assert child.stdout.strip() == "False"
"""


@pytest.mark.full("with and without processes of pytest-xdist", but=("1",))
@pytest.mark.parametrize("workers", [0, 1])
def test_a_signal_that_is_ignored_does_not_end_a_run_and_has_its_meaning_in_what_tests_start(
    tmp_path: pathlib.Path, workers: int
) -> None:
    for name in ("begun", "signal"):
        os.mkfifo(tmp_path / name)
    with (
        open(os.open(tmp_path / "signal", os.O_RDWR), "wb", buffering=0) as sent,  # opens without a reader
        begin(tmp_path, MEANINGS, command=IGNORING, workers=workers) as process,
    ):
        assert (tmp_path / "begun").read_text(encoding="utf-8") == "begun"
        for number in (signal.SIGHUP, signal.SIGINT):
            process.send_signal(number)
        sent.write(b"sent\n")
        output = process.communicate()[0]
    assert process.returncode == pytest.ExitCode.OK, output


@pytest.mark.full("order of the output")
def test_names_of_failed_tests_are_printed_last(tmp_path: pathlib.Path) -> None:
    code, output = run(tmp_path, "def test_sum():\n    assert 1 + 1 == 3\n")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "::test_sum - " in output.splitlines()[-2]


def test_the_test_during_which_a_process_dies_has_failed_and_those_after_it_run(tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_before.py").write_text("def test_before():\n    pass\n", encoding="utf-8")  # in the same process
    code, output = run(tmp_path, "import os\ndef test_death():\n    os._exit(0)\ndef test_later():\n    pass\n")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "::test_death" in output.splitlines()[-2]
    assert output.splitlines()[-1].startswith("===") and " 1 failed, 2 passed in " in output.splitlines()[-1]


MARKED = """
import pytest

pytestmark = pytest.mark.full("kills", but=("test_short",))

def test_long():
    pass

def test_short():
    pass

@pytest.mark.full("a sweep", but=("TP1-b",))
@pytest.mark.parametrize("name", "ab")
@pytest.mark.parametrize("layout", ["TP1", "TP2"])
def test_sweep(name, layout):
    pass

@pytest.mark.parametrize("name", [pytest.param("c", marks=pytest.mark.full("slow"))])
def test_one_case(name):
    pass
"""


@pytest.mark.full("`make test-full` itself runs what is marked", but=("short",))
@pytest.mark.parametrize(
    ("environment", "outcome"),
    [pytest.param({}, "2 passed", id="short"), pytest.param({"MEGATRONAPP_FULL": "1"}, "7 passed", id="full")],
)
def test_tests_marked_full_run_only_where_the_variable_is_set(
    tmp_path: pathlib.Path, environment: dict[str, str], outcome: str
) -> None:
    code, output = run(tmp_path, MARKED, **environment)
    assert code == pytest.ExitCode.OK
    assert f" {outcome} in " in output.splitlines()[-1]


def test_longest_files_run_first_and_those_with_an_api_server_last() -> None:
    durations = {"tests/a.py": 3.0, "tests/b.py": 60.0, "tests/integration/kube/d.py": 90.0}
    paths = ["tests/integration/kube/c.py", "tests/integration/kube/d.py", "tests/new.py", "tests/a.py", "tests/b.py"]
    in_order = sorted(paths, key=lambda path: pytest_workers.sort_key(path, durations))
    assert in_order == [
        "tests/b.py",
        "tests/a.py",
        "tests/new.py",
        "tests/integration/kube/d.py",
        "tests/integration/kube/c.py",
    ]


@pytest.mark.full("a mistake in a mark")
def test_a_mark_that_names_no_test_is_refused(tmp_path: pathlib.Path) -> None:
    code, output = run(tmp_path, MARKED.replace('"test_short",', '"test_shrt",'))
    assert code != pytest.ExitCode.OK
    assert "test_file.py: 'test_shrt' in but=... of the mark 'full' is no function and no case" in output


def test_durations_are_of_files_that_exist() -> None:
    missing = [path for path in pytest_workers.read_durations() if not (ROOT / path).exists()]
    assert not missing, "write them anew by 'make durations', or rename them in tests/durations.json"
