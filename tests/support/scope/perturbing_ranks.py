"""Ranks that generate with perturbations, for tests: recipes, requests, and readers of sites."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from generating_ranks import drain, prompts

from megatronapp_common.scope.perturbation.recipe import Recipe, parse_recipe
from megatronapp_trainer.hooks.sites import modules_of, site_of
from megatronapp_trainer.inference.engine import Engine
from megatronapp_trainer.inference.events import Event, PromptEvent, TokenEvent
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.inference.step_plan import StepPlan
from megatronapp_trainer.inference.worker_group import WorkerGroup

PROMPTS = prompts((12, 7))
NEW = 5
GAUSSIAN = {"type": "gaussian", "coefficient": 1.0}
Values = dict[tuple[str, int, int, int], torch.Tensor]
"""Values of sites, by site, layer, sample and position."""


def recipe(*perturbations: dict[str, Any], seed: int = 0) -> Recipe:
    return parse_recipe({"seed": seed, "perturbations": list(perturbations)})


def calculation(site: str, action: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"kind": "calculation", "site": site, "action": action, **fields}


def storage(parameter: str, action: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"kind": "storage", "parameter": parameter, "action": action, **fields}


def noise_alone(site: str) -> list[dict[str, Any]]:
    """Replace a site by noise: the value that is read there is the noise itself."""
    return [calculation(site, {"type": "zero"}), calculation(site, GAUSSIAN)]


def request(name: str, perturbation: Recipe | None = None, **fields: Any) -> GenerationRequest:
    given: dict[str, Any] = {"prompt": PROMPTS[0], "max_new_tokens": NEW, "temperature": 0, "logits": True} | fields
    return GenerationRequest(id=name, perturbation=perturbation, **given)


def samples(
    perturbation: Recipe | None, texts: Sequence[tuple[int, ...]] = PROMPTS[:1], new: int = NEW
) -> list[GenerationRequest]:
    """One request for each text, numbered as samples."""
    return [
        request(f"run-{sample}", perturbation, prompt=text, sample=sample, max_new_tokens=new, logits=False)
        for sample, text in enumerate(texts)
    ]


def run(engine: Engine, *requests: GenerationRequest) -> list[Event]:
    engine.submit(*requests)
    return drain(engine)


def logits_of(events: list[Event], name: str) -> torch.Tensor:
    """Logits of all positions of a request; those of the prompt's last one are in the first token's event."""
    mine = [
        event
        for event in events
        if (isinstance(event, TokenEvent) or (isinstance(event, PromptEvent) and event.target is not None))
        and event.request_id == name
    ]
    return torch.stack([event.logits for event in mine if event.logits is not None])


class SiteReader:
    """Read hooks on this rank's modules of some sites; each token's value is kept."""

    def __init__(self, gang: WorkerGroup, sites: Sequence[str]) -> None:
        self.values: Values = {}
        self._gang = gang
        self._sites = sites

    @contextlib.contextmanager
    def reading(self) -> Iterator[Values]:
        """Read inside the context."""
        handles = [
            module.register_forward_hook(self._hook(name, layer), with_kwargs=True)
            for name in self._sites
            for layer, module in modules_of(site_of(name), self._gang.runner.model)
            if module is not None
        ]
        yield self.values
        for handle in handles:
            handle.remove()

    def _hook(self, name: str, layer: int) -> Any:
        def read(_module: object, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            taken = site_of(name).take((*args, *kwargs.values()), output)
            value, bias = taken if isinstance(taken, tuple) else (taken, None)
            plan = self._gang.runner.plan
            assert plan is not None
            for row, sample, position in rows_of(plan):
                self.values[name, layer, sample, position] = (value if bias is None else value + bias)[row].clone()

        return read


def rows_of(plan: StepPlan) -> Iterator[tuple[int, int, int]]:
    """Yield row, sample and position of each token of a step."""
    first = 0
    for segment in plan.segments:
        sample = int(segment.request_id.rpartition("-")[2])
        for offset in range(len(segment.tokens)):
            yield (segment.slot if plan.decode else first + offset), sample, segment.start + offset
        first += len(segment.tokens)


def read(
    gang: WorkerGroup, engine: Engine | None, sites: Sequence[str], requests: Sequence[GenerationRequest]
) -> Values:
    """Values of sites on this rank while rank 0 generates."""
    with SiteReader(gang, sites).reading() as values:
        if engine is None:
            gang.follow()
        else:
            run(engine, *requests)
            if gang.runner.layout.world_size > 1:
                engine.close()
    return values
