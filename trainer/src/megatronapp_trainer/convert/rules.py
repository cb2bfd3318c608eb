"""A rule says which tensors of a Hugging Face model make one of ours, and how. Tables of rules are in `families`."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from megatronapp_trainer.convert import tensors
from megatronapp_trainer.convert.shape import Shape

if TYPE_CHECKING:
    import torch

LAYER = "{layer}"
"""Stands in a name of theirs for the number of the layer; ours then has an axis of layers in front."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A tensor of theirs."""

    name: str
    size: Callable[[Shape], tuple[int, ...]]


def _always(_shape: Shape) -> bool:
    return True


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One tensor of ours, out of one or more of theirs."""

    ours: str
    theirs: tuple[Part, ...]
    pack: "Callable[[Sequence[torch.Tensor], Shape], torch.Tensor]" = tensors.same
    unpack: "Callable[[torch.Tensor, Shape], Sequence[torch.Tensor]]" = tensors.split_same
    needed: Callable[[Shape], bool] = _always

    @property
    def layered(self) -> bool:
        """Whether every layer has one."""
        return LAYER in self.theirs[0].name


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A rule applied to one layer, or to the model where the rule is not layered."""

    rule: Rule
    layer: int | None
    names: tuple[str, ...]
    """Of theirs, in full."""

    def pack(self, parts: "Sequence[torch.Tensor]", shape: Shape) -> "torch.Tensor":
        """Our tensor."""
        return self.rule.pack(parts, shape)

    def unpack(self, tensor: "torch.Tensor", shape: Shape) -> "Sequence[torch.Tensor]":
        """Their tensors, in the order of `names`."""
        return self.rule.unpack(tensor, shape)

    def sizes(self, shape: Shape) -> list[tuple[int, ...]]:
        """Sizes of theirs, in the order of `names`."""
        return [part.size(shape) for part in self.rule.theirs]

    def our_size(self, shape: Shape) -> tuple[int, ...]:
        """Size of ours, without the axis of layers; no memory is touched."""
        import torch

        return tuple(self.pack([torch.empty(size, device="meta") for size in self.sizes(shape)], shape).shape)


def steps(rules: Sequence[Rule], shape: Shape, prefix: str) -> Iterator[Step]:
    """Every step of a model, layer after layer, so that what belongs to one layer is read and written together."""
    needed = [rule for rule in rules if rule.needed(shape)]
    for rule in needed:
        if not rule.layered:
            yield _step(rule, None, prefix)
    for layer in range(shape.model.num_layers):
        for rule in needed:
            if rule.layered:
                yield _step(rule, layer, prefix)


def _step(rule: Rule, layer: int | None, prefix: str) -> Step:
    names = (part.name.replace("{prefix}", prefix).replace(LAYER, str(layer)) for part in rule.theirs)
    return Step(rule, layer, tuple(names))
