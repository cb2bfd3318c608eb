"""Evaluations on several sets and on whole sets, losses of the corpora of a blend, and flags in files."""

import dataclasses
import json
import pathlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import small_training

RunRanks = Callable[..., list[Any]]

FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 8 --train-iters 3 --lr 1e-3 --eval-iters 2 --hidden-dropout 0 --attention-dropout 0"
)
NEEDED = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --train-iters 1"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with tokenizer.json, and the corpora wiki and code, of different words and sizes."""
    from megatronapp_trainer.data.prepare.prepare import PrepareOptions, prepare

    folder = tmp_path_factory.mktemp("corpora")
    draw = random.Random(5)
    vocabularies = {
        "wiki": ["river", "city", "king", "war"],
        "code": ["def", "return", "import", "class", "self", "None"],
    }
    for name, vocabulary in vocabularies.items():
        count = 40 if name == "wiki" else 25
        texts = [" ".join(draw.choices(vocabulary, k=draw.randint(5, 30))) for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer: dict[str, Any] = {"train_vocab_size": 300}
    for name in vocabularies:
        source, output = str(folder / f"{name}.jsonl"), str(folder / name)
        prepare(PrepareOptions(inputs=(source,), output=output, append_eod=True, **tokenizer))
        tokenizer = {"tokenizer_file": str(folder / "tokenizer.json")}
    return folder


@dataclasses.dataclass
class Evaluations:
    """A reporter that stores the losses of evaluations."""

    found: list[tuple[str, dict[str, float]]] = dataclasses.field(default_factory=list)
    sets: dict[str, float] = dataclasses.field(default_factory=dict)
    losses: list[dict[str, float]] = dataclasses.field(default_factory=list)
    mean: float = 0.0

    def step(self, metrics: Any, **_details: object) -> None:
        self.losses.append(dict(metrics.named_losses))

    def state(self, state: str) -> None: ...

    def validation(self, iteration: int, loss: float, split: str, *, by_name: dict[str, float]) -> None:
        self.found.append((split, dict(by_name)))

    def validation_sets(self, mean: float, by_set: dict[str, float]) -> None:
        self.mean, self.sets = mean, dict(by_set)


def trained(flags: str) -> dict[str, Any]:
    """Train, evaluate at the end, and return what was reported."""
    reporter = Evaluations()
    run = small_training.prepare(flags)
    trainer = small_training.trainer_of(run, reporter=reporter if run.layout.is_reporter else None)
    trainer.train()
    trainer.test()
    return dataclasses.asdict(reporter)


def several(runs: list[str]) -> list[dict[str, Any]]:
    return [trained(flags) for flags in runs]


def replayed(flags: str) -> list[dict[str, Any]]:
    """Train without recordings of passes, and with them."""
    from megatronapp_trainer.pipeline.graphs import choice, recorders

    choice.recorders_of = lambda device, collectives: recorders.RepeatingRecorders(collectives)
    return several([f"{flags} --cuda-graph-impl none", f"{flags} --cuda-graph-impl local"])


def summed_early(runs: list[str]) -> list[dict[str, Any]]:
    """As `several`; reports of an evaluation are summed two at a time."""
    from megatronapp_trainer.training import evaluate

    evaluate._REPORTS = 2
    return several(runs)


def data_flags(corpora: pathlib.Path) -> str:
    wiki, code = (f"{corpora}/{name}_text_document" for name in ("wiki", "code"))
    return (
        f"{FLAGS} --tokenizer-file {corpora}/tokenizer.json --train-data-path 3 {wiki} 1 {code} "
        f"--valid-data-path {wiki} {code}"
    )


@pytest.mark.torch
@pytest.mark.full("a sweep of layouts", but=("TP",))
@pytest.mark.parametrize("layout", [pytest.param("", id="DP"), pytest.param("--tensor-model-parallel-size 2", id="TP")])
def test_sets_and_sources_agree_over_layouts(corpora: pathlib.Path, run_ranks: RunRanks, layout: str) -> None:
    """Whole sets have the losses of their corpora, on any layout; the training is the same to the bit.

    Each loss is a mean over tokens in fp32, whose sums are of another order: 1e-5, relative.
    """
    flags, full = data_flags(corpora), "--full-validation"
    separate = f"{full} --multiple-validation-sets --validation-set-names wiki code"
    (alone,) = run_ranks(1, several, [flags, f"{flags} {separate}", f"{flags} {full} --log-loss-per-source"])
    plain, sets, sources = alone
    assert [step["lm loss"] for step in sources["losses"]] == [step["lm loss"] for step in plain["losses"]]
    assert [split for split, _ in sets["found"]] == ["validation-wiki", "validation-code"]
    assert sets["mean"] == pytest.approx(sum(sets["sets"].values()) / 2)
    ((split, blended),) = sources["found"]
    assert split == "validation"
    for name, loss in sets["sets"].items():
        assert blended[f"lm loss {name}"] == pytest.approx(loss, rel=1e-5)
    assert min(sets["sets"].values()) < blended["lm loss"] < max(sets["sets"].values())
    for step in sources["losses"]:  # all samples have as many tokens: wiki has three of four
        wiki, code = (step[f"lm loss {name}"] for name in ("wiki", "code"))
        assert step["lm loss"] == pytest.approx((3 * wiki + code) / 4, rel=1e-5)
    marked = f"{flags} {separate} --log-loss-per-source"
    together = run_ranks(2, summed_early, [f"{marked} {layout}", f"{flags} --log-loss-per-source {layout}"])
    ((of_sets, of_sources),) = [found for found in together if found[0]["found"]]
    assert of_sets["sets"] == pytest.approx(sets["sets"], rel=1e-4)
    corpora_of_sets = [sorted(losses) for _, losses in of_sets["found"]]
    assert corpora_of_sets == [["lm loss", f"lm loss {name}"] for name in ("wiki", "code")]
    for own, step in zip(of_sources["losses"], sources["losses"], strict=True):
        assert own == pytest.approx(step, rel=1e-4)


@pytest.mark.torch
def test_replayed_passes_report_the_sources_of_their_microbatch(corpora: pathlib.Path, run_ranks: RunRanks) -> None:
    """Each step has other samples of each corpus, which a slot must take over."""
    flags = f"{data_flags(corpora)} --log-loss-per-source --tensor-model-parallel-size 2"
    ((plain, found),) = [runs for runs in run_ranks(2, replayed, flags) if runs[0]["losses"]]
    assert found == plain
    assert all(len(step) == 3 for step in found["losses"])


def read_whole(flags: str) -> tuple[list[list[int]], int, int]:
    """Return the samples whose loss counts in two evaluations of a rank, their tokens, and the batches of each."""
    from megatronapp_trainer.training.build import build_iterators

    run = small_training.prepare(flags)
    (part,) = build_iterators(run.config, run.layout, 0).valid_sets
    microbatches = part.global_batches * run.batches.num_microbatches(0)
    rows, counted = [], 0
    for _ in range(2 * microbatches):
        batch = next(part.iterator)
        for tokens, mask in zip(batch["tokens"].tolist(), batch["loss_mask"], strict=True):
            rows += [tokens] if mask.any() else []
            counted += int(mask.sum())
    return rows, counted, part.global_batches


@pytest.mark.torch
def test_a_whole_set_is_read_once_on_any_number_of_replicas(corpora: pathlib.Path, run_ranks: RunRanks) -> None:
    from megatronapp_trainer.data.corpus_check import inspect_corpus

    flags = f"{data_flags(corpora)} --full-validation"
    ((alone, counted, batches),) = run_ranks(1, read_whole, flags)
    assert len(alone) % 8 != 0, "the last batch is not full"
    prefixes = [f"{corpora}/{name}_text_document" for name in ("wiki", "code")]
    samples = sum((int(inspect_corpus(prefix).lengths.sum()) - 1) // 16 for prefix in prefixes)
    assert alone[:samples] == alone[samples:]
    assert counted == 16 * len(alone)
    assert batches == -(-len(alone) // 2 // 8)
    together = run_ranks(2, read_whole, flags)
    assert sorted(row for rows, _, _ in together for row in rows) == sorted(alone)
    assert {batches for *_, batches in together} == {batches}


def test_values_of_flags_are_read_from_files(tmp_path: pathlib.Path) -> None:
    from megatronapp_trainer.config import parse

    values, splits = tmp_path / "values", tmp_path / "splits.json"
    values.write_text("0.3 a\n0.7 b\n")
    splits.write_text(json.dumps({"train": [0.3, "a", 0.7, "b"], "valid": "c d"}))
    common = [*NEEDED.split(), "--lr", "1", "--vocab-size", "8"]
    assert parse([*common, "--data-args-path", str(values)]).data.data_path == ("0.3", "a", "0.7", "b")
    data = parse([*common, "--per-split-data-args-path", str(splits)]).data
    assert (data.train_data_path, data.valid_data_path, data.test_data_path) == (
        ("0.3", "a", "0.7", "b"),
        ("c", "d"),
        None,
    )


REFUSALS = {
    "--data-args-path {folder}/values --data-path a": "exclude each other",
    "--data-args-path {folder}/none": "cannot be read",
    "--data-args-path {folder}/empty": "is empty",
    "--per-split-data-args-path {folder}/values": "is not valid JSON",
    "--per-split-data-args-path {folder}/list": "must be an object",
    "--per-split-data-args-path {folder}/bad": "valid must be a list of values",
    "--data-path a --multiple-validation-sets": "needs --valid-data-path",
    "--train-data-path a --valid-data-path 1 b 2 c --multiple-validation-sets": "leave 1 2 out",
    "--train-data-path a --valid-data-path b c --validation-set-names x y": "needs --multiple-validation-sets",
    "--train-data-path a --valid-data-path b c --multiple-validation-sets --validation-set-names x": "1 names for",
    "--train-data-path a --valid-data-path b c --multiple-validation-sets --validation-set-names x x": "only once",
    "--data-path 1 a 2 b --full-validation": "without weights",
    "--data-path a --full-validation --eval-iters 0": "--eval-iters 0",
    "--mock-data --full-validation": "has no files",
    "--data-path a --log-loss-per-source --forward-backward-disaggregating": "cannot be combined with",
}


@pytest.mark.parametrize("flags", REFUSALS)
def test_flags_that_exclude_each_other_are_refused(flags: str, tmp_path: pathlib.Path) -> None:
    from megatronapp_trainer.config import parse
    from megatronapp_trainer.errors import UsageError

    files = {"values": "a b", "empty": " \n", "list": "[1]", "bad": json.dumps({"train": ["a"], "valid": [["b"]]})}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    command = f"{NEEDED} --lr 1 --vocab-size 8 {flags.format(folder=tmp_path)}"
    with pytest.raises(UsageError, match=REFUSALS[flags]):
        parse(command.split())
