"""Bad input through the real commands: one clear message, and an exit code that is not 0.

Fields of manifests, flags and checkpoints have separate tables next to their parts (test_common_bad_manifests,
test_trainer_flags, test_data_prepare, test_checkpoint_failures, test_hub_restart); a port in use is in
test_process_commands. Here is what users see of it in the end.
"""

import copy
import dataclasses
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import yaml

from megatronapp_trainer.data.tokenizer import train

pytestmark = pytest.mark.process

MEGATRONAPP = [sys.executable, "-m", "megatronapp_common.cli"]
DEADLINE_S = 240
TOKENS = 289
"""Size of the vocabulary that the tokenizer of the tests learns."""
MANIFEST: dict[str, Any] = {
    "apiVersion": "megatronapp.io/v1alpha1",
    "kind": "MegatronJob",
    "metadata": {"name": "job"},
    "spec": {
        "nodes": 1,
        "procPerNode": 1,
        "model": {
            "type": "gpt",
            "numLayers": 2,
            "hiddenSize": 128,
            "numAttentionHeads": 4,
            "seqLength": 16,
            "vocabSize": 300,
        },
        "training": {
            "microBatchSize": 1,
            "globalBatchSize": 1,
            "trainIters": 2,
            "lr": 0.001,
            "logInterval": 1,
            "evalIters": 0,
        },
        "data": {"mock": True},
        "trace": {"enabled": False},
        "analyzer": {"enabled": False},
        "runPolicy": {"maxRestarts": 0, "terminationGracePeriodSeconds": 5},
    },
}
MOUNT = 'mount -t tmpfs -o size=1m none "$0" && head -c "$1" /dev/zero > "$0/filling" 2> /dev/null; shift; exec "$@"'
LIMIT = 'ulimit -f 2000; shift; exec "$@"'  # dash counts in 512 bytes
MOUNTING = ("unshare", "--mount", "--map-root-user")


@dataclasses.dataclass(frozen=True)
class Runner:
    """Runner of the command line on a separate state folder."""

    folder: pathlib.Path

    def path(self, document: dict[str, Any] | str) -> str:
        path = self.folder / "job.yaml"
        path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
        return str(path)

    def __call__(
        self, *arguments: str, before: tuple[str, ...] = (), **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*before, *MEGATRONAPP, *arguments],
            env=os.environ | {"XDG_STATE_HOME": str(self.folder / "state")} | environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )

    def status(self) -> dict[str, Any]:
        shown = self("get", "job", "-o", "json")
        assert shown.returncode == 0, shown.stderr
        status: dict[str, Any] = json.loads(shown.stdout)["status"]
        return status


@pytest.fixture
def megatronapp(tmp_path: pathlib.Path) -> Runner:
    return Runner(tmp_path)


def manifest(**spec: Any) -> dict[str, Any]:
    document = copy.deepcopy(MANIFEST)
    document["spec"] |= spec
    return document


def may_mount(folder: pathlib.Path) -> bool:
    try:
        done = subprocess.run(
            [*MOUNTING, "mount", "-t", "tmpfs", "none", str(folder)], check=False, capture_output=True
        )
    except FileNotFoundError:
        return False
    return done.returncode == 0


@pytest.mark.full("two commands each; test_common_bad_manifests tries manifests without", but=("field",))
@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({**MANIFEST, "kind": "MegatronJobs"}, "kind: 'MegatronJobs' is not possible; write MegatronJob"),
        ({**MANIFEST, "specs": {}}, "specs: unknown field; did you mean spec?"),
        ("spec: [1", "job.yaml: line 1, column 9: expected"),
        ("", "holds 0 objects; write one MegatronJob per file"),
    ],
    ids=["value", "field", "YAML", "nothing"],
)
def test_a_bad_manifest(megatronapp: Runner, document: dict[str, Any] | str, message: str) -> None:
    refused = megatronapp("run", megatronapp.path(document))
    assert (refused.returncode, message in refused.stderr) == (2, True), refused.stderr
    assert refused.stderr.startswith("error: ")
    assert "Traceback" not in refused.stderr
    assert megatronapp("get").stderr == "No jobs found.\n"


@pytest.mark.full("each imports torch; test_trainer_flags tries flags without it", but=("near",))
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--num-layer", "3"], "spec.args[0]: unknown flag --num-layer; did you mean --num-layers?"),
        (
            ["--seed", "1", "--warmup-iters=3"],
            "spec.args[2]: unknown flag --warmup-iters; did you mean --lr-warmup-iters?",
        ),
        (["--train-iters", "many"], "spec.args[0]: argument --train-iters: invalid int value: 'many'"),
        (["--tensor-model-parallel-size=3"], "spec.args[0]: --num-attention-heads (4) must be a multiple of"),
        (["--global-batch-size", "3", "--micro-batch-size", "2"], "spec.args[0]: --global-batch-size 3 is not"),
        (["many"], "spec.args: unexpected argument 'many'"),
    ],
    ids=["near", "other spelling", "no number", "heads", "batch", "no flag"],
)
def test_bad_flags(megatronapp: Runner, args: list[str], message: str) -> None:
    assert_refused_before_the_start(megatronapp, manifest(args=args), message)


@pytest.mark.full("a detached job is tested by itself")
def test_bad_flags_of_a_detached_job(megatronapp: Runner) -> None:
    document = manifest(args=["--num-layer", "3"])
    assert_refused_before_the_start(megatronapp, document, "spec.args[0]: unknown flag --num-layer;", "--detach")


def assert_refused_before_the_start(megatronapp: Runner, document: dict[str, Any], message: str, *how: str) -> None:
    refused = megatronapp("run", megatronapp.path(document), *how)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert refused.stderr.startswith(f"error: {message}"), refused.stderr
    assert all(line.startswith("error: spec.") for line in refused.stderr.splitlines()), refused.stderr
    assert refused.stdout == ""
    assert not (megatronapp.folder / "state").exists(), "nothing was started"


def assert_single_message(done: "subprocess.CompletedProcess[str]", message: str) -> None:
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert message in output
    assert "Traceback" not in output


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A corpus as `megatronapp data prepare` leaves it, which takes torch; `<folder>/corpus_text_document`."""
    folder = tmp_path_factory.mktemp("corpus")
    backend = train(["the quick brown fox jumps over the lazy dog\n" * 200], 300).backend
    backend.save(str(folder / "tokenizer.json"))
    tokens = np.array([*backend.encode("the quick brown fox jumps over the lazy dog").ids, TOKENS - 1], np.uint16)
    (folder / "corpus_text_document.bin").write_bytes(tokens.tobytes())
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 1, 2)
    document = np.array([tokens.size], np.int32).tobytes() + np.array([0, 0, 1], np.int64).tobytes()
    (folder / "corpus_text_document.idx").write_bytes(header + document)
    return folder


@pytest.mark.full("each imports torch; test_data_prepare tries files without it", but=("cut",))
@pytest.mark.parametrize(
    ("suffix", "size_bytes", "message"),
    [
        (None, 0, "corpus_text_document.idx does not exist; make it with `megatronapp data prepare`"),
        (".bin", 100, "corpus_text_document.bin has 100 bytes where"),
        (".bin", 0, "corpus_text_document.bin has 0 bytes where"),
        (".idx", 20, "corpus_text_document.idx is only 20 bytes long"),
        (".bin", -1, "corpus_text_document.bin does not exist"),
    ],
    ids=["missing", "cut", "empty", "index cut", "half missing"],
)
def test_bad_data(megatronapp: Runner, corpus: pathlib.Path, suffix: str | None, size_bytes: int, message: str) -> None:
    copied = megatronapp.folder / "copy"
    if suffix is not None:
        shutil.copytree(corpus, copied)
        path = copied / f"corpus_text_document{suffix}"
        path.unlink() if size_bytes < 0 else os.truncate(path, size_bytes)
    data = {"path": [str(copied / "corpus_text_document")], "tokenizer": str(corpus / "tokenizer.json")}
    assert_refused_before_the_start(megatronapp, manifest(data=data), f"spec.data.path[0]: {copied}/{message}")


@pytest.mark.full("each imports torch; test_data_prepare has the check")
@pytest.mark.parametrize(
    ("data", "vocab_size", "message"),
    [
        ({"tokenizer": "none.json"}, 300, "spec.data.tokenizer: tokenizer file none.json does not exist"),
        ({"tokenizer": "corpus.idx"}, 300, "spec.data.tokenizer: corpus.idx cannot be read as a tokenizer"),
        ({"vocabFile": "v", "mergeFile": "m"}, 300, "spec.data.vocabFile: tokenizer file v does not exist"),
        ({"tokenizer": "tokenizer.json"}, 100, "spec.model.vocabSize: 100 is below the tokenizer's 289 tokens; write "),
        ({}, 100, "spec.data.path[0]: corpus holds token ids up to 288, but the vocabulary has 100; give "),
        ({}, None, "spec.data.tokenizer: is missing; write tokenizer: tokenizer.json, or model.vocabSize for tokens "),
    ],
    ids=["missing", "no tokenizer", "GPT-2 files missing", "below the tokenizer", "below the corpus", "neither"],
)
def test_a_vocabulary_that_does_not_fit(
    megatronapp: Runner, corpus: pathlib.Path, data: dict[str, Any], vocab_size: int | None, message: str
) -> None:
    shutil.copytree(corpus, megatronapp.folder, dirs_exist_ok=True)
    (megatronapp.folder / "corpus.idx").touch()
    document = manifest(data={"path": ["corpus_text_document"], **data})
    if vocab_size is None:
        del document["spec"]["model"]["vocabSize"]
    else:
        document["spec"]["model"]["vocabSize"] = vocab_size
    message = message.replace("corpus holds", "corpus_text_document.bin holds")
    assert_refused_before_the_start(megatronapp, document, message)


@pytest.mark.full("imports torch three times")
def test_a_checkpoint_directory_that_cannot_be_written(megatronapp: Runner) -> None:
    (megatronapp.folder / "file").touch()
    save = str(megatronapp.folder / "file" / "checkpoints")
    refused = megatronapp("run", megatronapp.path(manifest(checkpoint={"save": save, "saveInterval": 1})))
    assert_single_message(refused, save)
    assert "Not a directory" in refused.stdout + refused.stderr


@pytest.mark.full("real ranks import torch; test_checkpoint_failures fills the disk of ranks that are forked")
def test_a_full_disk_at_a_checkpoint(megatronapp: Runner) -> None:
    save = megatronapp.folder / "save"
    save.mkdir()
    before: tuple[str, ...] = ("sh", "-c", LIMIT, str(save), "0")
    if may_mount(save):
        before = (*MOUNTING, "sh", "-c", MOUNT, str(save), "0")
    elif shutil.which("sh") is None:
        pytest.skip("no right to mount, and no shell to set a limit of file sizes")
    document = manifest(checkpoint={"save": str(save), "saveInterval": 1})
    refused = megatronapp("run", megatronapp.path(document), before=before)
    output = refused.stdout + refused.stderr
    assert refused.returncode == 1, output
    assert "could not be written" in output
    assert "Traceback" not in output
    assert megatronapp.status()["failures"][0]["exitCode"] == 67


@pytest.mark.full("real ranks take ten seconds; test_scan_training trains without space for its ring")
def test_full_shared_memory_disables_tracing_only(megatronapp: Runner) -> None:
    shm = megatronapp.folder / "shm"
    shm.mkdir()
    if not may_mount(shm):
        pytest.skip("this user may not mount a small tmpfs")
    document = manifest(trace={"enabled": True}, analyzer={"enabled": True})
    full = (*MOUNTING, "sh", "-c", MOUNT, str(shm), "2m")
    done = megatronapp("run", megatronapp.path(document), "--follow", before=full, MEGATRONAPP_SHM_DIR=str(shm))
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "tracing is off on rank 0" in output
    assert "iteration        2/       2" in output
    assert "Traceback" not in output
