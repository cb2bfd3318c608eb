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
from megatronapp_common.scope.protocol import Tensor, build_frame
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
from megatronapp_trainer.serve.scope.capture_gateway import CaptureController

pytestmark = pytest.mark.torch
RunRanks = Callable[..., list[Any]]
GROUPED = VARIANTS["rotary-grouped"]
OTHER = "ba9876543210"


class Opened:
    """One rank with an engine, a session and a leader."""

    def __init__(self, layout: Any, device: Any, variant: str = GROUPED) -> None:
        config = config_of(variant)
        self.model = model_of(config, layout, device)
        self.gang, engine = open_engine(self.model, config, layout, device)
        assert engine is not None
        self.engine = engine
        self.sent = Sent()
        self.session = StepCapture(self.gang.stage, attempt=0, sink=self.sent.post)
        self.session.attach(self.gang)
        self.leader = CaptureCoordinator(engine, self.session, self.sent.post)
        self.plain = plain_of(self.model, config)

    def begin(self, capture: CaptureSettings, run: str = RUN, **fields: Any) -> None:
        wanted = [GenerationRequest(**{**_fields(one), **fields}) for one in requests()]
        for request in self.leader.begin_run(run, capture, wanted):
            self.engine.submit(request)

    def parts(self, run: str = RUN) -> list[Frame]:
        frames = [decode(data) for data in self.sent.frames()]
        return [one for one in frames if one.type == FrameType.SCOPE_PART and one.header.get("run") == run]

    def hooks(self) -> int:
        return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in self.model.modules())

    def truth(self, events: list[Event], sample: int, run: str = RUN) -> dict[str, Any]:
        prompt = requests()[sample].prompt
        named = f"{run}-{sample}"
        tokens = [one.token for one in events if isinstance(one, TokenEvent) and one.request_id == named]
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
        for looks in (False, True, False):
            if looks:
                opened.begin(CaptureSettings(), logits=True)
            else:
                for request in requests():
                    same_way = {"logits": True, "group": "unseen"}
                    opened.engine.submit(GenerationRequest(**{**_fields(request), **same_way}))
            events = opened.engine.step()
            hooks.append(opened.hooks())
            opened.leader.observe(events)
            events += observed(opened.engine, opened.leader)
            logits.append([one.logits for one in events if isinstance(one, TokenEvent)])
        hooks.append(opened.hooks())
        same = all(torch.equal(a, b) for pair in zip(*logits, strict=True) for a, b in itertools.pairwise(pair))
        return same and len(logits[0]) > 0, hooks


@pytest.mark.parametrize("variant", ["learned-tied", "rotary-tied-window"])
def test_outputs_are_the_same_bits(run_ranks: RunRanks, variant: str) -> None:
    ((same, hooks),) = run_ranks(1, seen_and_unseen, VARIANTS[variant])
    assert same
    assert hooks[0] == hooks[1] == hooks[3] == hooks[4] == 0
    assert hooks[2] > 0


def changed() -> tuple[dict[int, set[str]], dict[int, set[str]], int]:
    """Change a run to lite after three steps, in parallel with one that captures nothing."""
    with groups_of("") as (layout, device):
        opened = Opened(layout, device)
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
    ((looked, unseen, hooks),) = run_ranks(1, changed)
    measures = {"residual.norm", "residual.change", "residual.cosine", "head.entropy", "head.max", "head.sink"}
    lite = {"q", "k", "v", "mlp2", *measures}
    assert looked == {
        0: lite | {"mlp1", "atlas"},
        1: lite | {"mlp1", "attention"},
        2: lite | {"mlp1", "attention"},
        3: lite,
        4: lite,
        5: lite,
    }
    assert unseen == {step: set() for step in range(6)}
    assert hooks == 0


def beside_each_other() -> list[bool]:
    """Two runs of other filters at once, with other prompts between: each has its own numbers."""
    with groups_of("") as (layout, device):
        opened = Opened(layout, device)
        captures = {
            RUN: CaptureSettings.model_validate({"expression": {"qkv": "data.max()"}, "pixels": {"qkv": 24}}),
            OTHER: CaptureSettings.model_validate({"rotary": "before", "pixels": {"qkv": 12}}),
        }
        opened.engine.submit(GenerationRequest(id="unseen", prompt=prompts((4,))[0], max_new_tokens=9))
        for run, capture in captures.items():
            wanted = opened.leader.begin_run(run, capture, requests()[:1])
            opened.engine.submit(wanted[0])
        events = observed(opened.engine, opened.leader)
        out = []
        for run, site in ((RUN, "q"), (OTHER, "q before")):
            truth = opened.truth(events, 0, run)[site].reshape(-1, 4, 64)
            pieces = [
                piece for part in opened.parts(run) for piece in shard_tensors_of(part, 0) if piece.tensor.name == "q"
            ]
            table = merge(pieces)
            wanted_rows = truth.reshape(len(truth), 4, 8, 8).max(-1) if run == RUN else pooled(truth, 4)
            out.append(np.allclose(table.data, wanted_rows, rtol=1e-4, atol=1e-5))
        return out


def unseen_between() -> list[str]:
    """Capture a prompt of several chunks, and between them decode a sequence without a capture."""
    with groups_of("") as (layout, device):
        opened = Opened(layout, device)
        opened.engine.submit(GenerationRequest(id="unseen", prompt=prompts((4,))[0], max_new_tokens=9))
        for _ in range(3):
            opened.leader.observe(opened.engine.step())
        wanted = GenerationRequest(id="x", prompt=prompts((40,))[0], max_new_tokens=2)
        opened.engine.submit(*opened.leader.begin_run(RUN, CaptureSettings(), [wanted]))
        events = observed(opened.engine, opened.leader)
        return [event.reason for event in events if isinstance(event, FinishedEvent)]


def test_runs_beside_each_other(run_ranks: RunRanks) -> None:
    assert run_ranks(1, beside_each_other) == [[True, True]]
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
        pieces = [piece for part in opened.parts(OTHER) for piece in shard_tensors_of(part, 0) if piece.rows[0][0] == 0]
        last = {piece.rows: piece for piece in pieces if piece.tensor.name == "last"}
        rows = [row for piece in last.values() for row in piece.rows if row[0] == 0]
        wanted = np.sqrt(pooled(np.square(truth["final_norm"]), 2))
        found = merge([piece for piece in pieces if piece.tensor.name == "last"])
        mine = [place for place, row in enumerate(found.rows) if row[0] == 0]
        frames = [decode(data) for data in opened.sent.frames()]
        exact = [one for one in frames if one.header.get("probe") == probe]
        (piece,) = [piece for one in exact for piece in shard_tensors_of(one, 0)]
        names = {piece.tensor.name for piece in pieces}
        opened.sent.jobs[:0] = sent
        return [
            len(rows) > 5,
            np.allclose(found.data[mine], wanted, rtol=1e-4, atol=1e-5),
            {"normed.mean", "normed.absmax", "last", "mlp1"} <= names,
            "q" not in names,
            piece.layers == (1, 2) and piece.tensor.data.shape == (3, 2, 64),
        ]


def test_sites_of_people_s_own(run_ranks: RunRanks) -> None:
    assert run_ranks(1, own_sites) == [[True] * 5]


def refused() -> list[str]:
    """Return the errors for what cannot be captured."""
    with groups_of("") as (layout, device):
        opened = Opened(layout, device)
        leader, told = opened.leader, []
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
                lambda one=one: leader.begin_run(RUN, CaptureSettings.model_validate(one), requests())
                for one in captures
            ),
            *(lambda one=one: leader.probe(ProbeRequest.model_validate(one)) for one in probes),
            lambda: leader.set_basis(build_frame(FrameType.SCOPE_BASIS, {"version": 1, "layers": [0]}, tensors)),
            lambda: leader.set_basis(Frame(FrameType.SCOPE_BASIS, {"version": 1})),
        ]
        for call in calls:
            with pytest.raises((CaptureError, FilterError)) as caught:
                call()
            told.append(str(caught.value))
        assert not opened.engine.is_busy
        opened.engine.submit(requests()[0])
        assert drain(opened.engine)
        return told


def test_what_cannot_be_looked_at_is_refused_before_it_begins(run_ranks: RunRanks) -> None:
    (told,) = run_ranks(1, refused)
    wanted = [
        "pinned.0: there is no layer 4",
        "",
        "there is no site 'nowhere'; sites: embedding",
        "k has 4 layers and 2 heads",
        "there is nothing to read",
        "does not fit 1 layers of 64 numbers",
        "a basis has version, layers",
    ]
    for text, part in zip(told, wanted, strict=True):
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
        reasons = [str(one.reason) for one in events if isinstance(one, FinishedEvent)]
        told = [decode(data) for data in opened.sent.frames()]
        tokens: list[Any] = [
            (frame.header["step"], frame.header["rows"], frame.header["finished"])
            for frame in told
            if frame.type == FrameType.SCOPE_TOKENS
        ]
        assert begun and all(begun)
        return reasons, tokens, opened.hooks(), _in_order(opened)


def _steps(opened: Opened, looking: CaptureController) -> None:
    for _ in range(3):
        looking.observe(opened.engine.step())


def _in_order(opened: Opened) -> list[str]:
    """Check that tokens of a run that are ready before its first state has been reported wait for it."""
    looking = CaptureController(opened.leader)
    before = len(opened.sent.jobs)
    with looking.quiet():
        for request in looking.begin(OTHER, CaptureSettings(preset="off"), requests(1), [0, 0, 0], None):
            opened.engine.submit(request)
        other = threading.Thread(target=_steps, args=(opened, looking))
        other.start()
        while not opened.engine.is_busy:
            pass
        looking.announce({"run": OTHER, "state": "queued"})
    other.join()
    frames = [frame for job in opened.sent.jobs[before:] for frame in job.build()]
    names = {FrameType.SCOPE_TOKENS: "tokens", FrameType.SCOPE_RUN_STATE: "state"}
    return [names[FrameType(frame.type)] for frame in frames if frame.type in names]


def test_a_run_that_is_cancelled_in_its_prefill_tells_what_came_and_ends(run_ranks: RunRanks) -> None:
    ((reasons, tokens, hooks, order),) = run_ranks(1, cancelled_in_prefill)
    assert (reasons, tokens, hooks) == (["cancelled"] * 3, [(0, [[0, 2]], ["cancelled"])], 0)
    assert order == ["state", "tokens"]


def told_of(opened: Opened, run: str, **fields: Any) -> list[tuple[dict[str, Any], bytes]]:
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
        whole, short = told_of(opened, runs[0]), told_of(opened, runs[1], max_new_tokens=1)
        opened.session._deferred.set_scheduler(opened.gang.idle_window.defer)
        same = [told_of(opened, runs[2]) == whole, told_of(opened, runs[3], max_new_tokens=1) == short]
        probe, reading = opened.leader.probe(
            ProbeRequest.model_validate({"ids": [requests()[0].prompt], "sites": [{"site": "q", "layers": [1]}]})
        )
        opened.engine.submit(reading[0])
        observed(opened.engine, opened.leader)
        opened.engine.step()
        frames = [decode(data) for data in opened.sent.frames()]
        probed = [frame for frame in frames if frame.header.get("probe") == probe]
        return [*same, len(whole) > 6, len(short) > 0, len(probed) == 1, opened.hooks() == 0]


def test_what_is_put_off_tells_the_same(run_ranks: RunRanks) -> None:
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
