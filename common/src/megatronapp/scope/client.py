"""Connection to a hub of MegaScope, by the HTTP interface of docs/scope-protocol.md, section 8."""

import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import httpx

from megatronapp.scope.comparisons import (
    BranchSummary,
    Comparison,
    ComparisonMode,
    Recipe,
    Sweep,
    SweepMetric,
    comparison_of,
    comparison_summaries,
    ended,
    sweep_of,
    sweep_summaries,
)
from megatronapp.scope.connection import HubConnection
from megatronapp.scope.run import Run, prompts_of

TIMEOUT_S = 300.0
"""Longest wait for numbers that the model has to compute."""


def connect(address: str, token: str | None = None, *, timeout_s: float = TIMEOUT_S, verify: bool = True) -> "ScopeHub":
    """Connect to the hub of a job.

    Args:
        address: of the hub, or what `megatronapp ui JOB --print` prints, whose code logs in once. Through a gateway:
            `https://GATEWAY/api/v1/jobs/NAMESPACE/NAME`.
        token: token of a viewer or controller of the job, or of a user of the gateway; None: the code of the address.
        timeout_s: longest wait for numbers that the model has to compute.
        verify: check certificates of https.

    Raises:
        ScopeError: the hub does not answer, or refuses the login.
    """
    parts = urllib.parse.urlsplit(address)
    base = urllib.parse.urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", ""))
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    client = httpx.Client(base_url=base, headers=headers, timeout=timeout_s, verify=verify, trust_env=False)
    connection = HubConnection(client, timeout_s=timeout_s)
    try:
        if token is None and (code := _code_of(parts)) is not None:
            connection.log_in(code)
        scope = ScopeHub(connection)
        scope.refresh()
    except Exception:
        connection.close()
        raise
    return scope


def _code_of(parts: urllib.parse.SplitResult) -> str | None:
    for text in (parts.fragment, parts.query):
        if found := urllib.parse.parse_qs(text).get("code"):
            return found[0]
    return None


class ScopeHub:
    """MegaScope of one job. Use it as a context manager, or call `close`. Not for several threads at once."""

    def __init__(self, connection: HubConnection) -> None:
        self._connection = connection
        self.model: Mapping[str, Any] = {}
        """Sizes of the model: layers, hidden, heads, keyHeads, headWidth, mlpWidth, vocabulary, .."""
        self.layout: Mapping[str, Any] = {}
        """How the ranks hold the model."""
        self.sites: Sequence[str] = ()
        """Names of the sites that ranks can capture."""

    def __enter__(self) -> "ScopeHub":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections to the hub."""
        self._connection.close()

    def refresh(self) -> None:
        """Read model, layout and sites again. Raises ScopeError."""
        hello = self._connection.get("").json()
        self.model, self.layout = hello["model"] or {}, hello["layout"]
        self.sites = tuple(hello.get("sites", ()))

    def runs(self) -> list[Run]:
        """Return the runs that the hub holds, newest first. Raises ScopeError."""
        return [Run(self._connection, entry["run"]) for entry in self._connection.get("runs").json()]

    def run(self, run: str) -> Run:
        """Return the run with this id. Raises ScopeError if the hub does not hold it."""
        self._connection.get(f"runs/{run}")
        return Run(self._connection, run)

    def generate(
        self,
        prompts: str | Sequence[str],
        tokens: int = 32,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        capture: Mapping[str, Any] | None = None,
        perturbation: Mapping[str, Any] | str | None = None,
        wait: bool = True,
    ) -> Run:
        """Generate from prompts, and return the run once it has ended, or at once without `wait`.

        `capture` is as in docs/scope-protocol.md, section 3; `perturbation` a recipe of docs/perturbation.md, or the
        name or digest of one of the manifest. Needs the role of a controller. Raises ScopeError.
        """
        sampling = {"temperature": temperature, "topK": top_k, "topP": top_p, "seed": seed, "stop": list(stop)}
        body: dict[str, Any] = {"prompts": prompts_of(prompts), "tokens": tokens, "sampling": sampling}
        if capture is not None:
            body["capture"] = dict(capture)
        if perturbation is not None:
            body["perturbation"] = perturbation if isinstance(perturbation, str) else dict(perturbation)
        answer = self._connection.request("POST", "runs", body)
        run = Run(self._connection, answer.json()["run"])
        return run.wait() if wait else run

    def compare(
        self,
        prompt: str,
        perturbation: Recipe,
        tokens: int = 32,
        *,
        baseline: Recipe = "none",
        mode: ComparisonMode = "teacher-forced",
        temperature: float = 0.0,
        seed: int | None = None,
        top: int = 10,
        heads: bool = True,
        timeout_s: float = 600.0,
        wait: bool = True,
    ) -> Comparison:
        """Generate two branches of a prompt, and return what differs once both have ended, or at once without `wait`.

        A is the model with the recipe `baseline`, B the one with `perturbation`. A comparison that has not ended
        within the time continues; `cancel_comparison` ends it. Needs the role of a controller. Raises ScopeError,
        TimeoutError.
        """
        body = {
            "prompt": prompt,
            "tokens": tokens,
            "mode": mode,
            "sampling": {"temperature": temperature, "seed": seed},
            "baseline": baseline if isinstance(baseline, str) else dict(baseline),
            "perturbation": perturbation if isinstance(perturbation, str) else dict(perturbation),
            "top": top,
            "heads": heads,
        }
        name = self._connection.request("POST", "comparisons", body).json()["comparison"]
        if not wait:
            return self.read_comparison(name, heads=heads)
        path = f"comparisons/{name}?heads={str(heads).lower()}"
        return comparison_of(ended(self._connection, path, timeout_s=timeout_s, progress=None))

    def sweep(
        self,
        prompt: str,
        template: Mapping[str, Any],
        layers: Sequence[int],
        *,
        strengths: Sequence[float] | None = None,
        positions: Sequence[int] | None = None,
        tokens: int = 8,
        metric: SweepMetric = "meanKl",
        token: int | None = None,
        seed: int = 0,
        timeout_s: float = 3600.0,
        progress: Callable[[Mapping[str, Any]], None] | None = None,
        wait: bool = True,
    ) -> Sweep:
        """Compare a perturbation at each layer and strength, or position, with the model as it is.

        `template` is one perturbation of a recipe; `progress` gets the hub's answer, with `done` and `cells`, every
        0.2 s. Returns once all cells are known, or at once without `wait`. A sweep that has not ended within the time
        continues; `cancel_sweep` ends it. Needs the role of a controller. Raises ScopeError, TimeoutError.
        """
        axes: dict[str, Any] = {"layers": list(layers)}
        if strengths is not None:
            axes["strengths"] = [float(strength) for strength in strengths]
        if positions is not None:
            axes["positions"] = list(positions)
        body: dict[str, Any] = {
            "prompt": prompt,
            "template": dict(template),
            "axes": axes,
            "tokens": tokens,
            "metric": metric,
            "seed": seed,
        }
        if token is not None:
            body["token"] = token
        name = self._connection.request("POST", "sweeps", body).json()["sweep"]
        if not wait:
            return self.read_sweep(name)
        return sweep_of(ended(self._connection, f"sweeps/{name}", timeout_s=timeout_s, progress=progress))

    def comparisons(self) -> list[BranchSummary]:
        """Return the comparisons that the hub stores, newest first. Raises ScopeError."""
        return comparison_summaries(self._connection.get("comparisons").json())

    def sweeps(self) -> list[BranchSummary]:
        """Return the sweeps that the hub stores, newest first. Raises ScopeError."""
        return sweep_summaries(self._connection.get("sweeps").json())

    def read_comparison(self, comparison: str, *, heads: bool = True) -> Comparison:
        """Return what is known of the comparison with this id. Raises ScopeError if the hub does not store it."""
        return comparison_of(self._connection.get(f"comparisons/{comparison}?heads={str(heads).lower()}").json())

    def read_sweep(self, sweep: str) -> Sweep:
        """Return what is known of the sweep with this id. Raises ScopeError if the hub does not store it."""
        return sweep_of(self._connection.get(f"sweeps/{sweep}").json())

    def cancel_comparison(self, comparison: str, *, timeout_s: float = 60.0) -> Comparison:
        """Cancel a comparison, and return what was compared once it has ended; an ended one is unchanged.

        Needs the role of a controller. Raises ScopeError, TimeoutError.
        """
        path = f"comparisons/{comparison}"
        self._connection.request("DELETE", path)
        return comparison_of(ended(self._connection, f"{path}?heads=true", timeout_s=timeout_s, progress=None))

    def cancel_sweep(self, sweep: str, *, timeout_s: float = 60.0) -> Sweep:
        """Cancel a sweep, and return the known cells once it has ended; an ended one is unchanged.

        Needs the role of a controller. Raises ScopeError, TimeoutError.
        """
        self._connection.request("DELETE", f"sweeps/{sweep}")
        return sweep_of(ended(self._connection, f"sweeps/{sweep}", timeout_s=timeout_s, progress=None))
