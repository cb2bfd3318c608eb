"""A run of MegaScope: its tokens, and what the model computed for them."""

import io
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatronapp.scope.connection import HubConnection
from megatronapp.scope.errors import ScopeError
from megatronapp.scope.results import Attribution, Candidate, Lens, attribution_of, floats, lens_of

ENDED = frozenset({"done", "cancelled", "failed"})
POLL_S = 0.2
Range = int | tuple[int, int] | None
"""A single index, or the first and last one; None: the default of the hub."""


class Run:
    """One request to generate, of one or more prompts. Samples are its prompts, from 0.

    Every method raises ScopeError if the hub refuses, and waits while the model computes what is not stored.
    """

    def __init__(self, connection: HubConnection, run: str) -> None:
        self.id = run
        self._connection = connection

    def __repr__(self) -> str:
        return f"Run({self.id!r})"

    @property
    def state(self) -> str:
        """Return queued, prefill, decoding, done, cancelled or failed."""
        return str(self._detail()["state"])

    @property
    def prompts(self) -> list[str]:
        """Return the text of each prompt."""
        return [prompt["text"] for prompt in self._detail()["prompts"]]

    @property
    def texts(self) -> list[str]:
        """Return what was generated for each prompt so far."""
        return ["".join(token["text"] or "" for token in sample) for sample in self._detail()["generated"]]

    def ids(self, sample: int = 0) -> list[int]:
        """Return all tokens of a sample: those of the prompt, then the generated ones."""
        detail = self._detail()
        return [*detail["prompts"][sample]["ids"], *(token["id"] for token in detail["generated"][sample])]

    def wait(self, timeout_s: float = 600.0) -> "Run":
        """Wait until the run has ended, and return it. Raises ScopeError if it failed, TimeoutError."""
        end = time.monotonic() + timeout_s
        while (detail := self._detail())["state"] not in ENDED:
            if time.monotonic() > end:
                raise TimeoutError(f"run {self.id} has not ended within {timeout_s:g} s")
            time.sleep(POLL_S)
        if (error := detail.get("error")) is not None:
            raise ScopeError(error["message"], code=error["code"], hint=error["hint"])
        return self

    def cancel(self) -> None:
        """Cancel a run that waits or generates; one that has ended is unchanged."""
        self._connection.request("DELETE", f"runs/{self.id}")

    def attention(self, layer: int, head: int, sample: int = 0) -> NDArray[np.float32]:
        """Return the exact attention probabilities of a head, [queries, keys]; 0 at later keys."""
        return self.values("attention", layer=layer, head=head, sample=sample)

    def values(
        self,
        site: str,
        *,
        layer: int | None = None,
        head: int | None = None,
        sample: int = 0,
        position: int | None = None,
        rotary: Literal["after", "before"] = "after",
    ) -> NDArray[np.float32]:
        """Return the exact numbers of a site, [positions, features]; of one position [1, features].

        Sites are listed in docs/scope-protocol.md, section 2, and those of plugins in `ScopeHub.sites`. `rotary`: `q`
        and `k` after or before their rotation.
        """
        query = {"sample": sample, "layer": layer, "head": head, "position": position, "rotary": rotary}
        data = self._connection.get(f"runs/{self.id}/values/{site}", {**query, "format": "npy"}).content
        values: NDArray[np.float32] = np.load(io.BytesIO(data), allow_pickle=False)
        return values

    def candidates(self, sample: int = 0) -> list[list[Candidate]]:
        """Return the candidates of each generated token, the likeliest first; none where the hub holds them no more."""
        detail = self._connection.get(f"runs/{self.id}", {"candidates": "true"}).json()
        return [
            [Candidate(**candidate) for candidate in token["candidates"] or ()] for token in detail["generated"][sample]
        ]

    def surprise(self, sample: int = 0) -> NDArray[np.float64]:
        """Return -log p of each token of a prompt but the first, in nats."""
        return floats(self._connection.get(f"runs/{self.id}/scores", {"sample": sample}).json()["surprise"])

    def lens(
        self, *, positions: Range = None, layers: Range = None, top: int = 5, token: int | None = None, sample: int = 0
    ) -> Lens:
        """Return the logit lens of some positions and layers; `token` is followed in addition."""
        query = {"positions": _span(positions), "layers": _span(layers), "top": top, "token": token, "sample": sample}
        return lens_of(self._connection.get(f"runs/{self.id}/lens", query).json())

    def attribution(
        self,
        *,
        position: int | None = None,
        token: int | None = None,
        against: int | None = None,
        neurons: int = 10,
        order: Literal["contribution", "activation"] = "contribution",
        sample: int = 0,
    ) -> Attribution:
        """Return what each component adds to the logit of a token after a position, by default of the newest one."""
        query = {"position": position, "token": token, "against": against, "neurons": neurons, "order": order}
        return attribution_of(self._connection.get(f"runs/{self.id}/attribution", {**query, "sample": sample}).json())

    def head_scores(
        self, *, random: int | None = None, seed: int = 0, sample: int = 0
    ) -> Mapping[str, NDArray[np.float64]]:
        """Return scores of all heads by name, [layers, heads] each: previous, first, duplicate, induction.

        They are over the text of a sample, or over `random` tokens drawn with `seed` and read twice.
        """
        query = {"random": random, "seed": seed, "sample": sample}
        answer = self._connection.get(f"runs/{self.id}/heads", query).json()
        return {name: floats(values) for name, values in zip(answer["scores"], answer["values"], strict=True)}

    def save_session(self, path: str | pathlib.Path) -> pathlib.Path:
        """Save the recorded session, for `megatronapp scope replay` and `open_session`; return its path."""
        target = pathlib.Path(path)
        target.write_bytes(self._connection.get(f"runs/{self.id}/session").content)
        return target

    def _detail(self) -> dict[str, Any]:
        detail: dict[str, Any] = self._connection.get(f"runs/{self.id}").json()
        return detail


def _span(indices: Range) -> str | None:
    """Return indices as the hub writes them: `first-last`."""
    if indices is None:
        return None
    first, last = (indices, indices) if isinstance(indices, int) else indices
    return f"{first}-{last}"


def prompts_of(prompts: str | Sequence[str]) -> list[str]:
    """Return prompts as a list; a single text is one prompt."""
    return [prompts] if isinstance(prompts, str) else list(prompts)
