"""Divergence from parts of a vocabulary, the order of branches, and the cells of a sweep. Pure."""

import asyncio
import itertools
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.scope.comparison_requests import ComparisonRequest, SweepRequest
from megatronapp_common.scope.perturbation.recipe import Recipe, RecipeError, parse_recipe
from megatronapp_common.scope.protocol_requests import SamplingSettings
from megatronapp_common.web.problems import HttpError
from megatronapp_trainer.hooks.forward_observer import ComparedRow
from megatronapp_trainer.inference.events import FinishedEvent, TokenEvent
from megatronapp_trainer.inference.patch_sources import SourceCache
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.inference.scheduler import Scheduler, Sequence
from megatronapp_trainer.scope.comparison.comparison_service import BranchText
from megatronapp_trainer.scope.comparison.row_results import RowResult
from megatronapp_trainer.scope.comparison.shard_divergence import Divergence, merged, shard_part
from megatronapp_trainer.serve.perturbation.named_recipes import ServedPerturbations
from megatronapp_trainer.serve.scope import comparisons, sweeps
from megatronapp_trainer.serve.scope.comparisons import ComparisonStore
from megatronapp_trainer.serve.scope.sweep_cells import SweepCells, cell_value
from megatronapp_trainer.serve.scope.sweeps import SweepStore

pytestmark = pytest.mark.torch
LOGIT = st.floats(-30, 30, width=32)
NOISE: dict[str, Any] = {"kind": "calculation", "site": "mlp2", "action": {"type": "gaussian", "coefficient": 1.0}}
RECIPE = parse_recipe({"perturbations": [NOISE]})


def divergence_of(a: list[float], b: list[float], edges: list[int], token: int) -> Divergence:
    """Merge the parts between the edges."""
    first, second = torch.tensor(a), torch.tensor(b)
    bounds = [0, *sorted(edge % (len(a) + 1) for edge in edges), len(a)]
    parts = [
        shard_part(first[low:high], second[low:high], torch.tensor([token - low]), second[token : token + 1])
        for low, high in itertools.pairwise(bounds)
    ]
    return merged(torch.stack(parts).numpy())


@given(
    pairs=st.lists(st.tuples(LOGIT, LOGIT), min_size=1, max_size=40),
    edges=st.lists(st.integers(0, 100), max_size=4),
    token=st.integers(0, 39),
)
def test_parts_of_a_vocabulary_give_the_divergence_of_all(
    pairs: list[tuple[float, float]], edges: list[int], token: int
) -> None:
    a, b = map(list, zip(*pairs, strict=True))
    token %= len(a)
    found = divergence_of(a, b, edges, token)
    logs_a, logs_b = (torch.tensor(logits, dtype=torch.float64).log_softmax(0) for logits in (a, b))
    assert found.kl == pytest.approx(float((logs_a.exp() * (logs_a - logs_b)).sum()), abs=1e-9)
    assert found.rank == sum(logit > b[token] for logit in b)
    assert found.logprob_a == pytest.approx(float(logs_a[token]), abs=1e-9)
    assert found.logprob_b == pytest.approx(float(logs_b[token]), abs=1e-9)
    assert divergence_of(a, a, edges, token).kl == 0.0


def test_logits_that_are_not_numbers_give_no_divergence() -> None:
    assert np.isnan(divergence_of([0.0, 1.0], [float("nan"), 1.0], [1], 0).kl)


def steps_of(
    scheduler: Scheduler, choices: dict[str, list[int]]
) -> list[tuple[tuple[str, ...], tuple[ComparedRow, ...]]]:
    """Plan steps until nothing is due; each request chooses the tokens of its list."""
    done = []
    while scheduler.next_admissible():
        scheduler.admit(None)
    while (step := scheduler.plan()) is not None:
        done.append((tuple(segment.request_id for segment in step.plan.segments), step.plan.compared))
        for segment in step.plan.segments:
            next(mine for mine in scheduler.running if mine.slot == segment.slot).read = segment.end
        for row in step.rows:
            advance(scheduler, row.sequence, choices)
    return done


def advance(scheduler: Scheduler, sequence: Sequence, choices: dict[str, list[int]]) -> None:
    """Append the next token of a sequence, and release it at its end, as the engine does."""
    sequence.generated.append(sequence.next_token(choices[sequence.request.id][len(sequence.generated)]))
    sequence.ended = sequence.stopped(frozenset())
    if sequence.ended is not None:
        scheduler.release(sequence)


def pair(*, is_forced: bool, recipe: Recipe | None = RECIPE) -> list[GenerationRequest]:
    text = BranchText(name="p", ids=(1, 2, 3), tokens=3, sampling=SamplingSettings(temperature=0.0), seed=0)
    return [text.request(0, None), text.request(1, recipe, is_forced=is_forced)]


@pytest.mark.parametrize("recipe", [RECIPE, None])
def test_branches_alternate_and_have_steps_apart(recipe: Recipe | None) -> None:
    scheduler = Scheduler(slots=4, prefill_chunk=2, most_waiting=9)
    other = GenerationRequest(id="other", prompt=(1,), max_new_tokens=3, temperature=0)
    scheduler.add(other, *pair(is_forced=True, recipe=recipe))
    steps = steps_of(scheduler, {"other": [7, 7, 7], "p-0": [4, 5, 6], "p-1": [4, 9, 6]})
    mine = [ids for ids, _ in steps if ids != ("other",)]
    assert mine == [("p-0",), ("p-1",)] * (len(mine) // 2)
    rows = [row for _, compared in steps for row in compared if row.branch == 1]
    assert [(row.index, row.token) for row in rows] == [(0, 4), (1, 5), (2, 6)]


def test_free_branches_are_compared_until_they_differ() -> None:
    scheduler = Scheduler(slots=2, prefill_chunk=8, most_waiting=9)
    scheduler.add(*pair(is_forced=False))
    steps = steps_of(scheduler, {"p-0": [4, 5, 6], "p-1": [4, 9, 6]})
    assert [row.index for _, compared in steps for row in compared if row.branch == 1] == [0, 1]


def test_a_pair_waits_for_two_slots() -> None:
    scheduler = Scheduler(slots=2, prefill_chunk=8, most_waiting=9)
    scheduler.add(GenerationRequest(id="other", prompt=(1,), max_new_tokens=2, temperature=0), *pair(is_forced=True))
    while scheduler.next_admissible():
        scheduler.admit(None)
    step = scheduler.plan()
    assert step is not None
    assert [segment.request_id for segment in step.plan.segments] == ["other"]


def sweep(**fields: Any) -> SweepRequest:
    axes = fields.pop("axes", {"layers": [0, 2], "strengths": [0.0, 2.5]})
    return SweepRequest.model_validate({"prompt": "a", "template": NOISE, "axes": axes} | fields)


def test_cells_are_recipes_of_layers_and_strengths_or_positions() -> None:
    cells = SweepCells(sweep(seed=5))
    assert [cells.recipe(number).digest for number in range(len(cells))] == [
        parse_recipe(
            {
                "seed": 5,
                "perturbations": [NOISE | {"layers": [layer], "action": NOISE["action"] | {"coefficient": value}}],
            }
        ).digest
        for layer in (0, 2)
        for value in (0.0, 2.5)
    ]
    assert cells.matrix({0: "a", 3: "d"}) == [["a", None], [None, "d"]]
    zero = NOISE | {"action": {"type": "zero"}}
    traced = SweepCells(sweep(template=zero, axes={"layers": [1], "positions": [3]})).recipe(0).perturbations[0]
    assert traced.positions is not None
    assert (traced.positions[0].first, traced.positions[0].end) == (3, 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"template": NOISE | {"action": {"type": "zero"}}}, "template.action.type: zero has no strength"),
        (
            {
                "template": {
                    "kind": "storage",
                    "parameter": "mlp.linear_fc1",
                    "action": {"type": "bitFlip", "bits": "sign", "rate": 0.5},
                },
                "axes": {"layers": [0], "strengths": [0.5, 2]},
            },
            "perturbations.0.action.rate: must be 1 or less",
        ),
        (
            {
                "template": {"kind": "storage", "parameter": "mlp.linear_fc1", "action": {"type": "zero"}},
                "axes": {"layers": [0], "positions": [1]},
            },
            "perturbations.0: positions means nothing for storage",
        ),
    ],
)
def test_a_value_that_the_template_cannot_have_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        [*map(SweepCells(body := sweep(**fields)).recipe, SweepCells(body).edges)]


def test_cells_do_not_copy_a_large_template() -> None:
    body = sweep(
        template=NOISE | {"action": {"type": "mean", "values": [0.5] * 1000}},
        axes={"layers": [0, 1], "positions": [0, 1]},
    )
    cells = SweepCells(body)
    for number in range(len(cells)):
        assert cells.recipe(number).perturbations[0].action.values is body.template.action.values


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("store_type", "most"), [(ComparisonStore, comparisons.MAX_OPEN), (SweepStore, sweeps.MAX_OPEN)]
)
async def test_simultaneous_requests_do_not_pass_the_limit(store_type: Any, most: int) -> None:
    shard = SimpleNamespace(num_layers=1, num_heads=1)
    service = SimpleNamespace(shard=shard, check=nothing, begin=nothing, end=nothing)
    broker = SimpleNamespace(
        submit=lambda requests: SimpleNamespace(ids=[mine.id for mine in requests], get=asyncio.Event().wait)
    )
    model = SimpleNamespace(
        check_tokens=nothing, perturbations=ServedPerturbations(), ids_of=lambda _: (1,), vocab_size=9, tokenizer=None
    )
    store = store_type(service, broker)
    body = sweep() if store_type is SweepStore else ComparisonRequest(prompt="a", perturbation=RECIPE)
    found = await asyncio.gather(*(store.start(body, model) for _ in range(most + 2)), return_exceptions=True)
    assert [str(error) for error in found if isinstance(error, HttpError)] == [
        f"{most} {'sweeps' if store_type is SweepStore else 'comparisons'} are open already"
    ] * 2
    for task in store._tasks:
        task.cancel()
    await asyncio.gather(*store._tasks, return_exceptions=True)


class SourceReadingRank:
    """Fake broker and service that read sources as an engine does; each branch chooses one token."""

    def __init__(self) -> None:
        self.encoded: list[tuple[str, int]] = []
        """Texts that were tokenized, and the thread of each."""
        self.prepared: dict[str, int] = {}
        """Thread in which each recipe was prepared first."""
        self.submitted: list[str] = []
        self.sources = SourceCache()
        self.failure: Exception | None = None
        self.sink: Any = nothing

    def encode(self, text: str) -> tuple[int, ...]:
        self.encoded.append((text, threading.get_ident()))
        return (1, 2)

    def prepare(self, recipe: Recipe) -> None:
        self.prepared.setdefault(recipe.digest, threading.get_ident())
        self.sources.get(recipe, self.encode)

    def submit(self, requests: list[GenerationRequest]) -> Any:
        """Answer a request by one token."""
        (request,) = requests
        if request.perturbation is not None:
            self.submitted.append(request.perturbation.digest)
            self.sources.get(request.perturbation, self.encode)
        events = asyncio.Queue[Any]()
        token = TokenEvent(request_id=request.id, index=0, token=3, logprob=0.0, candidates=(), text=None, logits=None)
        events.put_nowait(token)
        ended = FinishedEvent(request_id=request.id, reason="length", prompt_tokens=1, generated_tokens=1)
        events.put_nowait(ended)
        return SimpleNamespace(ids=[request.id], get=events.get)

    def collect(self, _name: str, _number: int) -> None:
        """Pass an empty list of rows to the sweep."""
        if self.failure is not None:
            raise self.failure
        self.sink(0, [])

    def store(self) -> SweepStore:
        """Return the sweeps of this rank."""
        service: Any = SimpleNamespace(
            check=lambda recipe, _: recipe and self.sources.get(recipe, self.encode),
            begin=lambda _, sink: setattr(self, "sink", sink),
            collect=self.collect,
            end=nothing,
        )
        broker: Any = SimpleNamespace(submit=self.submit)
        return SweepStore(service, broker)

    def model(self) -> Any:
        """Return a model whose engine prepares recipes."""
        return SimpleNamespace(
            check_tokens=nothing,
            perturbations=ServedPerturbations(prepare=self.prepare),
            ids_of=lambda _: (1,),
            vocab_size=9,
            tokenizer=None,
        )


async def swept(rank: SourceReadingRank, body: SweepRequest) -> sweeps.SweepRecord:
    """Run a sweep to its end."""
    store = rank.store()
    record = store._get(await store.start(body, rank.model()))
    await asyncio.gather(*store._tasks)
    return record


@pytest.mark.asyncio
async def test_a_text_is_tokenized_once_in_a_sweep_and_not_in_the_event_loop() -> None:
    rank = SourceReadingRank()
    patch = NOISE | {"action": {"type": "patch", "source": {"prompt": "b"}}}
    axes = {"layers": [0, 1, 2], "positions": [0, 1, 2]}
    record = await swept(rank, sweep(template=patch, axes=axes, metric="firstDivergence"))
    assert (record.state, record.error, len(record.values)) == ("done", None, 9)
    assert [text for text, _ in rank.encoded] == ["b"]
    assert set(rank.submitted) == set(rank.prepared)
    loop_thread = threading.get_ident()
    assert loop_thread not in {thread for _, thread in rank.encoded} | set(rank.prepared.values())


@pytest.mark.asyncio
async def test_a_sweep_that_fails_reports_an_error(caplog: pytest.LogCaptureFixture) -> None:
    rank = SourceReadingRank()
    rank.failure = ZeroDivisionError("of the test")
    record = await swept(rank, sweep())
    assert (record.state, record.error and record.error["code"]) == ("failed", "sweep-failed")
    assert "ZeroDivisionError" in caplog.text


def nothing(*_arguments: object) -> None:
    """Do nothing, in place of a method that the test does not need."""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"axes": {"layers": [0]}}, "one of strengths and positions must be given"),
        ({"axes": {"layers": list(range(40)), "strengths": [0.1] * 40}}, "the sweep has 1600 cells"),
        ({"token": 3}, "token means nothing for meanKl"),
        ({"template": NOISE | {"layers": [1]}}, "template: layers is given by the axes"),
    ],
)
def test_a_wrong_sweep_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sweep(**fields)


def test_values_of_cells() -> None:
    rows = [
        RowResult(
            branch=1,
            index=index,
            divergence=Divergence(kl=kl, rank=0, logprob_a=-1.0, logprob_b=-1.5 - index),
            drift=None,
            heads=None,
        )
        for index, kl in enumerate((0.5, 1.5))
    ]
    assert cell_value("meanKl", rows, [1, 2], [1, 3]) == 1.0
    assert cell_value("logprobChange", rows, [1, 2], [1, 3]) == -0.5
    assert cell_value("firstDivergence", rows, [1, 2], [1, 3]) == 1
    assert cell_value("firstDivergence", rows, [1, 2], [1, 2]) is None
