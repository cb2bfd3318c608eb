"""The command line: what is taken, what is refused, and with which words."""

import contextlib
import dataclasses
import re
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.migration.megatron_flags import ANSWERS, megatron_flags, unavailable
from megatronapp_common.migration.names import FLAGS
from megatronapp_common.names import ExitCode
from megatronapp_trainer.config import TrainerConfig, build_parser, parse
from megatronapp_trainer.config.checks import check_world
from megatronapp_trainer.config.fields import flag_of, option_of
from megatronapp_trainer.config.parse import OTHER_SPELLINGS, _flags
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.pretrain import main

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 10 "
    "--lr 1e-3 --mock-data --vocab-size 128"
)


def parsed(more: str = "") -> TrainerConfig:
    return parse(shlex.split(f"{SMALL} {more}"))


def refusal(more: str, *, instead_of: str = "") -> str:
    flags = SMALL.replace(instead_of, "") if instead_of else SMALL
    with pytest.raises(UsageError) as caught:
        parse(shlex.split(f"{flags} {more}"))
    return str(caught.value)


def test_defaults_are_megatrons() -> None:
    config = parsed()
    assert config.optimizer.clip_grad == 1.0
    assert config.model.hidden_dropout == config.model.attention_dropout == 0.1
    assert config.model.mlp_width == 256
    assert config.model.positions == 32
    assert config.logging.eval_iters == 100
    assert config.optimizer.lr_decay_style == "linear"
    assert config.training.check_for_nan


def test_negative_spellings_disable_their_option() -> None:
    config = parsed("--no-save-optim --disable-bias-linear --no-save-rng --no-check-for-nan-in-loss-and-grad")
    assert not config.model.add_bias_linear
    assert not config.checkpoint.save_rng
    assert not config.training.check_for_nan
    assert not config.checkpoint.save_optim
    assert config.checkpoint.load_optim


def test_the_last_of_two_values_wins() -> None:
    assert parsed("--lr 2e-3").optimizer.lr == 2e-3


def test_swiglu_width_is_two_thirds() -> None:
    assert parse(shlex.split(SMALL.replace("64", "4096", 1) + " --swiglu")).model.mlp_width == 10880


@pytest.mark.parametrize("flag", ["--num-layer", "--hiden-size", "--sequence-paralel", "--no-save-optimizer"])
def test_unknown_flags_are_refused_with_the_nearest_name(flag: str) -> None:
    message = refusal(f"{flag} 3")
    nearest = {
        "--num-layer": "--num-layers",
        "--hiden-size": "--hidden-size",
        "--sequence-paralel": "--sequence-parallel",
        "--no-save-optimizer": "--no-save-optim",
    }
    assert f"unknown flag {flag}; did you mean {nearest[flag]}?" in message


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--learning-rate", "--lr"),
        ("--learning_rate=1", "--lr"),
        ("--num_layers", "--num-layers"),
        ("--batch-size", "--micro-batch-size"),
        ("--tp", "--tensor-model-parallel-size"),
    ],
)
def test_other_trainers_spellings_lead_to_ours(flag: str, meant: str) -> None:
    assert f"did you mean {meant}?" in refusal(flag)


def test_every_other_spelling_leads_to_a_flag() -> None:
    assert set(OTHER_SPELLINGS.values()) <= set(_flags(build_parser()))
    assert not set(OTHER_SPELLINGS) & set(_flags(build_parser()))


@pytest.mark.parametrize("flag", ["--gradient-rate", "--colour", "--x"])
def test_a_flag_that_is_near_none_gets_no_suggestion(flag: str) -> None:
    assert refusal(flag) == f"unknown flag {flag}; python -m megatronapp_trainer.pretrain --help lists all"


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--tranformer-impl", "a misprint of --transformer-impl"),
    ],
)
def test_flags_of_megatronapps_pages_are_answered(flag: str, answer: str) -> None:
    message = refusal(flag)
    assert message.startswith(f"{flag.partition('=')[0]}: ")
    assert answer in message


@pytest.mark.parametrize("flag", ["--fp8-margin=1", "--moe-permute-fusion", "--non-persistent-global-ckpt-dir"])
def test_megatrons_other_flags_are_refused_by_name(flag: str) -> None:
    message = refusal(flag)
    assert message.startswith(flag.partition("=")[0])
    assert "Megatron-LM" in message


def test_no_flag_is_both_ours_and_refused() -> None:
    ours = {flag for action in build_parser()._actions for flag in action.option_strings}
    assert not ours & megatron_flags()
    assert len(megatron_flags()) > 300


def test_a_flag_is_called_unavailable_where_it_is_refused() -> None:
    ours = set(_flags(build_parser()))
    named = {*FLAGS, *ANSWERS, *megatron_flags()}
    assert {flag for flag in named if unavailable(flag) is None} == named & ours - {"--workload", "--fp8-recipe"}
    assert "1 to 64" in refusal("--pipeline-model-parallel-size 2 --use-dpp --workload 65")


def test_abbreviations_are_refused() -> None:
    assert "unknown flag --num-lay" in refusal("--num-lay 3")


def test_a_value_without_a_flag_is_refused() -> None:
    assert "unexpected argument 'surplus'" in refusal("--bf16 surplus")


def test_a_value_of_the_wrong_type_is_refused() -> None:
    assert "--train-iters" in refusal("--train-iters many")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--num-layers 0", "--num-layers is missing"),
        ("--hidden-size 66", "not a multiple of --num-attention-heads"),
        ("--group-query-attention --num-query-groups 3", "not a multiple of --num-query-groups 3"),
        ("--tensor-model-parallel-size 3", "must be a multiple of --tensor-model-parallel-size 3"),
        (
            "--num-attention-heads 12 --hidden-size 96 --group-query-attention --num-query-groups 3 "
            "--tensor-model-parallel-size 2",
            "key heads (3) must be a multiple or a divisor of --tensor-model-parallel-size 2",
        ),
        ("--sequence-parallel", "--sequence-parallel needs --tensor-model-parallel-size"),
        ("--pipeline-model-parallel-size 3", "take a multiple of 3"),
        ("--num-virtual-stages-per-pipeline-rank 2", "needs --pipeline-model-parallel-size above 1"),
        ("--overlap-param-gather", "needs --use-distributed-optimizer"),
        ("--ddp-average-in-collective --calculate-per-token-loss", "exclude each other"),
        ("--recompute-granularity full", "needs --recompute-method"),
        ("--recompute-method uniform", "need --recompute-granularity full"),
        ("--rampup-batch-size 4 4 100", "needs --global-batch-size"),
        ("--global-batch-size 16 --rampup-batch-size 4 5 100", "does not reach"),
        ("--min-lr 1", "--min-lr 1.0 is above --lr"),
        ("--lr-warmup-iters 10", "must be below the 10 steps"),
        ("--lr-decay-style WSD", "needs --lr-wsd-decay-iters"),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 11",
            "--lr-wsd-decay-iters 11 is longer than the decay of 10 (--lr-decay-iters, or --train-iters)",
        ),
        ("--lr-decay-style WSD --lr-decay-iters 5 --lr-wsd-decay-iters 6", "give 5 or less"),
        ("--decoupled-lr 1e-4 --min-lr 5e-4", "--min-lr 0.0005 is above --decoupled-lr 0.0001"),
        ("--start-weight-decay 0.1", "--weight-decay-incr-style"),
        ("--save-interval 5", "needs --save"),
        ("--faults []", "needs --trace"),
        ("--reset-position-ids --position-embedding-type rope", "no effect on rotary"),
        ("--reset-attention-mask", "--reset-attention-mask: samples of --mock-data hold no documents"),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size must be 1 or more"),
        ("--pipeline-model-parallel-size 0", "--pipeline-model-parallel-size must be 1 or more"),
        ("--max-position-embeddings 16", "below --seq-length"),
        ("--vocab-file a", "--merge-file"),
        ("--log-interval 0", "--log-interval must be above 0"),
        ("--ranks-per-gpu 2", "--ranks-per-gpu 2 needs --distributed-backend gloo"),
        ("--ranks-per-gpu 2 --overlap-grad-reduce", "excludes --use-distributed-optimizer and --overlap-grad-reduce"),
    ],
)
def test_what_cannot_work_is_refused(more: str, message: str) -> None:
    assert message in refusal(more)


def test_a_negative_rate_is_named_once() -> None:
    assert refusal("--lr -1") == "--lr is missing or not positive; give it a value above 0"


def test_a_last_phase_in_samples_fits_the_decay() -> None:
    flags = "--train-samples 100 --global-batch-size 4 --lr-decay-style WSD --lr-decay-samples 80"
    assert "--lr-wsd-decay-samples 81 is longer than the decay of 80 (--lr-decay-samples" in refusal(
        f"{flags} --lr-wsd-decay-samples 81", instead_of="--train-iters 10"
    )
    assert parse(shlex.split(f"{SMALL.replace('--train-iters 10', '')} {flags} --lr-wsd-decay-samples 80"))


def test_data_or_mock_data_is_needed() -> None:
    assert "no training data" in refusal("", instead_of="--mock-data")
    assert "exclude each other" in refusal("--data-path corpus")


def test_the_batch_must_fit_the_replicas() -> None:
    config = parsed("--global-batch-size 12")
    check_world(config, 3)
    with pytest.raises(UsageError, match="multiple of 8"):
        check_world(config, 4)


def test_interleaving_needs_whole_groups_of_microbatches() -> None:
    config = parsed("--global-batch-size 6 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2")
    with pytest.raises(UsageError, match="multiples of 4"):
        check_world(config, 1)


def test_every_section_is_frozen_and_every_field_has_help() -> None:
    for section in dataclasses.fields(TrainerConfig):
        value = getattr(parsed(), section.name)
        for field in dataclasses.fields(value):
            assert option_of(field).help, flag_of(field)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(value)[0].name, 1)


@given(st.integers(1, 10**6), st.floats(1e-9, 1, allow_nan=False), st.booleans())
def test_values_are_parsed_unchanged(iters: int, rate: float, bf16: bool) -> None:
    config = parsed(f"--train-iters {iters} --lr {rate!r}" + " --bf16" * bf16)
    assert (config.training.train_iters, config.optimizer.lr, config.precision.bf16) == (iters, rate, bf16)


def test_the_entry_point_exits_with_the_usage_code_and_a_single_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL.split(), "--num-layer", "4"]) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert captured.err == "error (rank 0): unknown flag --num-layer; did you mean --num-layers?\n"
    assert captured.out == ""


def test_help_lists_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == ExitCode.OK
    assert "--tensor-model-parallel-size" in capsys.readouterr().out


PP = "--pipeline-model-parallel-size"


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        (f"{PP} 2", (2, 2)),
        (f"{PP} 2 --decoder-first-pipeline-num-layers 1", (1, 3)),
        (f"{PP} 3 --decoder-last-pipeline-num-layers 2", (1, 1, 2)),
        (
            f"{PP} 4 --num-layers 8 --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 1",
            (3, 2, 2, 1),
        ),
        (f"{PP} 2 --num-layers 3 --account-for-loss-in-pipeline-split", (2, 2)),
    ],
)
def test_layers_of_stages(flags: str, layers: tuple[int, ...]) -> None:
    config = parsed(flags)
    assert config.parallel.stage_layers(config.model.num_layers) == layers


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{PP} 3", "--num-layers 4 cannot be divided into 3 stages; take a multiple of 3, or give uneven stages with"),
        (f"{PP} 2 --account-for-loss-in-pipeline-split", "4 and 1 counted for embedding and loss cannot be divided"),
        ("--decoder-first-pipeline-num-layers 2", "needs --pipeline-model-parallel-size above 1"),
        ("--account-for-loss-in-pipeline-split", "needs --pipeline-model-parallel-size above 1"),
        (f"{PP} 2 --decoder-first-pipeline-num-layers 4", "leave layers of --num-layers 4 that the other stages"),
        (f"{PP} 2 --decoder-first-pipeline-num-layers 5", "leave layers of --num-layers 4 that the other stages"),
        (f"{PP} 2 --decoder-first-pipeline-num-layers 0", "must be above 0"),
        (f"{PP} 2 --decoder-last-pipeline-num-layers 1 --account-for-loss-in-pipeline-split", "exclude each other"),
        (f"{PP} 2 --decoder-last-pipeline-num-layers 1 --num-virtual-stages-per-pipeline-rank 3", "into 3 chunks"),
        (
            f"{PP} 2 --decoder-last-pipeline-num-layers 2 --num-layers-per-virtual-pipeline-stage 1",
            "give --num-virtual-stages-per-pipeline-rank instead",
        ),
    ],
)
def test_impossible_stage_divisions_are_refused(flags: str, message: str) -> None:
    assert message in refusal(flags)


def test_all_wrong_flags_are_reported_together() -> None:
    flags = "--hiden-size 3 --train-iters many --fp8-margin 1 --lr fast --non-persistent-global-ckpt-dir 1 2"
    problems = refusal(flags).splitlines()
    assert [problem.split("(")[0][:44].strip() for problem in problems] == [
        "argument --train-iters: invalid int value: '",
        "argument --lr: invalid float value: 'fast'",
        "unknown flag --hiden-size; did you mean --hi",
        "--fp8-margin is a flag of Megatron-LM that t",
        "--non-persistent-global-ckpt-dir is a flag o",
    ]


def test_all_broken_rules_are_reported_together() -> None:
    problems = refusal(
        "--openai-gelu --swiglu --num-query-groups 3 --group-query-attention --save-interval 0"
    ).splitlines()
    assert len(problems) == 4
    assert any("--num-query-groups 3" in problem for problem in problems)
    assert any("--openai-gelu and --swiglu" in problem for problem in problems)
    assert any("--save-interval must be above 0" in problem for problem in problems)
    assert any("--save-interval needs --save" in problem for problem in problems)


MISTAKES = {
    # cannot be read
    "--train-iters many": "argument --train-iters: invalid int value: 'many'",
    "--lr fast": "argument --lr: invalid float value: 'fast'",
    "--adam-eps nan": "argument --adam-eps: nan is not a finite number",
    "--clip-grad inf": "argument --clip-grad: inf is not a finite number",
    "--lr-decay-style WSDD": "argument --lr-decay-style: invalid choice: 'WSDD'",
    "--save": "argument --save: expected one argument",
    "--bf16=1": "argument --bf16: ignored explicit argument '1'",
    "--rampup-batch-size 1 x 3": "argument --rampup-batch-size: invalid int value: 'x'",
    # unknown
    "--hiden-dropout 0.1": "unknown flag --hiden-dropout; did you mean --hidden-dropout?",
    "--tensor_model_parallel_size=2": "did you mean --tensor-model-parallel-size?",
    "--checkpoint-dir out": "unknown flag --checkpoint-dir; did you mean --save?",
    "--zzzz 1 2 3": "unknown flag --zzzz; python -m",
    "--fp16 --bf16": "--bf16 and --fp16 exclude each other",
    "--async-save": "--async-save needs --save DIRECTORY",
    "--non-persistent-global-ckpt-dir 5": "--non-persistent-global-ckpt-dir is a flag of Megatron-LM that this trainer "
    "does not support yet",
    "--loss-scale-window=7": "--loss-scale-window is about the loss scale of --fp16",
    "--fp16 --loss-scale 8 --hysteresis 3": "--hysteresis is for a scale that adapts, and --loss-scale 8.0 fixes it",
    "--fp16 --initial-loss-scale 1e39": "--initial-loss-scale 1e+39 must be above 0 and below 1e+38",
    "--fp16 --min-loss-scale 8 --initial-loss-scale 4": "--min-loss-scale 8 is above --initial-loss-scale 4",
    "--ignore-forward-tensor-parallel": "--ignore-forward-tensor-parallel needs --forward-backward-disaggregating",
    "--use-dpp": "--use-dpp needs --pipeline-model-parallel-size above 1",
    # out of bounds
    "--seed -1": "--seed -1 must be 0 or more and 4294967295 or less",
    "--adam-beta2 1": "--adam-beta2 1.0 must be 0 or more and below 1",
    "--attention-dropout 1.5": "--attention-dropout 1.5 must be 0 or more and below 1",
    "--rotary-percent 0": "--rotary-percent 0.0 must be above 0 and 1 or less",
    "--num-workers -2": "--num-workers -2 must be 0 or more",
    "--ddp-bucket-size 0": "--ddp-bucket-size 0 must be 1 or more",
    "--exit-duration-in-mins 0": "--exit-duration-in-mins 0.0 must be above 0",
    "--eval-iters -1": "--eval-iters -1 must be 0 or more",
    "--trace-capacity 0": "--trace-capacity 0 must be 1 or more",
    # rules between flags
    "--swiglu --openai-gelu": "--openai-gelu and --swiglu are both",
    "--log-interval 0": "--log-interval must be above 0",
    "--eval-interval 0": "--eval-interval must be above 0",
    "--use-rope-scaling": "--use-rope-scaling needs --position-embedding-type rope",
    "--window-size 5,5": "--window-size 5,5: write",
    "--cp-comm-type a2a": "--cp-comm-type needs --context-parallel-size above 1",
    "--vocab-file v": "--vocab-file and --merge-file belong together",
    "--faults []": "--faults needs --trace",
    "--sequence-parallel": "--sequence-parallel needs --tensor-model-parallel-size above 1",
    "--decoupled-min-lr 1e-5": "--decoupled-min-lr needs --decoupled-lr",
    "--weight-decay-incr-style linear --start-weight-decay 0.2 --end-weight-decay 0.1": "weight decay can only grow",
    "--recompute-method uniform": "--recompute-method and --recompute-num-layers need --recompute-granularity full",
    "--group-query-attention --num-query-groups 3": "is not a multiple of --num-query-groups 3",
}
"""Parts of command lines, each with a part of the one sentence that reports it."""
_MISTAKEN_FLAG = re.compile(r"--[a-z][\w-]*")


def _apart(drawn: list[str]) -> list[str]:
    """Return the mistakes whose flags are in the sentence of no other one: one wrong flag silences rules that name
    it."""
    names = {mistake: set(_MISTAKEN_FLAG.findall(f"{mistake} {MISTAKES[mistake]}")) for mistake in drawn}
    chosen: list[str] = []
    for mistake in drawn:
        if all(not names[mistake] & names[other] for other in chosen):
            chosen.append(mistake)
    return chosen


@given(
    mistakes=st.lists(st.sampled_from(sorted(MISTAKES)), min_size=1, max_size=12, unique=True).map(_apart),
    before=st.integers(0, 12),
)
def test_every_wrong_flag_of_a_command_line_is_named_once(mistakes: list[str], before: int) -> None:
    arguments = [argument for mistake in mistakes[:before] for argument in mistake.split()]
    arguments += SMALL.split()
    arguments += [argument for mistake in mistakes[before:] for argument in mistake.split()]
    with pytest.raises(UsageError) as caught:
        parse(arguments)
    problems = str(caught.value).splitlines()
    for mistake in mistakes:
        assert sum(MISTAKES[mistake] in problem for problem in problems) == 1, (mistake, problems)
    assert len(problems) == len(mistakes), problems


_ARGUMENTS = st.one_of(
    st.sampled_from(sorted({argument for mistake in MISTAKES for argument in mistake.split()})),
    st.sampled_from(["--", "-", "-h1", "--=", "--lr=", "-5", "--lr=-1", "", "--num-layers", "0", "1e400", "9" * 400]),
    st.text(max_size=8),
)


@given(arguments=st.lists(_ARGUMENTS, max_size=12))
def test_whatever_is_on_a_command_line_is_taken_or_refused(arguments: list[str]) -> None:
    with contextlib.suppress(UsageError):
        try:
            parse([*SMALL.split(), *arguments])
        except SystemExit as stopped:  # -h prints the help
            assert stopped.code == 0
            assert any(argument.startswith(("-h", "--h")) for argument in arguments)


def test_all_missing_flags_are_reported_together() -> None:
    with pytest.raises(UsageError) as caught:
        parse(["--mock-data", "--vocab-size", "128"])
    missing = [problem.split()[0] for problem in str(caught.value).splitlines()]
    assert missing == [
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--seq-length",
        "--micro-batch-size",
        "--lr",
        "--train-iters",
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-query-groups 0", "--num-query-groups must be 1 or more"),
        ("--num-layers-per-virtual-pipeline-stage 0", "--num-layers-per-virtual-pipeline-stage must be 1 or more"),
        ("--num-virtual-stages-per-pipeline-rank 0", "into 2 stages of 0 chunks"),
    ],
)
def test_sizes_of_nothing_are_refused(flags: str, message: str) -> None:
    assert message in refusal(f"--pipeline-model-parallel-size 2 {flags}")


@pytest.mark.parametrize(
    "flags",
    [
        "--use-flash-attn",
        "--attention-backend auto",
        "--attention-backend flash",
        "--attention-backend fused",
        "--no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-persist-layer-norm",
        "--no-gradient-accumulation-fusion --cross-entropy-loss-fusion --cuda-graph-impl none",
        "--attention-backend local --transformer-impl local",
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer",
        "--tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt",
        "--log-timers-to-tensorboard --log-validation-ppl-to-tensorboard --log-memory-to-tensorboard",
        "--use-mcore-models --no-masked-softmax-fusion --no-rope-fusion --no-barrier-with-level-1-timing",
        "--dataloader-type single --use-dist-ckpt --auto-detect-ckpt-format --dist-ckpt-format torch_dist",
        "--ckpt-fully-parallel-save --ckpt-fully-parallel-load --ckpt-assume-constant-structure --rerun-mode disabled",
    ],
)
def test_flags_that_nearly_every_script_has_are_taken(flags: str) -> None:
    parsed(flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--use-flash-attn --transformer-impl local", "--use-flash-attn and --transformer-impl local exclude each"),
        ("--attention-backend local", "needs --transformer-impl local"),
        ("--attention-backend unfused", "invalid choice: 'unfused'"),
        (
            "--attention-backend fused --transformer-impl local",
            "--attention-backend fused and --transformer-impl local",
        ),
        (
            "--cuda-graph-impl local --context-parallel-size 2",
            "cannot be combined with --context-parallel-size above 1",
        ),
        ("--cuda-graph-impl transformer_engine", "invalid choice: 'transformer_engine'"),
        ("--tokenizer-type NullTokenizer", "give --vocab-size N + 1"),
        ("--tokenizer-type SentencePieceTokenizer --tokenizer-model t.model", "give --tokenizer-file tokenizer.json"),
        (
            "--tokenizer-type HuggingFaceTokenizer --vocab-file vocab.json --merge-file merges.txt",
            "--vocab-file exclude each other",
        ),
        ("--dataloader-type cyclic", "invalid choice: 'cyclic'"),
        ("--fp8-format hybrid", "invalid choice: 'hybrid'"),
        ("--loss-scale 1024", "add --fp16"),
        ("--hysteresis 3", "add --fp16"),
        ("--use-rotary-position-embeddings", "give --position-embedding-type rope"),
        ("--pipeline-model-parallel-layout Et*4|L", "--decoder-first-pipeline-num-layers"),
        ("--data-parallel-random-init", "leave it out: all replicas begin with the same weights"),
        ("--trace-granularity full", "need --trace"),
        ("--trace --trace-granularity all", "invalid choice: 'all'"),
        ("--trace --trace-dir out --use-dpp --pipeline-model-parallel-size 2", "no place for virtual pipeline stages"),
        ("--trace --trace-interval 5 --forward-backward-disaggregating", "write --trace-granularity base"),
    ],
)
def test_flags_whose_meaning_differs_get_an_answer_each(flags: str, message: str) -> None:
    assert message in refusal(flags)
