"""Rules that map tensors of a Hugging Face model to one of ours. Tables of rules are in `families`."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from megatronapp_trainer.checkpoint.convert import tensors
from megatronapp_trainer.checkpoint.convert.shape import ModelShape

if TYPE_CHECKING:
    import torch

LAYER = "{layer}"
"""Placeholder for the number of the layer in a name of theirs; ours then has an axis of layers in front."""
EXPERT = "{expert}"
"""Placeholder for the number of the expert in a name of theirs; ours then has an axis of experts."""


@dataclasses.dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of the Hugging Face model."""

    name: str
    size: Callable[[ModelShape], tuple[int, ...]]


def _always(_shape: ModelShape) -> bool:
    return True


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRule:
    """One tensor of ours, out of one or more of theirs."""

    ours: str
    theirs: tuple[SourceTensor, ...]
    pack: "Callable[[Sequence[torch.Tensor], ModelShape], torch.Tensor]" = tensors.same
    unpack: "Callable[[torch.Tensor, ModelShape], Sequence[torch.Tensor]]" = tensors.split_same
    needed: Callable[[ModelShape], bool] = _always

    @property
    def layered(self) -> bool:
        """Return True if every layer has one."""
        return LAYER in self.theirs[0].name


@dataclasses.dataclass(frozen=True, slots=True)
class RuleApplication:
    """A rule applied to one layer, or to the model where the rule is not layered."""

    rule: TensorRule
    layer: int | None
    names: tuple[str, ...]
    """Their names in full."""

    def pack(self, parts: "Sequence[torch.Tensor]", shape: ModelShape) -> "torch.Tensor":
        """Build our tensor from theirs."""
        return self.rule.pack(parts, shape)

    def unpack(self, tensor: "torch.Tensor", shape: ModelShape) -> "Sequence[torch.Tensor]":
        """Return their tensors, in the order of `names`."""
        return self.rule.unpack(tensor, shape)

    def sizes(self, shape: ModelShape) -> list[tuple[int, ...]]:
        """Return the sizes of theirs, in the order of `names`."""
        sizes = [part.size(shape) for part in self.rule.theirs]
        return sizes * (len(self.names) // len(sizes))

    def our_size(self, shape: ModelShape) -> tuple[int, ...]:
        """Return the size of ours, without the axis of layers; allocates no memory."""
        import torch

        return tuple(self.pack([torch.empty(size, device="meta") for size in self.sizes(shape)], shape).shape)


def steps(rules: Sequence[TensorRule], shape: ModelShape, prefix: str) -> Iterator[RuleApplication]:
    """Yield the rules of a model applied layer after layer, so that one layer is read and written together."""
    needed = [rule for rule in rules if rule.needed(shape)]
    for rule in needed:
        if not rule.layered:
            yield _step(rule, shape, None, prefix)
    for layer in range(shape.model.num_layers):
        for rule in needed:
            if rule.layered:
                yield _step(rule, shape, layer, prefix)


def _step(rule: TensorRule, shape: ModelShape, layer: int | None, prefix: str) -> RuleApplication:
    experts = range(shape.model.num_experts or 0) if EXPERT in rule.theirs[0].name else (None,)
    names = (
        part.name.replace("{prefix}", prefix).replace(LAYER, str(layer)).replace(EXPERT, str(expert))
        for expert in experts
        for part in rule.theirs
    )
    return RuleApplication(rule, layer, tuple(names))
