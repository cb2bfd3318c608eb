"""Arguments and data are judged without torch, all problems of the data at once."""

import json
import pathlib
import struct
import subprocess
import sys

import numpy as np
import pytest

from megatronapp_common.names import ExitCode
from megatronapp_trainer.checkpoint import directory
from megatronapp_trainer.training import check

SHAPE = ("--num-layers", "4", "--hidden-size", "16", "--num-attention-heads", "4", "--seq-length", "8")
FLAGS = (*SHAPE, "--micro-batch-size", "1", "--train-iters", "2", "--lr", "0.001", "--eval-iters", "0")
MOCK = ["--mock-data", "--vocab-size", "32"]


def write_corpus(prefix: pathlib.Path, tokens: int) -> str:
    """One document of `tokens` tokens with ids 0, 1, 2, ..."""
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 1, 2)
    lengths, document_indices = np.array([tokens], dtype=np.int32), np.arange(2, dtype=np.int64)
    prefix.with_suffix(".idx").write_bytes(header + lengths.tobytes() + bytes(8) + document_indices.tobytes())
    prefix.with_suffix(".bin").write_bytes(np.arange(tokens, dtype=np.uint16).tobytes())
    return str(prefix)


def test_all_wrong_flags_are_problems_of_their_own() -> None:
    found = check.find_problems([*FLAGS, *MOCK, "--num-layer", "3", "--fp8-margin", "--lr", "fast"], 1)
    assert [(problem.code, problem.flags[0]) for problem in found] == [
        (int(ExitCode.USAGE), flag) for flag in ("--lr", "--num-layer", "--fp8-margin")
    ]


@pytest.mark.parametrize(
    ("flags", "world", "flag", "problem_text"),
    [
        (["--num-layer", "3"], 1, "--num-layer", "unknown flag"),
        (["--lr", "fast"], 1, "--lr", "invalid float value"),
        (["--tensor-model-parallel-size", "2"], 3, "--tensor-model-parallel-size", "3 ranks cannot be divided"),
        (["--global-batch-size", "3"], 2, "--global-batch-size", "is not a multiple"),
        (["--help"], 1, "--help", "trains nothing"),
        (["--tensor-model-parallel-size", "0"], 1, "--tensor-model-parallel-size", "must be 1 or more"),
    ],
)
def test_wrong_flags(flags: list[str], world: int, flag: str, problem_text: str) -> None:
    (problem,) = check.find_problems([*FLAGS, *MOCK, *flags], world)
    assert (problem.code, problem.flags[0], problem_text in problem.message) == (ExitCode.USAGE, flag, True), problem


def test_a_checkpoint_of_another_program_is_named_before_anything_starts(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "there" / "iter_0000020" / "mp_rank_00"
    folder.mkdir(parents=True)
    (folder / "model_optim_rng.pt").touch()
    flags = [*FLAGS, *MOCK, "--load", str(tmp_path / "there")]
    (problem,) = check.find_problems(flags, 1)
    assert (problem.code, problem.flags) == (ExitCode.DATA, ("--load",))
    assert "in the legacy layout" in problem.message
    assert f"megatronapp checkpoint convert --load-dir {tmp_path / 'there'}" in problem.message
    save = tmp_path / "save"
    (save / "iter_0000001").mkdir(parents=True)  # it is resumed from, and --load is not looked at
    assert check.find_problems([*flags, "--save", str(save)], 1) == []


@pytest.mark.parametrize("flag", ["--load", "--save"])
def test_a_whole_checkpoint_of_ours_among_those_of_another_program_is_taken(tmp_path: pathlib.Path, flag: str) -> None:
    folder = tmp_path / "there" / "iter_0000020" / "mp_rank_00"
    folder.mkdir(parents=True)
    (folder / "model_optim_rng.pt").touch()
    flags = [*FLAGS, *MOCK, flag, str(tmp_path / "there")]
    (problem,) = check.find_problems(flags, 1)
    assert (problem.code, problem.flags) == (ExitCode.DATA, (flag,))
    ours = tmp_path / "there" / "iter_0000040"
    ours.mkdir()
    manifest = directory.Manifest(
        iteration=40,
        consumed_samples=40,
        skipped_iterations=0,
        attempt=0,
        layout={},
        optimizer=None,
        random_states=False,
        arguments={},
    )
    directory.seal(ours, manifest)
    assert check.find_problems(flags, 1) == []
    (ours / directory.MANIFEST).write_text("{")
    (problem,) = check.find_problems(flags, 1)
    assert "in the legacy layout" in problem.message


def test_what_can_be_trained_has_no_problem(tmp_path: pathlib.Path) -> None:
    assert check.find_problems([*FLAGS, *MOCK], 4) == []
    corpus = write_corpus(tmp_path / "corpus", 30)
    assert check.find_problems([*FLAGS, "--split", "1", "--data-path", corpus, "--vocab-size", "30"], 1) == []


def test_every_problem_of_the_data_is_reported(tmp_path: pathlib.Path) -> None:
    whole, short = write_corpus(tmp_path / "whole", 30), write_corpus(tmp_path / "short", 5)
    absent, tokenizer = str(tmp_path / "absent"), str(tmp_path / "tokenizer.json")
    data = ["--split", "1", "--data-path", "1", whole, "1", short, "1", absent, "--tokenizer-file", tokenizer]
    found = check.find_problems([*FLAGS, *data], 1)
    assert [(problem.flags[0], problem.value) for problem in found] == [
        ("--tokenizer-file", None),
        ("--data-path", short),
        ("--data-path", absent),
    ]
    assert {problem.code for problem in found} == {ExitCode.DATA}


def test_a_corpus_beyond_the_vocabulary_is_a_problem_of_the_corpus(tmp_path: pathlib.Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", 30)
    data = ["--train-data-path", corpus, "--vocab-size", "20"]
    (problem,) = check.find_problems([*FLAGS, *data], 1)
    assert (problem.flags, problem.value) == (("--train-data-path",), corpus)
    assert "holds token ids up to 29, but the vocabulary has 20" in problem.message


def test_an_empty_training_split_is_a_problem_of_the_split(tmp_path: pathlib.Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", 30)
    data = ["--split", "0,1", "--data-path", corpus, "--vocab-size", "30"]
    (problem,) = check.find_problems([*FLAGS, *data], 1)
    assert problem.flags == ("--split",)


def test_the_command_answers_in_json_and_loads_neither_torch_nor_megatron_core(tmp_path: pathlib.Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", 30)
    data = ["--split", "1", "--data-path", corpus, "--vocab-size", "20"]
    code = (
        "import sys; from megatronapp_trainer.training.check import main; code = main(); "
        "assert not {'torch', 'megatron'} & set(sys.modules); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "--world-size", "1", "--", *FLAGS, *data]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.DATA, done.stderr
    (problem,) = json.loads(done.stdout)["problems"]
    assert set(problem) == {"code", "flags", "value", "message"}
