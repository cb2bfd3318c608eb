"""A manifest that is right, and changes to it."""

import copy
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[3]
MANIFEST = """
apiVersion: megatronapp.io/v1alpha1
kind: MegatronJob
metadata: {name: small}
spec:
  nodes: 2
  procPerNode: 4
  parallelism: {tensor: 2, pipeline: 2}
  model: {numLayers: 4, hiddenSize: 64, numAttentionHeads: 4, seqLength: 32, vocabSize: 64}
  training: {microBatchSize: 1, globalBatchSize: 8, trainIters: 100, lr: 1e-3}
  data: {path: [corpus]}
  trace: {enabled: true}
"""
Build = Callable[..., dict[str, Any]]


@pytest.fixture
def repository() -> pathlib.Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def build() -> Build:
    """The small manifest with other values: `build({"spec.nodes": 4})`; a value of `...` removes the field."""
    return _build


def _build(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    document: dict[str, Any] = copy.deepcopy(yaml.safe_load(MANIFEST))
    document["spec"]["training"]["lr"] = 1e-3
    for path, value in (changes or {}).items():
        *parents, name = path.split(".")
        block = document
        for parent in parents:
            block = block.setdefault(parent, {})
        if value is ...:
            del block[name]
        else:
            block[name] = value
    return document
