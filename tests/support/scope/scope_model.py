"""A tiny GPT in plain PyTorch with fixed weights: the reference for everything that MegaScope shows."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyGptShape:
    layers: int = 4
    hidden: int = 32
    heads: int = 4
    key_heads: int = 2
    ffn: int = 64
    vocabulary: int = 96
    rotary: bool = True
    max_length: int = 128

    @property
    def width(self) -> int:
        return self.hidden // self.heads

    def model(self) -> dict[str, Any]:
        """Return the model as SCOPE_HELLO describes it."""
        return {
            "layers": self.layers,
            "hidden": self.hidden,
            "heads": self.heads,
            "keyHeads": self.key_heads,
            "headWidth": self.width,
            "mlpWidth": self.ffn,
            "gated": False,
            "vocabulary": self.vocabulary,
            "positions": "rotary" if self.rotary else "learned",
            "maxLength": self.max_length,
        }


class TinyGpt:
    """Pre-norm (RMS) transformer, GELU, tied output. `weights` are drawn from a fixed seed; all fp32."""

    def __init__(self, shape: TinyGptShape, seed: int = 0) -> None:
        import torch

        self.shape = shape
        generator = torch.Generator().manual_seed(seed)

        def draw(*size: int, scale: float = 1.0) -> Any:
            return torch.randn(*size, generator=generator) * scale

        hidden, keys = shape.hidden, shape.key_heads * shape.width
        self.embedding = draw(shape.vocabulary, hidden)
        self.positions = None if shape.rotary else draw(shape.max_length, hidden, scale=0.5)
        near = hidden**-0.5
        self.layers = [
            {
                "q": draw(hidden, hidden, scale=2 * near),
                "k": draw(keys, hidden, scale=2 * near),
                "v": draw(keys, hidden, scale=near),
                "out": draw(hidden, hidden, scale=near),
                "fc1": draw(shape.ffn, hidden, scale=near),
                "fc2": draw(hidden, shape.ffn, scale=shape.ffn**-0.5),
            }
            for _ in range(shape.layers)
        ]

    def forward(self, ids: Sequence[int]) -> dict[str, Array]:
        """Every site of section 2 for all rows of one sample; `attention` is [layers, heads, rows, rows]."""
        import torch

        state = self.embedding[torch.tensor(list(ids))]
        if self.positions is not None:
            state = state + self.positions[: len(ids)]
        sites: dict[str, list[Any]] = {}
        seen = {"embedding": state}
        for layer in self.layers:
            state = self._layer(layer, state, sites)
        seen["final_norm"] = _norm(state)
        seen["logits"] = seen["final_norm"] @ self.embedding.T
        stacked = {name: torch.stack(found, dim=0 if name == "attention" else 1) for name, found in sites.items()}
        return {name: value.numpy() for name, value in (seen | stacked).items()}

    def _layer(self, layer: dict[str, Any], state: Any, sites: dict[str, list[Any]]) -> Any:
        import torch

        shape, rows = self.shape, len(state)
        read = _norm(state)
        q = (read @ layer["q"].T).view(rows, shape.heads, shape.width)
        k = (read @ layer["k"].T).view(rows, shape.key_heads, shape.width)
        v = (read @ layer["v"].T).view(rows, shape.key_heads, shape.width)
        if shape.rotary:
            q, k = _rotate(q), _rotate(k)
        group = shape.heads // shape.key_heads
        keys, values = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) / math.sqrt(shape.width)
        later = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        attention = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
        mixed = torch.einsum("hqk,khd->qhd", attention, values).reshape(rows, shape.hidden)
        output = mixed @ layer["out"].T
        state = state + output
        mlp_in = _norm(state)
        mlp1 = mlp_in @ layer["fc1"].T
        mlp2 = torch.nn.functional.gelu(mlp1) @ layer["fc2"].T
        state = state + mlp2
        heads = mixed.view(rows, shape.heads, shape.width)
        names = ("q", "k", "v", "attention", "head_output", "attention_output", "mlp_in", "mlp1", "mlp2", "residual")
        for name, value in zip(names, (q, k, v, attention, heads, output, mlp_in, mlp1, mlp2, state), strict=True):
            sites.setdefault(name, []).append(value)
        return state

    def generate(self, prompt: Sequence[int], tokens: int, *, temperature: float, seed: int) -> list[int]:
        """Tokens that follow; greedy at temperature 0."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        ids = list(prompt)
        for _ in range(tokens):
            logits = torch.from_numpy(self.forward(ids)["logits"][-1])
            if temperature == 0:
                ids.append(int(logits.argmax()))
            else:
                chances = (logits / temperature).softmax(dim=-1)
                ids.append(int(torch.multinomial(chances, 1, generator=generator)))
        return ids[len(prompt) :]


def _norm(state: Any) -> Any:
    return state * (state.square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt()


def _rotate(heads: Any) -> Any:
    """Rotary positions, halves of a head turned together (base 10,000)."""
    import torch

    rows, _, width = heads.shape
    frequencies = 10_000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(rows)[:, None, None] * frequencies
    first, second = heads[..., : width // 2], heads[..., width // 2 :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
