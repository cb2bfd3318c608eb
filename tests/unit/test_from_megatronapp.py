"""Commands that MegatronApp's pages print are all answered, and every command in an answer is one that passes."""

import argparse
import importlib.metadata
import pathlib
import re
import shlex

import pytest

from megatronapp_common.cli import GROUP, build_parser, main
from megatronapp_common.job import load_job
from megatronapp_common.migration.answer import find_translations
from megatronapp_common.migration.commands import COMMANDS
from megatronapp_common.migration.megatron_flags import unavailable
from megatronapp_common.migration.names import NAMES
from megatronapp_operator.cli.serve import manifest_of
from megatronapp_trainer.checkpoint.convert.cli import options_from as convert_options
from megatronapp_trainer.config import parse
from megatronapp_trainer.data.cli import options_from as prepare_options

ROOT = pathlib.Path(__file__).parents[2]
LATER = "not yet"


def listed(title: str) -> list[str]:
    """The lines of one section of the list."""
    text = (ROOT / "tests" / "fixtures" / "megatronapp-pages.txt").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^\[([^]]+)]\n(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL))
    return [line for line in sections[title].splitlines() if line]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return build_parser(importlib.metadata.entry_points(group=GROUP))


def check_ours(arguments: list[str], parser: argparse.ArgumentParser) -> None:
    """Parse a command of `megatronapp`, and check its options as the command itself does before it begins."""
    values = parser.parse_args(arguments)
    if arguments[0] == "checkpoint":
        convert_options(values)
    elif arguments[:2] == ["data", "prepare"]:
        prepare_options(values)
    elif arguments[0] == "serve" and values.load is not None:
        load_job(manifest_of(values))
    elif arguments[0] == "run":
        load_job((ROOT / values.file).read_text(encoding="utf-8"))


def check(command: str, parser: argparse.ArgumentParser) -> None:
    """Fail unless a command of an answer would begin."""
    arguments = shlex.split(command.replace("$(nproc)", "2"))
    if arguments[0] == "megatronapp":
        check_ours(arguments[1:], parser)
    elif arguments[0] == "torchrun":
        place = arguments.index("-m")
        assert arguments[place + 1] == "megatronapp_trainer.pretrain"
        parse(arguments[place + 2 :])
    elif arguments[0] == "make":
        assert re.search(rf"^{arguments[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    elif arguments[0] == "kubectl":
        load_job((ROOT / arguments[arguments.index("-f") + 1]).read_text(encoding="utf-8"))
    elif arguments[0] == "helm":
        assert (ROOT / arguments[-1] / "Chart.yaml").is_file()
    else:
        assert arguments[0] in {"huggingface-cli", "mkdir", "ls", "cd"}, command  # they are none of ours


@pytest.mark.parametrize("printed", listed("commands"))
def test_a_translated_command_is_accepted_by_the_parser(printed: str, parser: argparse.ArgumentParser) -> None:
    found = [answer for answer in find_translations(printed) if answer.here]
    assert found
    assert found[-1].why
    for answer in found:
        for command in answer.here:
            check(command, parser)


@pytest.mark.parametrize("printed", listed(LATER))
def test_an_unsupported_command_is_answered_with_its_plan(printed: str) -> None:
    (answer,) = find_translations(printed)
    assert (answer.here, answer.later) == ((), "T5")


@pytest.mark.parametrize(
    "name", [name for kind in ("flags", "variables", "files", "fields", "controls") for name in listed(kind)]
)
def test_a_name_is_answered(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "--", name]) == 0
    assert capsys.readouterr().out == f"{name}: {NAMES[name]}\n"


SAME = [name for name in listed("flags") if NAMES[name].startswith("the same")]
FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --lr 1 "
    "--train-iters 1"
)
TOGETHER = {
    "--loss-scale": "--loss-scale 1024 --fp16",
    "--trace-dir": "--trace --trace-dir trace_output",
    "--trace-interval": "--trace --trace-interval 5",
    "--continuous-trace-iterations": "--trace --continuous-trace-iterations 2",
    "--trace-granularity": "--trace --trace-granularity full",
    "--transformer-impl": "--transformer-impl local",
    "--tokenizer-type": "--tokenizer-type HuggingFaceTokenizer",
    "--tokenizer-model": "--tokenizer-model tokenizer.json",
    "--tensor-model-parallel-size": "--tensor-model-parallel-size 2",
    "--sequence-parallel": "--tensor-model-parallel-size 2 --sequence-parallel",
    "--pipeline-model-parallel-size": "--pipeline-model-parallel-size 2",
    "--num-experts": "--num-experts 4 --disable-bias-linear",
    "--expert-model-parallel-size": "--num-experts 4 --disable-bias-linear --expert-model-parallel-size 2",
    "--context-parallel-size": "--context-parallel-size 2 --attention-dropout 0",
    "--fp8-format": "--bf16 --fp8-format e4m3",
    "--cp-comm-type": "--context-parallel-size 2 --cp-comm-type a2a",
    "--num-layers-per-virtual-pipeline-stage": "--pipeline-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 4",
    "--recompute-granularity": "--recompute-granularity selective",
    "--recompute-method": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-num-layers": "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
    "--vocab-file": "--data-path corpus --vocab-file v --merge-file m",
    "--merge-file": "--data-path corpus --vocab-file v --merge-file m",
    "--split": "--data-path corpus --split 98,2,0",
    "--data-path": "--data-path corpus",
    "--node-ips": "--node-ips 10.0.0.1,10.0.0.1",
    "--num-gpus": "--num-gpus 4",
    "--use-dpp": "--use-dpp --pipeline-model-parallel-size 2 --num-layers 2",
    "--ignore-forward-tensor-parallel": "--forward-backward-disaggregating --ignore-forward-tensor-parallel "
    "--attention-dropout 0",
    "--training-ws-port": "--training-ws-port 5000",
    "--save": "--save there",
    "--load": "--load there",
}


@pytest.mark.parametrize("flag", SAME)
def test_a_flag_that_is_called_the_same_is_taken(flag: str) -> None:
    arguments = TOGETHER.get(flag, flag)
    data = "" if "--data-path" in arguments else "--mock-data"
    tokens = "" if "--vocab-file" in arguments else "--vocab-size 60"
    parse(f"{FLAGS} {data} {tokens} {arguments}".split())


def test_the_broken_lines_of_the_pages_are_understood() -> None:
    text = "python scripts/aggregate.py \\\n    -b . \\ # Equivalent to --benchmark\n    -d # Enable the detection"
    (answer,) = find_translations(text)
    assert answer.here == ("megatronapp aggregate -b . -d",)
    text = (
        "cd datasets\npython ../tools/preprocess_data.py \\\n  --input a.json \\\n  --append-eod\n  --workers $(nproc)"
    )
    (_, answer) = find_translations(text)
    assert answer.here == ('megatronapp data prepare --input a.json --append-eod --workers "$(nproc)"',)
    flags = "\\\n --trace \\\n --trace-interval 5 \\\n --transformer-impl local"
    text = f'TRACE_FLAGS="{flags}"\nbash ./scripts/DockerUsage_MegaScan.sh'
    assert [answer.theirs for answer in find_translations(text)][:4] == [
        "TRACE_FLAGS",
        "--trace",
        "--trace-interval",
        "--transformer-impl",
    ]


def test_no_two_entries_translate_the_same_command() -> None:
    for old in COMMANDS:
        for printed in old.printed.splitlines():
            assert find_translations(printed)[-1].why == old.why, printed


def test_a_script_is_given_by_its_commands(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "mine.sh"
    script.write_text("python pretrain_gpt.py --num-layers 2\n")
    assert main(["translate", f"bash {script}"]) == 1
    assert f'megatronapp translate "$(cat {script})"' in capsys.readouterr().err


def test_a_script_under_a_known_name_is_answered_with_how_to_translate_its_content(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "pretrain_gpt.sh"
    script.write_text(f"torchrun pretrain_gpt.py {FLAGS}\n")
    assert main(["translate", f"bash {script}"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.endswith(f'megatronapp translate "$(cat {script})"')
    assert rest[-1].startswith("megatronapp run ")


@pytest.mark.parametrize(
    "array", ["(--log-params-norm --micro-batch-size 2)", "(\n--micro-batch-size 2\n--log-params-norm\n)"]
)
def test_flags_in_an_array_of_a_script_are_answered(array: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", f"ARGS={array}\ntorchrun pretrain_gpt.py ${{ARGS[@]}}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"--log-params-norm: {unavailable('--log-params-norm')}" in lines
    assert "--micro-batch-size: the same; in a manifest spec.training.microBatchSize" in lines


def test_a_flag_without_an_entry_is_answered_with_where_it_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "--", "--log-throughput"]) == 1
    assert "in a manifest in spec.args" in capsys.readouterr().err


def test_an_unknown_command_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "bash something_else.sh"]) == 1
    assert "docs/from-megatronapp.md" in capsys.readouterr().err


@pytest.mark.parametrize("subcommand", ["train", "pretrain", "convert", "preprocess_data"])
def test_a_subcommand_of_theirs_is_answered(subcommand: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([subcommand]) == 2
    errors = capsys.readouterr().err
    assert f"unknown command {subcommand!r}; write: megatronapp " in errors
    assert "did you mean" not in errors


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("trace aggregate", "megatronapp aggregate -o benchmark.json"),
        ("trace aggregate --output a.json", "megatronapp aggregate -o a.json"),
        ("convert --load-dir gpt2 --save-dir 'my out'", None),
        ("preprocess_data --input a.json --output-prefix out --vocab-file v.json --merge-file m.txt", None),
    ],
)
def test_an_old_subcommand_is_answered_with_its_options(
    typed: str, expected: str | None, parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(typed)) == 2
    (answer,) = find_translations(f"megatronapp {typed}")
    (command,) = answer.here
    assert expected in (None, command)
    assert f"; write: {command} (" in capsys.readouterr().err
    check(command, parser)


@pytest.mark.parametrize(
    "refused",
    [
        "--workload 1048576",
        "--mtp-num-layers 4",
        "--mtp-num-layers=4",
        "--fp8-recipe tensorwise",
        "--hybrid-context-parallel",
        "--moe-extended-tp",
    ],
)
def test_a_flag_that_the_trainer_refuses_is_named_and_not_in_the_command(
    refused: str, parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"torchrun --nproc_per_node 2 pretrain_gpt.py {refused} {FLAGS} --mock-data --vocab-size 60"
    assert main(["translate", line]) == 0
    why = unavailable(refused.replace("=", " ").split()[0])
    *_, named, command = capsys.readouterr().out.splitlines()
    assert named == f"# not available: {refused} ({why})"
    check(command, parser)
    assert main(["translate", line.replace(refused, "--bf16")]) == 0
    assert "not available" not in capsys.readouterr().out


@pytest.mark.parametrize("typed", ["--trace-interval 5", "--output 'a b' x"])
def test_a_command_that_begins_with_an_option_is_shown_with_dashes(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["translate", *shlex.split(typed)]) == 2
    assert f"; write: megatronapp translate -- {typed}\n" in capsys.readouterr().err
