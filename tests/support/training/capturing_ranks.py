"""Ranks that generate while their sites are captured, for tests: what each sends, and what plain torch computes."""

import dataclasses
import functools
from typing import Any

import numpy as np
import torch
from generating_ranks import config_of, drain, generated, groups_of, model_of, open_engine, plain_of, prompts
from plain_sites import SeenGpt

from megatronapp_common.frames import Frame, FrameType, decode, encode
from megatronapp_common.scope.protocol import Tensor, build_frame, unpack
from megatronapp_common.scope.protocol_requests import CaptureSettings, ProbeRequest
from megatronapp_trainer.inference.events import Event
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.scope.capture.commands import SetBasis
from megatronapp_trainer.scope.capture.step_capture import StepCapture
from megatronapp_trainer.scope.coordinator import CaptureCoordinator
from megatronapp_trainer.scope.transfer.publisher import FrameJob, PartNumberer

RUN = "0123456789ab"
LENGTHS = (3, 21, 9)
NEW = 6
CAPTURE: dict[str, Any] = {
    "pixels": {"qkv": 24, "mlp": 16},
    "pinned": [{"layer": 1, "head": 2}, {"layer": 3, "head": 0}],
    "candidates": 5,
}
PROBED = (
    "embedding",
    "q",
    "k",
    "v",
    "head_output",
    "attention_output",
    "mlp_in",
    "mlp1",
    "mlp2",
    "residual",
    "final_norm",
    "logits",
)
BASIS_LAYERS = [0, 2, 3]


def basis_frame(hidden: int) -> Frame:
    """Some axes for some layers."""
    source = torch.Generator().manual_seed(3)
    mean = torch.randn(len(BASIS_LAYERS), hidden, generator=source).numpy()
    axes = torch.randn(len(BASIS_LAYERS), 8, hidden, generator=source).numpy()
    tensors = [Tensor("mean", "f32", mean), Tensor("basis", "f32", axes)]
    return build_frame(FrameType.SCOPE_BASIS, {"version": 1, "layers": BASIS_LAYERS}, tensors)


@functools.cache
def large_basis() -> SetBasis:
    """Return a basis of 32 layers of 4,096 numbers: 4.5 MiB, more than any part may have; decoded from a frame."""
    axes = np.arange(32 * 8 * 4096, dtype="<f4").reshape(32, 8, 4096)
    tensors = [Tensor("mean", "f32", axes[:, 0].copy()), Tensor("basis", "f32", axes)]
    data = encode(build_frame(FrameType.SCOPE_BASIS, {"version": 1, "layers": list(range(32))}, tensors))
    mean, found = (tensor.data for tensor in unpack(decode(data)))
    return SetBasis(version=1, layers=tuple(range(32)), mean=np.array(mean), axes=np.array(found))


def same_basis(left: SetBasis, right: SetBasis) -> bool:
    """Compare two bases bit by bit."""
    return left.layers == right.layers and left.axes.tobytes() + left.mean.tobytes() == right.axes.tobytes() + (
        right.mean.tobytes()
    )


@dataclasses.dataclass
class Sent:
    """Values that a rank passes to its publisher."""

    jobs: list[FrameJob] = dataclasses.field(default_factory=list)
    _numbers: PartNumberer = dataclasses.field(default_factory=PartNumberer)
    _built: dict[FrameJob, list[bytes]] = dataclasses.field(default_factory=dict)

    def post(self, job: FrameJob) -> None:
        self.jobs.append(job)

    def frames(self) -> list[bytes]:
        return [data for job in self.jobs for data in self._frames(job)]

    def _frames(self, job: FrameJob) -> list[bytes]:
        if job not in self._built:
            frames = [frame for part in job.split() for frame in part.build()]
            self._built[job] = list(map(self._encoded, frames))
        return self._built[job]

    def _encoded(self, frame: Frame) -> bytes:
        data = encode(self._numbers.numbered(frame))
        self._numbers.commit(frame)
        return data


def requests(count: int = NEW) -> list[GenerationRequest]:
    return [
        GenerationRequest(id=f"{RUN}-{sample}", prompt=prompt, max_new_tokens=count, temperature=0)
        for sample, prompt in enumerate(prompts(LENGTHS))
    ]


def capture(
    flags: str, variants: dict[str, str], change: dict[str, Any] | None = None
) -> dict[str, tuple[list[bytes], dict[str, list[int]] | None, dict[str, str]]]:
    """Return on every rank the frames of each variant, its tokens and the ids of its probes (rank 0)."""
    out = {}
    with groups_of(flags) as (layout, device):
        for name, variant in variants.items():
            config = config_of(f"{flags} {variant}")
            out[name] = _capture_single(model_of(config, layout, device), config, layout, device, change or {})
    return out


def _capture_single(model: Any, config: Any, layout: Any, device: Any, change: dict[str, Any]) -> Any:
    gang, engine = open_engine(model, config, layout, device)
    sent = Sent()
    session = StepCapture(gang.runner, attempt=0, sink=sent.post)
    session.attach(gang)
    hello = encode(session.hello())
    received: list[SetBasis] = []
    gang.handle("large", received.append)
    if engine is None:
        gang.follow()
        assert [same_basis(basis, large_basis()) for basis in received] == [True]
        return [hello, *sent.frames()], None, {}
    leader = CaptureCoordinator(engine, session, sent.post)
    engine.command("large", large_basis())
    leader.set_basis(basis_frame(config.model.hidden_size))
    settings = CaptureSettings.model_validate(CAPTURE | change)
    for request in leader.begin_run(RUN, settings, requests(), text_of=lambda token: f"<{token}>"):
        engine.submit(request)
    events = observed(engine, leader)
    tokens = {request.id: generated(events, request.id) for request in requests()}
    probes = {} if change else probe_all(engine, leader, tokens)
    engine.close()
    return [hello, *sent.frames()], tokens, probes


def observed(engine: Any, leader: CaptureCoordinator) -> list[Event]:
    """Step until nothing is open, as a server does."""
    events: list[Event] = []
    while engine.is_busy:
        step = engine.step()
        leader.observe(step)
        events += step
    engine.step()
    return events


def probe_all(engine: Any, leader: CaptureCoordinator, tokens: dict[str, list[int]]) -> dict[str, str]:
    """One probe for each site, of all rows of all samples; every second row of some rows of attention."""
    ids = [[*request.prompt, *tokens[request.id][:-1]] for request in requests()]
    layers = [0, 1, 2, 3]
    probes: dict[str, dict[str, Any]] = {site: {"sites": [{"site": site, "layers": layers}]} for site in PROBED}
    for site in ("q", "k"):
        probes[f"{site} before"] = {"sites": [{"site": site, "layers": layers, "rotary": "before"}]}
    probes["attention"] = {"sites": [{"site": "attention", "layers": [1, 3], "heads": [0, 1, 3]}]}
    probes["attention codes"] = {
        "sites": [{"site": "attention", "layers": [2], "heads": [2], "code": "u8s"}],
        "queries": [2, 7],
        "stride": 2,
    }
    found = {}
    for name, sites in probes.items():
        found[name], reading = leader.probe(ProbeRequest.model_validate({"ids": ids, **sites}))
        for request in reading:
            engine.submit(request)
        observed(engine, leader)
    return found


def reference(variants: dict[str, str], tokens: dict[str, dict[str, list[int]]]) -> dict[str, list[dict[str, Any]]]:
    """Alone: all sites of every sample, by plain torch."""
    out = {}
    with groups_of("") as (layout, device):
        for name, variant in variants.items():
            config = config_of(variant)
            plain = plain_of(model_of(config, layout, device), config)
            seen = SeenGpt(plain._weights, plain._shape)
            out[name] = [seen.sites([*request.prompt, *tokens[name][request.id][:-1]]) for request in requests()]
    return out


def plain_tokens(flags: str, variants: dict[str, str]) -> dict[str, dict[str, list[int]]]:
    """Return what is generated without a capture, and whether MegaScope was imported."""
    import sys

    out = {}
    with groups_of(flags) as (layout, device):
        for name, variant in variants.items():
            config = config_of(f"{flags} {variant}")
            gang, engine = open_engine(model_of(config, layout, device), config, layout, device)
            assert engine is not None
            for request in requests():
                engine.submit(request)
            events = drain(engine)
            engine.close()
            out[name] = {request.id: generated(events, request.id) for request in requests()}
            hooked = [
                module for module in gang.runner.model.modules() if module._forward_hooks or module._forward_pre_hooks
            ]
            assert hooked == []
    return out | {"modules": {name: [] for name in sys.modules if name.startswith("megatronapp_trainer.scope")}}


def pooled(vectors: np.ndarray, pixels: int) -> np.ndarray:
    """Means of equal pieces of the last axis."""
    return np.asarray(vectors.reshape(*vectors.shape[:-1], pixels, -1).mean(-1))
