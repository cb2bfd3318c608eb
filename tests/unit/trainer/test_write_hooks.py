"""Write hooks replace the value of a site; without one, or with one that returns None, every bit is as before."""

import dataclasses

import pytest
import torch

from megatronapp_trainer.hooks.errors import CaptureError
from megatronapp_trainer.hooks.hook_collector import HookCollector
from megatronapp_trainer.hooks.interventions import WriteHook, WriteHooks
from megatronapp_trainer.hooks.sites import STAGE_INPUT, site_of

pytestmark = pytest.mark.torch
WIDTH, TOKENS, LAYERS = 8, 5, 3


class Linear(torch.nn.Linear):
    """Layer that returns the bias separately, as layers of megatron-core do."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return hidden @ self.weight.t(), self.bias


class PlainLayer(torch.nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.mlp = torch.nn.Module()
        self.mlp.linear_fc2 = Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        value, bias = self.mlp.linear_fc2(hidden)  # type: ignore[operator] # a module
        return hidden + (value + bias), None


class PlainModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList(PlainLayer(number + 1) for number in range(LAYERS))

    @torch.no_grad()
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.decoder.layers:  # type: ignore[union-attr] # a list of modules
            hidden, _ = layer(hidden)
        return hidden


@dataclasses.dataclass
class Run:
    output: torch.Tensor
    captured: torch.Tensor


def run(site: str, hook: WriteHook | None) -> Run:
    model, hidden = PlainModel(), torch.linspace(-1, 1, TOKENS * WIDTH).view(TOKENS, 1, WIDTH)
    collector, writes = HookCollector(model), WriteHooks(model)
    collector.set_sites({site: site_of(site)})
    if hook is not None:
        writes.add(site_of(site), hook)
    collector.begin({site: None}, {})
    return Run(model(hidden), collector.stacked(site))


@pytest.mark.parametrize("site", ["mlp2", "residual"])
def test_a_hook_that_returns_none_changes_no_bit(site: str) -> None:
    plain, hooked = run(site, None), run(site, lambda _value, _layer: None)
    assert torch.equal(plain.output, hooked.output)
    assert torch.equal(plain.captured, hooked.captured)


@pytest.mark.parametrize("site", ["mlp2", "residual"])
def test_a_replacement_takes_effect_and_is_what_read_hooks_get(site: str) -> None:
    plain, hooked = run(site, None), run(site, lambda value, layer: value * 2 if layer == 1 else None)
    assert torch.equal(hooked.captured[0], plain.captured[0])
    assert torch.equal(hooked.captured[1], plain.captured[1] * 2)
    assert not torch.equal(hooked.output, plain.output)


def test_a_replacement_by_the_same_value_changes_no_bit() -> None:
    plain, hooked = run("mlp2", None), run("mlp2", lambda value, _layer: value.clone())
    assert torch.equal(plain.output, hooked.output)


def test_removed_hooks_leave_no_trace() -> None:
    model, hidden = PlainModel(), torch.ones(TOKENS, 1, WIDTH)
    before, writes = model(hidden), WriteHooks(model)
    writes.add(site_of("mlp2"), lambda value, _layer: torch.zeros_like(value))
    assert torch.equal(model(hidden), hidden)
    writes.remove()
    assert torch.equal(model(hidden), before)


def test_wrong_shapes_and_sites_that_can_only_be_read_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"layer 0: the hook returned shape \(2, 8\); return \(5, 8\)"):
        run("mlp2", lambda value, _layer: value[:2])
    with pytest.raises(CaptureError, match="can only be read"):
        WriteHooks(PlainModel()).add(STAGE_INPUT, lambda value, _layer: value)
