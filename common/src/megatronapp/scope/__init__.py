"""MegaScope from Python: generate, and read attention, values, candidates and analyses as NumPy arrays.

    from megatronapp.scope import connect

    with connect("http://127.0.0.1:8265", token) as scope:
        run = scope.generate("def add(a, b):", tokens=20)
        print(run.texts[0], run.attention(layer=3, head=1).shape, run.lens().top_texts)

Needs `megatronapp-common[client]`: NumPy and httpx.
"""

from megatronapp.scope.client import ScopeHub, connect
from megatronapp.scope.comparisons import BranchSummary, Comparison, Sweep
from megatronapp.scope.errors import ScopeError
from megatronapp.scope.results import Attribution, Candidate, Lens
from megatronapp.scope.run import Run
from megatronapp.scope.session import Session, open_session

__all__ = [
    "Attribution",
    "BranchSummary",
    "Candidate",
    "Comparison",
    "Lens",
    "Run",
    "ScopeError",
    "ScopeHub",
    "Session",
    "Sweep",
    "connect",
    "open_session",
]
