"""Pure functions between the tensors of Hugging Face models and ours. No arithmetic: bits do not change.

G key heads, each with R query heads; D channels of a head; F channels of the MLP; H hidden. A weight [rows, H] and its
bias [rows] are treated alike.
"""

from collections.abc import Sequence

import torch

from megatronapp_trainer.checkpoint.convert.shape import ModelShape

Tensors = Sequence[torch.Tensor]


def same(parts: Tensors, _shape: ModelShape) -> torch.Tensor:
    """Return one tensor unchanged."""
    (tensor,) = parts
    return tensor


def split_same(tensor: torch.Tensor, _shape: ModelShape) -> Tensors:
    """Invert `same`: return one tensor unchanged."""
    return [tensor]


def transposed(parts: Tensors, _shape: ModelShape) -> torch.Tensor:
    """Transpose a weight of GPT-2's Conv1D, [in, out], to ours, [out, in]."""
    (tensor,) = parts
    return tensor.t()


def split_transposed(tensor: torch.Tensor, _shape: ModelShape) -> Tensors:
    """Invert `transposed` for GPT-2's Conv1D."""
    return [tensor.t()]


def padded(parts: Tensors, shape: ModelShape) -> torch.Tensor:
    """Append copies of the last row for the ids that no token has.

    Their logits take part in the softmax of the loss. Rows of zeros would give them the logit 0, which is far above
    those of all tokens in a model such as GPT-2; Megatron's converter copies the last row, too.
    """
    (tensor,) = parts
    missing = shape.padded_vocab_size - tensor.size(0)
    return torch.cat([tensor, tensor[-1:].expand(missing, -1)]) if missing else tensor


def unpad(tensor: torch.Tensor, shape: ModelShape) -> Tensors:
    """Invert `padded` by dropping its rows."""
    return [tensor[: shape.vocab_size]]


def stacked(parts: Tensors, _shape: ModelShape) -> torch.Tensor:
    """Stack gate [F, H] above up [F, H], as megatron-core's gated MLP has them."""
    return torch.cat(list(parts))


def split_stacked(tensor: torch.Tensor, _shape: ModelShape) -> Tensors:
    """Invert `stacked`: return gate and up."""
    return tensor.chunk(2)


def stacked_experts(parts: Tensors, _shape: ModelShape) -> torch.Tensor:
    """Stack gate and up of each expert, [gate, up, gate, up, ...], to [E, 2F, H]; E experts."""
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return torch.stack([torch.cat(pair) for pair in pairs])


def split_stacked_experts(tensor: torch.Tensor, _shape: ModelShape) -> Tensors:
    """Invert `stacked_experts`: return gate and up of each expert."""
    return [half for expert in tensor.unbind() for half in expert.chunk(2)]


def experts(parts: Tensors, _shape: ModelShape) -> torch.Tensor:
    """Stack a weight [H, F] of each expert to [E, H, F]."""
    return torch.stack(list(parts))


def split_experts(tensor: torch.Tensor, _shape: ModelShape) -> Tensors:
    """Invert `experts`: return the weight of each expert."""
    return list(tensor.unbind())


def interleaved(parts: Tensors, shape: ModelShape) -> torch.Tensor:
    """Interleave query [GRD, ...], key and value [GD, ...] to [G(R + 2)D, ...]: query heads, key and value of each
    group.
    """
    by_group = [part.reshape(shape.groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(by_group, dim=1).flatten(0, 1)


def split_interleaved(tensor: torch.Tensor, shape: ModelShape) -> Tensors:
    """Invert `interleaved`: return query, key and value."""
    width = shape.model.head_width
    rows = [shape.queries // shape.groups, width, width]
    by_group = tensor.reshape(shape.groups, -1, *tensor.shape[1:])
    return [part.flatten(0, 1) for part in torch.split(by_group, rows, dim=1)]


def interleaved_from_stacked(parts: Tensors, shape: ModelShape) -> torch.Tensor:
    """Interleave GPT-2's bias [3H] of query, key and value in sequence."""
    (tensor,) = parts
    return interleaved(tensor.chunk(3), shape)


def split_interleaved_to_stacked(tensor: torch.Tensor, shape: ModelShape) -> Tensors:
    """Invert `interleaved_from_stacked` to a bias [3H]."""
    return [torch.cat(list(split_interleaved(tensor, shape)))]


def interleaved_from_columns(parts: Tensors, shape: ModelShape) -> torch.Tensor:
    """Interleave GPT-2's weight [H, 3H] of a Conv1D."""
    return interleaved_from_stacked([transposed(parts, shape)], shape)


def split_interleaved_to_columns(tensor: torch.Tensor, shape: ModelShape) -> Tensors:
    """Invert `interleaved_from_columns` to a weight [H, 3H]."""
    return split_transposed(split_interleaved_to_stacked(tensor, shape)[0], shape)
