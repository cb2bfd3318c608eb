"""The gradient of an embedding, added to that in fp32 row by row. T tokens, V rows of the table, H width.

torch makes a gradient of the whole table first, most of it zeros, and then adds that. Here only the rows of the tokens
are touched. Equal tokens are added up in the order of their places, so that the result is the same in each run.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

_WIDE = 512


@triton.jit
def _embedding_rows(total, keys, places, gradient, count, width, WIDE: tl.constexpr):
    """Add the gradients of all places of a token, in the program of the first of them in the sorted tokens."""
    first = tl.program_id(0)
    key = tl.load(keys + first)
    before = tl.load(keys + first - 1, mask=first > 0, other=-1)
    if key != before:
        columns = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
        inside = columns < width
        row = tl.load(places + first)
        value = tl.load(gradient + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        place = first + 1
        following = tl.load(keys + place, mask=place < count, other=-1)
        while following == key:
            row = tl.load(places + place)
            value += tl.load(gradient + row * width + columns, mask=inside, other=0.0).to(tl.float32)
            place += 1
            following = tl.load(keys + place, mask=place < count, other=-1)
        value += tl.load(total + key * width + columns, mask=inside, other=0.0)
        tl.store(total + key * width + columns, value, mask=inside)


def add_rows(total: torch.Tensor, tokens: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add the gradient [T, H] of each token to its row of `total`, fp32 [V, H]; tokens int64 [T]."""
    count, width = gradient.shape
    keys, places = torch.sort(tokens, stable=True)
    grid = (count, triton.cdiv(width, _WIDE))
    _embedding_rows[grid](total, keys, places, gradient, count, width, WIDE=_WIDE)


@dataclasses.dataclass(frozen=True, slots=True)
class _Table:
    """A table and what to call when its gradient is added.

    Autograd does not see the parameter in here. As an argument of a function of autograd it would be an input without
    a gradient, for which autograd runs the hooks of its parameter all the same.
    """

    weight: torch.nn.Parameter
    announce: Callable[[torch.nn.Parameter], None]


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's
        tokens: torch.Tensor,
        leaf: torch.Tensor,
        table: _Table,
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.table = table
        return torch.nn.functional.embedding(tokens, leaf)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:  # noqa: ANN401
        (tokens,) = ctx.saved_tensors
        rows = gradient.contiguous().view(-1, gradient.size(-1))
        add_rows(ctx.table.weight.main_grad, tokens.reshape(-1), rows)
        ctx.table.announce(ctx.table.weight)
        return None, None, None


def embed(
    tokens: torch.Tensor, weight: torch.nn.Parameter, announce: Callable[[torch.nn.Parameter], None]
) -> torch.Tensor:
    """Return the rows of the table [V, H] of tokens [..], whose gradient is added to `weight.main_grad` in fp32.

    Autograd computes no gradient of the parameter; `announce` is called with it when the gradient is added.
    """
    output: torch.Tensor = _Embedding.apply(tokens, weight.detach().requires_grad_(), _Table(weight, announce))
    return output
