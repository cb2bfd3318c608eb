"""A state folder that is a file, read-only or full: one sentence with its path, whichever command meets it."""

import pathlib
import subprocess
import sys
import textwrap

import pytest

from megatronapp_common.cli import main
from megatronapp_common.errors import StateError
from megatronapp_common.state import raise_state_errors

FAULT = ("--rank", "0", "--kind", "host", "--factor", "2", "--from-step", "1", "--steps", "1")
COMMANDS = {
    "get": (),
    "describe": ("job",),
    "logs": ("job",),
    "wait": ("job", "--for=delete"),
    "delete": ("job",),
    "inject": ("job", *FAULT),
    "ui": ("job",),
    "serve": ("--print", "job"),
    "trace": ("export", "job", "-o", "trace.json"),
}
MANIFEST = """
apiVersion: megatronapp.io/v1alpha1
kind: MegatronJob
metadata: {name: job}
spec:
  model: {numLayers: 2, hiddenSize: 8, numAttentionHeads: 1, seqLength: 8, vocabSize: 32}
  training: {microBatchSize: 1, globalBatchSize: 1, trainIters: 1, lr: 0.001}
  data: {mock: true}
"""
ON_A_MOUNT = """
import os, pathlib, sys
from megatronapp_common.cli import main
from megatronapp_operator.backends.process import settings_builder
from megatronapp_operator.backends.process.state import files, registry
from megatronapp_operator.backends.process.state.paths import JobPaths
from megatronapp_operator.cli import run

run.preflight = lambda job, command: None
state, manifest, fault = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ["XDG_STATE_HOME"] = str(state)
paths = JobPaths.of("kept")
paths.root.mkdir(parents=True)
files.write_text(paths.manifest, pathlib.Path(manifest).read_text())
files.write_json(paths.status, {"phase": "Succeeded"})
paths.lock.touch()
if fault == "full":
    with (state / "filler").open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                break
else:
    os.system(f"mount -o remount,ro {state}")
for words in (["run", manifest], ["run", manifest, "--detach"], ["delete", "kept"], ["get", "kept"]):
    print(">", *words[:1], *words[2:], file=sys.stderr, flush=True)
    print(main(words), file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_in_place_of_the_state_folder_is_named(
    command: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "megatronapp").write_text("a file")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main([command, *COMMANDS[command]]) == 1
    output = capsys.readouterr()
    sentence = "cannot keep the state of jobs here: Not a directory; remove the file, or set XDG_STATE_HOME"
    assert (output.out, output.err) == ("", f"error: {tmp_path}/megatronapp: {sentence} to another folder\n")


def run_on_a_mount(tmp_path: pathlib.Path, fault: str) -> list[list[str]]:
    """Return the answer of each command, in lines, on a small separate file system."""
    state, manifest, script = tmp_path / "state", tmp_path / "job.yaml", tmp_path / "script.py"
    state.mkdir()
    manifest.write_text(MANIFEST)
    script.write_text(textwrap.dedent(ON_A_MOUNT))
    mount = f"mount -t tmpfs -o size=64k,nr_inodes=64 none {state} || exit 77\n"
    unshare = ["unshare", "--mount", "--map-root-user", "sh", "-c", f'{mount} exec "$@"', "sh"]
    command = [*unshare, sys.executable, str(script), str(state), str(manifest), fault]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip(f"no mount of one's own on this machine: {done.stderr.strip()}")
    return [block.splitlines() for block in done.stderr.split("> ")[1:]]


def test_a_full_disk_is_reported_in_a_single_sentence_with_the_path(tmp_path: pathlib.Path) -> None:
    jobs = tmp_path / "state" / "megatronapp" / "jobs"
    answers = run_on_a_mount(tmp_path, "full")
    for answer in answers[:2]:
        command, error, code = answer
        assert error.startswith(f"error: {jobs}/job"), command
        assert "cannot keep the state of jobs here: No space left on device; free some space, or set" in error
        assert code == "1"
    assert answers[2][1:] == ["0"], "what was kept can be deleted"


def test_a_read_only_folder_is_reported_in_a_single_sentence_with_the_path(tmp_path: pathlib.Path) -> None:
    jobs = tmp_path / "state" / "megatronapp" / "jobs"
    *refused, shown = run_on_a_mount(tmp_path, "read-only")
    for command, error, code in refused:
        assert error.startswith(f"error: {jobs}/"), command
        assert "Read-only file system; make it readable and writable, or set XDG_STATE_HOME" in error
        assert code == "1"
    assert shown == ["get", "0"], "looking needs no writing"


def test_an_error_about_another_file_stays_what_it_is(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError), raise_state_errors():
        (tmp_path / "x").read_text()
    with pytest.raises(OSError, match=r"^words$"), raise_state_errors():
        raise OSError("words")


def test_a_folder_above_the_state_counts_too(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "a" / "b"))
    (tmp_path / "a").touch()
    with pytest.raises(StateError, match=f"^{tmp_path}/a: "), raise_state_errors():
        (tmp_path / "a" / "b" / "megatronapp").mkdir(parents=True)
