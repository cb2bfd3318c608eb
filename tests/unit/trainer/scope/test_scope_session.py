"""Runs that begin, change and end in parallel with others; sites of users; a model that is unchanged afterwards."""

import itertools
import pathlib
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from capturing_ranks import RUN, Sent, observed, pooled, requests
from generating_ranks import VARIANTS, config_of, drain, groups_of, model_of, open_engine, plain_of, prompts
from plain_sites import SeenGpt

from megatronapp_analyzer.scope.parts.merge import merge, shard_tensors_of
from megatronapp_common.errors import FilterError
from megatronapp_common.frames import Frame, FrameType, decode
from megatronapp_common.scope.perturbation.recipe import Recipe
from megatronapp_common.scope.protocol import Tensor, build_frame, unpack
from megatronapp_common.scope.protocol_requests import CaptureSettings, ProbeRequest
from megatronapp_trainer.hooks.errors import CaptureError
from megatronapp_trainer.hooks.sites import (
    BUILT_IN,
    RESERVED,
    ShardAxis,
    forget_site,
    known_sites,
    register_site,
    site_of,
)
from megatronapp_trainer.inference.events import Event, FinishedEvent, TokenEvent
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.scope.capture.step_capture import StepCapture
from megatronapp_trainer.scope.coordinator import CaptureCoordinator
from megatronapp_trainer.serve.scope.capture_controller import CaptureController

pytestmark = pytest.mark.torch
RunRanks = Callable[..., list[Any]]
GROUPED = VARIANTS["rotary-grouped"]
OTHER = "ba9876543210"


class Opened:
    """One rank with an engine, a session and a leader."""

    def __init__(
        self, layout: Any, device: Any, variant: str = GROUPED, *, is_ahead: bool = True, slots: int = 4
    ) -> None:
        config = config_of(variant)
        self.model = model_of(config, layout, device)
        self.gang, engine = open_engine(self.model, config, layout, device, async_scheduling=is_ahead, slots=slots)
        assert engine is not None
        self.engine = engine
        self.sent = Sent()
        self.session = StepCapture(self.gang.runner, attempt=0, sink=self.sent.post)
        self.session.attach(self.gang)
        self.leader = CaptureCoordinator(engine, self.session, self.sent.post)
        self.plain = plain_of(self.model, config)

    def begin(self, capture: CaptureSettings, run: str = RUN, **fields: Any) -> None:
        generation_requests = [GenerationRequest(**{**_fields(request), **fields}) for request in requests()]
        for request in self.leader.begin_run(run, capture, generation_requests):
            self.engine.submit(request)

    def parts(self, run: str = RUN) -> list[Frame]:
        frames = [decode(data) for data in self.sent.frames()]
        return [frame for frame in frames if frame.type == FrameType.SCOPE_PART and frame.header.get("run") == run]

    def hooks(self) -> int:
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in self.model.modules())

    def truth(self, events: list[Event], sample: int, run: str = RUN) -> dict[str, Any]:
        prompt = requests()[sample].prompt
        named = f"{run}-{sample}"
        tokens = [event.token for event in events if isinstance(event, TokenEvent) and event.request_id == named]
        return SeenGpt(self.plain._weights, self.plain._shape).sites([*prompt, *tokens[:-1]])


def _fields(request: GenerationRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__dataclass_fields__}


def names_by_step(parts: list[Frame]) -> dict[int, set[str]]:
    out: dict[int, set[str]] = {}
    for part in parts:
        found = {tensor["n"] for tensor in part.header["tensors"]}
        out.setdefault(part.header["step"], set()).update(found)
    return out


def seen_and_unseen(variant: str) -> tuple[bool, list[int]]:
    """Return whether logits are the same bits, and the hooks before, during and after."""
    with groups_of("") as (layout, device):
        opened = Opened(layout, device, variant)
        hooks = [opened.hooks()]
        logits = []
        for capturing in (False, True, False):
            if capturing:
                opened.begin(CaptureSettings(), logits=True)
            else:
                for request in requests():
                    same_way = {"logits": True, "group": "unseen"}
                    opened.engine.submit(GenerationRequest(**{**_fields(request), **same_way}))
            events = opened.engine.step()
            hooks.append(opened.hooks())
            opened.leader.observe(events)
            events += observed(opened.engine, opened.leader)
            logits.append([event.logits for event in events if isinstance(event, TokenEvent)])
        hooks.append(opened.hooks())
        same = all(torch.equal(a, b) for pair in zip(*logits, strict=True) for a, b in itertools.pairwise(pair))
        return same and len(logits[0]) > 0, hooks


@pytest.mark.full("kinds of models", but=("rotary-tied-window",))
@pytest.mark.parametrize("variant", ["learned-tied", "rotary-tied-window"])
def test_outputs_are_the_same_bits(run_ranks: RunRanks, variant: str) -> None:
    ((same, hooks),) = run_ranks(1, seen_and_unseen, VARIANTS[variant])
    assert same
    assert hooks[0] == hooks[1] == hooks[3] == hooks[4] == 0
    assert hooks[2] > 0


def reported(stop: int | None, *, is_ahead: bool) -> tuple[list[tuple[int, list[Any]]], list[int]]:
    """Return the steps and rows of a run's parts, and the tokens of its first sample, which one of them may end."""
    with groups_of("") as (layout, device):
        opened = Opened(layout, device, is_ahead=is_ahead)
        sent = requests()
        stops = () if stop is None else ((stop,),)
        sent[0] = GenerationRequest(**{**_fields(sent[0]), "stop_tokens": stops})
        for request in opened.leader.begin_run(RUN, CaptureSettings(), sent):
            opened.engine.submit(request)
        events = observed(opened.engine, opened.leader)
        opened.engine.step()  # the end of the run is a command
        tokens = [event.token for event in events if isinstance(event, TokenEvent) and event.request_id == f"{RUN}-0"]
        return [(part.header["step"], part.header["rows"]) for part in opened.parts()], tokens


def reported_both() -> list[Any]:
    _, tokens = reported(None, is_ahead=False)
    stop = next(token for place, token in enumerate(tokens) if place >= 2 and token not in tokens[:place])
    return [reported(stop, is_ahead=is_ahead) for is_ahead in (False, True)]


def test_steps_ahead_report_no_row_of_a_request_that_has_ended(run_ranks: RunRanks) -> None:
    ((expected, found),) = run_ranks(1, reported_both)
    assert found == expected
    assert len({len(rows) for step, rows in found[0] if step}) == 2  # one sample went on alone


def perturbed(recipe: Recipe, counts: dict[int, int], slots: int) -> list[dict[Any, np.ndarray]]:
    """Return the tensors of a perturbed run, with steps that are launched ahead and without.

    `counts`: tokens to generate of each of the requests that are its samples. Another request with the recipe waits
    for a slot if there are no more of them.
    """
    found = []
    with groups_of("") as (layout, device):
        for is_ahead in (False, True):
            opened = Opened(layout, device, VARIANTS["learned-tied"], is_ahead=is_ahead, slots=slots)
            source = torch.Generator().manual_seed(7)
            for name, parameter in opened.model.named_parameters():
                if name.endswith("bias"):
                    parameter.data.copy_(torch.randn(parameter.shape, generator=source))
            samples = [
                GenerationRequest(**{**_fields(requests()[place]), "perturbation": recipe, "max_new_tokens": count})
                for place, count in counts.items()
            ]
            opened.engine.submit(*opened.leader.begin_run(RUN, CaptureSettings(), samples))
            opened.engine.submit(GenerationRequest(id="other", prompt=(5, 6), max_new_tokens=3, perturbation=recipe))
            observed(opened.engine, opened.leader)
            opened.engine.step()
            found.append(
                {
                    (part.header["step"], str(part.header["rows"]), tensor.name): np.array(tensor.data)
                    for part in opened.parts()
                    for tensor in unpack(part)
                }
            )
    return found


def perturbation(**fields: Any) -> Recipe:
    return Recipe.model_validate({"seed": 1, "perturbations": [fields]})


ZERO = {"type": "zero"}


@pytest.mark.parametrize(
    ("recipe", "counts", "slots"),
    [
        pytest.param(
            perturbation(kind="calculation", site="mlp2", layers=[0], action=ZERO), {0: 5, 2: 12}, 2, id="slot"
        ),
        pytest.param(
            perturbation(kind="storage", parameter="mlp.linear_fc1", tensor="bias", action=ZERO), {0: 6}, 4, id="bias"
        ),
    ],
)
def test_steps_ahead_are_captured_with_their_own_keys_and_weights(
    run_ranks: RunRanks, recipe: Recipe, counts: dict[int, int], slots: int
) -> None:
    ((expected, found),) = run_ranks(1, perturbed, recipe, counts, slots)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_array_equal(found[key], values, err_msg=str(key))


def changed() -> tuple[dict[int, set[str]], dict[int, set[str]], int]:
    """Change a run to lite after three steps, in parallel with one that captures nothing."""
    with groups_of("") as (layout, device):
        opened = Opened(layout, device, is_ahead=False)
        opened.begin(CaptureSettings.model_validate({"pinned": [{"layer": 0, "head": 0}]}))
        opened.leader.observe(opened.engine.step())
        while max(names_by_step(opened.parts()), default=0) < 2:
            opened.leader.observe(opened.engine.step())
        opened.leader.change(RUN, CaptureSettings(preset="lite"))
        observed(opened.engine, opened.leader)
        opened.begin(CaptureSettings(preset="off"), run=OTHER)
        observed(opened.engine, opened.leader)
        return names_by_step(opened.parts()), names_by_step(opened.parts(OTHER)), opened.hooks()


def test_captures_change_at_the_next_step(run_ranks: RunRanks) -> None:
    ((captured, unseen, hooks),) = run_ranks(1, changed)
    measures = {"residual.norm", "residual.change", "residual.cosine", "head.entropy", "head.max", "head.sink"}
    lite = {"q", "k", "v", "mlp2", *measures}
    assert captured == {
        0: lite | {"mlp1", "atlas"},
        1: lite | {"mlp1", "attention"},
        2: lite | {"mlp1", "attention"},
        3: lite,
        4: lite,
        5: lite,
    }
    assert unseen == {step: set() for step in range(6)}
    assert hooks == 0


def concurrent_runs() -> list[bool]:
    """Two runs of other filters at once, with other prompts between: each has its own numbers."""
    with groups_of("") as (layout, device):
        opened = Opened(layout, device)
        captures = {
            RUN: CaptureSettings.model_validate({"expression": {"qkv": "data.max()"}, "pixels": {"qkv": 24}}),
            OTHER: CaptureSettings.model_validate({"rotary": "before", "pixels": {"qkv": 12}}),
        }
        opened.engine.submit(GenerationRequest(id="unseen", prompt=prompts((4,))[0], max_new_tokens=9))
        for run, capture in captures.items():
            accepted = opened.leader.begin_run(run, capture, requests()[:1])
            opened.engine.submit(accepted[0])
        events = observed(opened.engine, opened.leader)
        out = []
        for run, site in ((RUN, "q"), (OTHER, "q before")):
            truth = opened.truth(events, 0, run)[site].reshape(-1, 4, 64)
            shards = [
                shard for part in opened.parts(run) for shard in shard_tensors_of(part, 0) if shard.tensor.name == "q"
            ]
            table = merge(shards)
            expected_rows = truth.reshape(len(truth), 4, 8, 8).max(-1) if run == RUN else pooled(truth, 4)
            out.append(np.allclose(table.data, expected_rows, rtol=1e-4, atol=1e-5))
        return out


def unseen_between() -> list[str]:
    """Capture a prompt of several chunks, and between them decode a sequence without a capture."""
    with groups_of("") as (layout, device):
        opened = Opened(layout, device)
        opened.engine.submit(GenerationRequest(id="unseen", prompt=prompts((4,))[0], max_new_tokens=9))
        for _ in range(3):
            opened.leader.observe(opened.engine.step())
        request = GenerationRequest(id="x", prompt=prompts((40,))[0], max_new_tokens=2)
        opened.engine.submit(*opened.leader.begin_run(RUN, CaptureSettings(), [request]))
        events = observed(opened.engine, opened.leader)
        return [event.reason for event in events if isinstance(event, FinishedEvent)]


def test_concurrent_runs_are_captured_separately(run_ranks: RunRanks) -> None:
    assert run_ranks(1, concurrent_runs) == [[True, True]]
    assert run_ranks(1, unseen_between) == [["length", "length"]]


def own_sites() -> list[bool]:
    """A site by its path, one by a predicate: in steps and in probes."""
    with groups_of("") as (layout, device):
        opened = Opened(layout, device)
        opened.begin(CaptureSettings(preset="off"), max_new_tokens=2)
        observed(opened.engine, opened.leader)
        register_site("normed", "input_layernorm", reducers=("mean", "absmax"), pixels=4)
        register_site(
            "last",
            lambda path, _module: path == "decoder.final_layernorm",
            per_layer=False,
            reducers=("rms",),
            pixels=2,
        )
        sent, opened.sent.jobs[:] = list(opened.sent.jobs), []
        opened.begin(CaptureSettings.model_validate({"states": {"qkv": False, "attention": False}}), run=OTHER)
        events = observed(opened.engine, opened.leader)
        probe, reading = opened.leader.probe(
            ProbeRequest.model_validate(
                {"ids": [requests()[0].prompt], "sites": [{"site": "normed", "layers": [1, 2]}]}
            )
        )
        opened.engine.submit(reading[0])
        observed(opened.engine, opened.leader)
        forget_site("normed")
        forget_site("last")
        truth = opened.truth(events, 0, OTHER)
        shards = [shard for part in opened.parts(OTHER) for shard in shard_tensors_of(part, 0) if shard.rows[0][0] == 0]
        last = {shard.rows: shard for shard in shards if shard.tensor.name == "last"}
        rows = [row for shard in last.values() for row in shard.rows if row[0] == 0]
        expected = np.sqrt(pooled(np.square(truth["final_norm"]), 2))
        found = merge([shard for shard in shards if shard.tensor.name == "last"])
        mine = [place for place, row in enumerate(found.rows) if row[0] == 0]
        frames = [decode(data) for data in opened.sent.frames()]
        exact = [frame for frame in frames if frame.header.get("probe") == probe]
        (own,) = [own for frame in exact for own in shard_tensors_of(frame, 0)]
        names = {shard.tensor.name for shard in shards}
        opened.sent.jobs[:0] = sent
        return [
            len(rows) > 5,
            np.allclose(found.data[mine], expected, rtol=1e-4, atol=1e-5),
            {"normed.mean", "normed.absmax", "last", "mlp1"} <= names,
            "q" not in names,
            own.layers == (1, 2) and own.tensor.data.shape == (3, 2, 64),
        ]


def test_plugin_sites_are_captured(run_ranks: RunRanks) -> None:
    assert run_ranks(1, own_sites) == [[True] * 5]


def refused() -> list[str]:
    """Return the errors for what cannot be captured."""
    with groups_of("") as (layout, device):
        opened = Opened(layout, device)
        leader, refusals = opened.leader, []
        hidden = np.zeros((1, 8, 3), "<f4")
        tensors = [Tensor("mean", "f32", hidden[0, :1]), Tensor("basis", "f32", hidden)]
        captures = [{"pinned": [{"layer": 4, "head": 0}]}, {"pixels": {"qkv": 768}, "expression": {"qkv": "data[3]"}}]
        probes: list[dict[str, Any]] = [
            {"ids": [[1]], "sites": [{"site": "nowhere", "layers": [0]}]},
            {"ids": [[1]], "sites": [{"site": "k", "layers": [0], "heads": [2]}]},
            {"ids": [[]], "sites": []},
        ]
        calls: list[Callable[[], object]] = [
            *(
                lambda document=document: leader.begin_run(RUN, CaptureSettings.model_validate(document), requests())
                for document in captures
            ),
            *(lambda document=document: leader.probe(ProbeRequest.model_validate(document)) for document in probes),
            lambda: leader.set_basis(build_frame(FrameType.SCOPE_BASIS, {"version": 1, "layers": [0]}, tensors)),
            lambda: leader.set_basis(Frame(FrameType.SCOPE_BASIS, {"version": 1})),
        ]
        for call in calls:
            with pytest.raises((CaptureError, FilterError)) as caught:
                call()
            refusals.append(str(caught.value))
        assert not opened.engine.is_busy
        opened.engine.submit(requests()[0])
        assert drain(opened.engine)
        return refusals


def test_impossible_captures_are_refused_before_they_begin(run_ranks: RunRanks) -> None:
    (refusals,) = run_ranks(1, refused)
    expected = [
        "pinned.0: there is no layer 4",
        "",
        "there is no site 'nowhere'; sites: embedding",
        "k has 4 layers and 2 heads",
        "there is nothing to read",
        "does not fit 1 layers of 64 numbers",
        "a basis has version, layers",
    ]
    for text, part in zip(refusals, expected, strict=True):
        assert part in text


def cancelled_in_prefill() -> tuple[list[str], list[Any], int, list[str]]:
    """Cancel a run when its first prompt has been read alone; return also what is reported while another begins."""
    with groups_of("") as (layout, device):
        opened = Opened(layout, device)
        opened.begin(CaptureSettings(), max_new_tokens=2)
        opened.leader.observe(opened.engine.step())
        begun = [part.header["more"] for part in opened.parts()]
        assert opened.engine.is_busy
        for sample in range(3):
            opened.engine.cancel(f"{RUN}-{sample}")
        events = observed(opened.engine, opened.leader)
        reasons = [str(event.reason) for event in events if isinstance(event, FinishedEvent)]
        sent = [decode(data) for data in opened.sent.frames()]
        tokens: list[Any] = [
            (frame.header["step"], frame.header["rows"], frame.header["finished"])
            for frame in sent
            if frame.type == FrameType.SCOPE_TOKENS
        ]
        assert begun and all(begun)
        return reasons, tokens, opened.hooks(), _in_order(opened)


def _steps(opened: Opened, controller: CaptureController, stepped: threading.Event) -> None:
    for _ in range(3):
        events = opened.engine.step()
        stepped.set()
        controller.observe(events)


def _in_order(opened: Opened) -> list[str]:
    """Check that tokens of a run that are ready before its first state has been reported wait for it."""
    controller = CaptureController(opened.leader)
    before = len(opened.sent.jobs)
    with controller.quiet():
        for request in controller.begin(OTHER, CaptureSettings(preset="off"), requests(1), [0, 0, 0], None):
            opened.engine.submit(request)
        other = threading.Thread(target=_steps, args=(opened, controller, stepped := threading.Event()))
        other.start()
        stepped.wait()
        controller.announce({"run": OTHER, "state": "queued"})
    other.join()
    frames = [frame for job in opened.sent.jobs[before:] for frame in job.build()]
    names = {FrameType.SCOPE_TOKENS: "tokens", FrameType.SCOPE_RUN_STATE: "state"}
    return [names[FrameType(frame.type)] for frame in frames if frame.type in names]


def test_a_run_cancelled_in_its_prefill_sends_its_rows_and_ends(run_ranks: RunRanks) -> None:
    ((reasons, tokens, hooks, order),) = run_ranks(1, cancelled_in_prefill)
    assert (reasons, tokens, hooks) == (["cancelled"] * 3, [(0, [[0, 2]], ["cancelled"])], 0)
    assert order == ["state", "tokens"]


def frames_of_run(opened: Opened, run: str, **fields: Any) -> list[tuple[dict[str, Any], bytes]]:
    """Return the reports of parts of a run, in order. Another run in between has a prompt that takes a slot that is
    free again."""
    capture = CaptureSettings.model_validate({"pinned": [{"layer": 0, "head": 1}], "expression": {"qkv": "data.max()"}})
    opened.begin(capture, run=run, **fields)
    observed(opened.engine, opened.leader)
    opened.engine.submit(GenerationRequest(id=f"unseen {run}", prompt=prompts((40,))[0], max_new_tokens=2))
    observed(opened.engine, opened.leader)
    dropped = {"run", "timeUs"}
    return [
        ({key: value for key, value in part.header.items() if key not in dropped}, bytes(part.body))
        for part in opened.parts(run)
    ]


def put_off() -> list[bool]:
    """Check as on a GPU: deferred work of steps is done in idle windows. The same is reported."""
    with groups_of("") as (layout, device):
        opened = Opened(layout, device)
        runs = [f"{number:012x}" for number in range(4)]
        whole, short = frames_of_run(opened, runs[0]), frames_of_run(opened, runs[1], max_new_tokens=1)
        opened.session._deferred.set_scheduler(opened.gang.idle_window.defer)
        same = [frames_of_run(opened, runs[2]) == whole, frames_of_run(opened, runs[3], max_new_tokens=1) == short]
        probe, reading = opened.leader.probe(
            ProbeRequest.model_validate({"ids": [requests()[0].prompt], "sites": [{"site": "q", "layers": [1]}]})
        )
        opened.engine.submit(reading[0])
        observed(opened.engine, opened.leader)
        opened.engine.step()
        frames = [decode(data) for data in opened.sent.frames()]
        probed = [frame for frame in frames if frame.header.get("probe") == probe]
        return [*same, len(whole) > 6, len(short) > 0, len(probed) == 1, opened.hooks() == 0]


def test_deferred_captures_send_the_same_frames(run_ranks: RunRanks) -> None:
    assert run_ranks(1, put_off) == [[True] * 6]


def test_sites_cannot_have_the_names_of_tensors_that_frames_have_anyway() -> None:
    protocol = (pathlib.Path(__file__).parents[4] / "docs" / "scope-protocol.md").read_text()
    table = protocol[protocol.index("Tensors of STEP") : protocol.index("Rows of STEP 0")]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = {name.partition(".")[0] for cell in cells for name in re.findall("`([^`]+)`", cell)}
    assert names - BUILT_IN.keys() == RESERVED - {"atlas", "pinned"}
    for name in names | RESERVED:
        with pytest.raises(CaptureError, match=f"site '{name}': .*write another"):
            register_site(name, "mlp")


def test_names_of_sites() -> None:
    for name in ("q", "attention", "two words", ""):
        with pytest.raises(CaptureError, match="write another name"):
            register_site(name, "mlp")
    with pytest.raises(FilterError):
        register_site("mine", "mlp", reducers=("data.nothing()",))
    assert "mine" not in known_sites()
    register_site("mine", "mlp", axis=ShardAxis.FEATURES)
    try:
        assert site_of("mine").axis is ShardAxis.FEATURES
        with pytest.raises(CaptureError, match="not taken"):
            register_site("mine", "mlp")
    finally:
        forget_site("mine")
