"""Traces of BERT name passes and layers as those of GPT do, under the static schedule and MegaDPP."""

import pathlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from traced_training import MICROBATCHES, STEPS, records, traced

from megatronapp_common.trace import NO_LAYER, LayerSite, RecordKind

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
BERT = (
    f"--model-type bert --global-batch-size {2 * MICROBATCHES} --pipeline-model-parallel-size 2 "
    "--num-virtual-stages-per-pipeline-rank 2"
)
WINDOWS = "--trace --trace-interval 3 --continuous-trace-iterations 2 --trace-budget 100"
IN_WINDOW = [1, 2, 4, 5]
LAYER_SITES = (2, 3, 4, 5)


@pytest.fixture(scope="module")
def plain(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return traced(run_ranks, tmp_path_factory.mktemp("plain"), 2, *BERT.split())


@pytest.mark.parametrize("schedule", ["", "--use-dpp"])
def test_passes_and_layers_of_bert_are_recorded(
    schedule: str, plain: list[dict[str, Any]], run_ranks: RunRanks, tmp_path: pathlib.Path
) -> None:
    results = traced(run_ranks, tmp_path, 2, *f"{BERT} {WINDOWS} {schedule}".split())
    assert [result["losses"] for result in results] == [result["losses"] for result in plain]
    for rank, result in enumerate(results):
        found = records(result)
        passes = Counter(
            (RecordKind(int(row["kind"])), int(row["step"]), int(row["chunk"]), int(row["microbatch"]))
            for row in found[(found["kind"] == RecordKind.FORWARD) | (found["kind"] == RecordKind.BACKWARD)]
        )
        assert passes == Counter(
            (kind, step, chunk, microbatch)
            for kind in (RecordKind.FORWARD, RecordKind.BACKWARD)
            for step in range(STEPS)
            for chunk in range(2)
            for microbatch in range(MICROBATCHES)
        )
        parts = {(LayerSite(site), 0, chunk) for site in LAYER_SITES for chunk in range(2)}
        if rank == 0:
            parts.add((LayerSite.EMBEDDING, NO_LAYER, 0))
        else:
            parts |= {(LayerSite.FINAL_NORM, NO_LAYER, 1), (LayerSite.LOSS, NO_LAYER, 1)}
        layers = found[(found["kind"] == RecordKind.LAYER_FORWARD) & (found["step"] == IN_WINDOW[0])]
        seen = {(LayerSite(int(row["ordinal"])), int(row["layer"]), int(row["chunk"])) for row in layers}
        assert seen == parts
        assert len(layers) == len(parts) * MICROBATCHES
