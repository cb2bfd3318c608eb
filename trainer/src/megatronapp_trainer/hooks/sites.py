"""Sites of a model: the built-in ones of docs/scope-protocol.md, and those of users (docs/scope.md).

    register_site("gate", "mlp.router", take=lambda inputs, output: output, reducers=("absmax",))

All are forward hooks on modules that megatron-core 0.16 or `megatronapp_trainer.inference` has; nothing is replaced.
N tokens of the step, packed.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from megatronapp_common.filters.reducers import parse_reducer
from megatronapp_trainer.hooks.errors import CaptureError

Inputs = tuple[Any, ...]
Taken = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]
"""The numbers, [N, ..], the first axis the tokens; or they and a bias that the module has not added yet."""
Take = Callable[[Inputs, Any], Taken]
"""From what a module was given and what it gave."""
Put = Callable[[Any, torch.Tensor], Any]
"""Output of a module with other numbers, which include the bias: from its output, and those numbers."""
Where = str | Callable[[str, torch.nn.Module], bool]
"""Path below a layer (or below the model), or a predicate of that path and the module, true for one of them."""


class ShardAxis(enum.StrEnum):
    """Along what tensor ranks share the numbers of a site."""

    HEADS = "heads"
    KEY_HEADS = "keyHeads"
    MLP = "mlp"
    """The width of the MLP: of gated ones, gate and up each."""
    FEATURES = "features"
    """Equal parts of the module's output."""
    WHOLE = "whole"
    """Every rank has all of them."""


class Retention(enum.Enum):
    """How a tensor is still there when the step is over."""

    ALIVE = "alive"
    """No module writes into it."""
    GUARDED = "guarded"
    """megatron-core adds the residual into it in evaluation, unless it seems to want a gradient."""
    COPIED = "copied"
    """Not known: it is copied at once."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A place in the model."""

    name: str
    where: Where
    take: Take
    axis: ShardAxis = ShardAxis.WHOLE
    per_layer: bool = True
    retention: Retention = Retention.COPIED
    reducers: tuple[str, ...] = ()
    """Reducers of each step: each gives the tensor `name.reducer`. Captures choose those of built-in sites."""
    pixels: int = 16
    put: Put | None = None
    """Replaces the value, for write hooks; None: the site can only be read."""


def _packed(values: torch.Tensor) -> torch.Tensor:
    """Without the axis of the batch, which megatron-core's modules have second and which is 1 here."""
    return values.squeeze(1)


def _first(_inputs: Inputs, output: Any) -> torch.Tensor:  # noqa: ANN401
    return _packed(output[0] if isinstance(output, tuple) else output)


def _pair(_inputs: Inputs, output: Any) -> Taken:  # noqa: ANN401
    return _packed(output[0]), output[1]


def _hidden(inputs: Inputs, _output: Any) -> torch.Tensor:  # noqa: ANN401
    return _packed(inputs[0])


def _by_head(inputs: Inputs, output: Any) -> torch.Tensor:  # noqa: ANN401
    """Return the output of core attention by head, whose number and width its query has."""
    packed = _packed(output)
    return packed.view(*packed.shape[:-1], *inputs[0].shape[-2:])


def _value(inputs: Inputs, _output: Any) -> torch.Tensor:  # noqa: ANN401
    return _packed(inputs[2])


def _given(place: int) -> Take:
    return lambda inputs, _output: inputs[place]


def _made(place: int) -> Take:
    return lambda _inputs, output: output[place]


def _shaped(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a value in the shape of another; no view if it has that, as outputs of pipeline stages are freed."""
    return value if value.shape == like.shape else value.view_as(like)


def _put_first(output: Any, value: torch.Tensor) -> Any:  # noqa: ANN401
    if isinstance(output, tuple):
        return _shaped(value, output[0]), *output[1:]
    return _shaped(value, output)


def _put_pair(output: Any, value: torch.Tensor) -> Any:  # noqa: ANN401
    """The value includes the bias, which the layer adds later; fused kernels need a bias, so it becomes 0."""
    old, bias = output
    return _shaped(value, old), None if bias is None else torch.zeros_like(bias)


def _put_at(place: int) -> Put:
    return lambda output, value: (*output[:place], _shaped(value, output[place]), *output[place + 1 :])


_ATTENTION = "self_attention.core_attention"
_ROTATION = f"{_ATTENTION}.rotation"
_ALIVE: Mapping[str, Any] = {"retention": Retention.ALIVE}
BUILT_IN = {
    site.name: site
    for site in (
        Site(name="embedding", where="embedding", take=_first, put=_put_first, per_layer=False, **_ALIVE),
        Site(name="q", where=_ROTATION, take=_made(0), put=_put_at(0), axis=ShardAxis.HEADS, **_ALIVE),
        Site(name="k", where=_ROTATION, take=_made(1), put=_put_at(1), axis=ShardAxis.KEY_HEADS, **_ALIVE),
        Site(name="v", where=_ATTENTION, take=_value, axis=ShardAxis.KEY_HEADS, **_ALIVE),
        Site(name="head_output", where=_ATTENTION, take=_by_head, put=_put_first, axis=ShardAxis.HEADS, **_ALIVE),
        Site(
            name="attention_output",
            where="self_attention.linear_proj",
            take=_pair,
            put=_put_pair,
            retention=Retention.GUARDED,
        ),
        Site(name="mlp2", where="mlp.linear_fc2", take=_pair, put=_put_pair, retention=Retention.GUARDED),
        Site(name="mlp_in", where="pre_mlp_layernorm", take=_first, put=_put_first, **_ALIVE),
        Site(name="mlp1", where="mlp.linear_fc1", take=_pair, put=_put_pair, axis=ShardAxis.MLP, **_ALIVE),
        Site(name="residual", where="", take=_first, put=_put_first, **_ALIVE),
        Site(
            name="final_norm", where="decoder.final_layernorm", take=_first, put=_put_first, per_layer=False, **_ALIVE
        ),
        Site(name="logits", where="output_layer", take=_first, put=_put_first, per_layer=False, **_ALIVE),
    )
}
BEFORE_ROTATION = {
    "q": dataclasses.replace(BUILT_IN["q"], name="q before", take=_given(0), put=None),
    "k": dataclasses.replace(BUILT_IN["k"], name="k before", take=_given(1), put=None),
}
STAGE_INPUT = Site(name="stage input", where="decoder.layers.0", take=_hidden, per_layer=False, **_ALIVE)
"""Input of the first layer of this rank: the residual before it."""
ATTENTION = "attention"
"""A site without a module: its numbers are computed again from queries and cached keys."""
RESERVED = frozenset({"atlas", "entropy", "head", "partition", "pca", "pinned", "surprise", "top"})
"""Tensors of frames that belong to no site, or the part of their names before the dot: a site's tensor is called after
the site."""
_registered: dict[str, Site] = {}


def register_site(
    name: str,
    where: Where,
    *,
    take: Take = _first,
    axis: ShardAxis = ShardAxis.WHOLE,
    per_layer: bool = True,
    reducers: Iterable[str] = (),
    pixels: int = 16,
    put: Put | None = None,
) -> Site:
    """Register a site for every run and probe that begins later. Call on every rank.

    Args:
        name: of the site; letters, digits and underscores, none of `RESERVED`.
        where: a path below each layer, such as `mlp.router` (`per_layer`), or below the model; or a predicate.
        take: the numbers, from what the module was given and gave: [N, ..], or a pair of
            them and a bias; by default the (first) output, [N, 1, ..].
        axis: how tensor ranks share them.
        per_layer: each layer has it.
        reducers: reducers of each step (docs/expressions.md), in `pixels` numbers; the first axis is the token.
        pixels: how many.
        put: output of the module with the value replaced, for write hooks; without it the site can only be read,
            unless `take` is the default.

    Raises:
        CaptureError: the name is taken or cannot be one.
        FilterError: a reducer is not one.
    """
    if not (name.isascii() and name.isidentifier()) or name in BUILT_IN or name in {ATTENTION, *_registered}:
        raise CaptureError(
            f"site {name!r}: write another name, of ASCII letters, digits and underscores, that is not taken"
        )
    if name in RESERVED:
        raise CaptureError(f"site {name!r}: captures have a tensor of this name; write another, such as 'my_{name}'")
    for text in (found := tuple(reducers)):
        parse_reducer(text)
    put = _put_first if put is None and take is _first else put
    site = Site(
        name=name, where=where, take=take, axis=axis, per_layer=per_layer, reducers=found, pixels=pixels, put=put
    )
    _registered[name] = site
    return site


def forget_site(name: str) -> None:
    """Take a registered site back. Unknown names are fine."""
    _registered.pop(name, None)


def registered() -> tuple[Site, ...]:
    """Return the sites that users have registered."""
    return tuple(_registered.copy().values())


def known_sites() -> list[str]:
    """Names of all sites."""
    return [*BUILT_IN, ATTENTION, *_registered.copy()]


def site_of(name: str, *, rotary: str = "after") -> Site:
    """A site by its name; `rotary` "before": queries and keys as they are before the turn. Raises CaptureError."""
    if rotary == "before" and name in BEFORE_ROTATION:
        return BEFORE_ROTATION[name]
    site = BUILT_IN.get(name) or _registered.get(name)
    if site is None:
        raise CaptureError(f"there is no site {name!r}; sites: {', '.join(known_sites())}")
    return site


def module_at(site: Site, root: torch.nn.Module) -> torch.nn.Module | None:
    """The module of a site below a layer, or below the model; None where this rank has none.

    Raises CaptureError where a predicate is true for several.
    """
    if isinstance(site.where, str):
        try:
            return root.get_submodule(site.where)
        except AttributeError:
            return None
    found = [(path, module) for path, module in root.named_modules() if site.where(path, module)]
    if len(found) > 1:
        raise CaptureError(f"site {site.name}: its predicate is true for {found[0][0]} and {found[1][0]}; narrow it")
    return found[0][1] if found else None


def modules_of(site: Site, model: Any, *, required: bool = True) -> list[tuple[int, torch.nn.Module | None]]:  # noqa: ANN401 - GPTModel
    """Find the modules of a site, with their layers; layer -1 for a site without layers.

    Raises CaptureError if the module is required, the model has layers, and none of them has such a module.
    """
    roots = [(-1, model)]
    if site.per_layer:
        roots = [(layer.layer_number - 1, layer) for layer in model.decoder.layers]
    found = [(number, module_at(site, root)) for number, root in roots]
    if required and site.per_layer and roots and all(module is None for _, module in found):
        raise CaptureError(f"site {site.name}: no layer of this model has a module {site.where}; check its path")
    return found
