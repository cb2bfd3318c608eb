"""Read hooks: forward hooks that keep the values of sites in one step, for all layers of this rank.

A hook launches no kernel where all tokens of a step are wanted (decode steps, which may be CUDA graphs): it keeps the
tensor that the module gave, and one kernel stacks all layers when the step is over. If some rows are wanted (prompts),
it copies only these, so that no layer's full activation lives longer than without capture. Where megatron-core would
add the residual into a tensor in place, the hook marks it as one that wants a gradient, and the sum is written to other
memory: the same sum of the same two numbers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from megatronapp_trainer.hooks.sites import Retention, Site, modules_of

Layers = frozenset[int] | None
"""Numbers of layers in the whole model; None: all of this rank."""


@dataclasses.dataclass(kw_only=True)
class SiteValues:
    """Values of a site in this step, by layer; layer -1 for a site without layers."""

    values: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    biases: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)


class HookCollector:
    """The read hooks on one model. They stay until `set_sites` gets another set of sites."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._sites: Mapping[str, Site] = {}
        self._handles: list[Any] = []
        self._values: dict[str, SiteValues] = {}
        self._rows: dict[str, torch.Tensor | None] = {}
        self._layers: Mapping[str, Layers] = {}
        self._found: dict[Site, list[tuple[int, torch.nn.Module | None]]] = {}
        """Modules of sites, by layer: finding them takes longer than hooking them."""

    @property
    def names(self) -> frozenset[str]:
        """Sites that are hooked."""
        return frozenset(self._sites)

    def set_sites(self, sites: Mapping[str, Site]) -> None:
        """Read these sites and no others from the next step on. Raises CaptureError for one that the model lacks."""
        if sites is self._sites or sites == self._sites:
            self._sites = sites
            return
        self.remove()
        for site in sites.values():
            self._install(site)
        self._sites = sites

    def remove(self) -> None:
        """Remove all hooks, so that the model computes as before."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._sites = {}
        self._values.clear()

    def begin(self, rows: Mapping[str, torch.Tensor | None], layers: Mapping[str, Layers]) -> None:
        """Begin a step.

        `rows`: tokens of each site, as an index on the device, or None for all; a site without an entry is not kept.
        `layers`: layers of each site, all without an entry.
        """
        self._values = {}
        self._rows, self._layers = dict(rows), layers

    def layers(self, name: str) -> list[int]:
        """Return the kept layers of a site, in order; [-1] for one without layers, [] for one on another rank."""
        return sorted(self._values[name].values) if name in self._values else []

    def stacked(self, name: str) -> torch.Tensor:
        """Stack the values of a site: [layers, rows, ..], biases added; [1, rows, ..] for a site without layers."""
        site_values = self._values[name]
        order = sorted(site_values.values)
        values = torch.stack([site_values.values[layer] for layer in order])
        if not site_values.biases:
            return values
        biases = torch.stack([site_values.biases[layer] for layer in order])
        return values + biases.view(len(order), *[1] * (values.dim() - 1 - biases.dim() + 1), *biases.shape[1:])

    def take(self) -> dict[str, SiteValues]:
        """Return all kept values and keep them no more."""
        values, self._values = self._values, {}
        return values

    def put(self, values: dict[str, SiteValues]) -> None:
        """Keep values that were taken again."""
        self._values = values

    def _install(self, site: Site) -> None:
        if site not in self._found:
            self._found[site] = modules_of(site, self._model)
        for number, module in self._found[site]:
            if module is not None:
                self._handles.append(self._hook(site, number, module))

    def _hook(self, site: Site, layer: int, module: torch.nn.Module) -> Any:  # noqa: ANN401 - torch's handle
        def keep(_module: object, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:  # noqa: ANN401
            layers = self._layers.get(site.name)
            if site.name not in self._rows or (layers is not None and layer not in layers):
                return None
            self._keep(site, layer, site.take((*args, *kwargs.values()), output))
            return _guarded(output) if site.retention is Retention.GUARDED and self._rows[site.name] is None else None

        return module.register_forward_hook(keep, with_kwargs=True)

    def _keep(self, site: Site, layer: int, taken: Any) -> None:  # noqa: ANN401 - Taken
        value, bias = taken if isinstance(taken, tuple) else (taken, None)
        rows = self._rows[site.name]
        if rows is not None:
            value = value.index_select(0, rows)
        elif site.retention is Retention.COPIED:
            value = value.clone()
        site_values = self._values.setdefault(site.name, SiteValues())
        site_values.values[layer] = value
        if bias is not None:
            site_values.biases[layer] = bias.detach()  # a perturbation may give the parameter other values later


def _guarded(output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    """The same memory, which megatron-core then leaves as it is."""
    value, bias = output
    return value.detach().requires_grad_(), bias
