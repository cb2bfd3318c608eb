"""Tokens per second of a comparison of two branches over those of plain generation, in one run on one GPU.

    python bench/gpu_compare.py --out gpu_compare.json

The model is that of gpu_generate.py. A comparison generates with the model as it is (A) and with an MLP set to zero
(B), teacher-forced, at batch 1; the ranks measure divergence, drift of each layer and change of each head of each
token. Blocks of one call each alternate with plain generation of the same number of tokens. A token of a comparison is
a token of both branches, so 0.5 would be free. Rates are of the tokens after the first 16: both capture their CUDA
graphs before, a comparison in each call, because graphs end with their recipe; `whole_calls` has the ratio with them.

A small model on a CPU shows that the script works:
    python bench/gpu_compare.py --layers 2 --hidden 64 --heads 4 --key-heads 2 --ffn 128 --vocabulary 512 --new 40
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from typing import Any

import torch
from gpu_generate import flags, median_bounds, options_of, prompts_of

from megatronapp_common.scope.perturbation.recipe import parse_recipe
from megatronapp_common.scope.protocol_requests import SamplingSettings
from megatronapp_trainer.config import parse
from megatronapp_trainer.device import Device, prepare_device
from megatronapp_trainer.inference.build import build_model, generation_layout, open_worker_group
from megatronapp_trainer.inference.engine import Engine
from megatronapp_trainer.inference.events import TokenEvent
from megatronapp_trainer.inference.model_runner import RunnerOptions
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.parallel.groups import destroy_groups, initialize_groups
from megatronapp_trainer.scope.comparison.commands import BeginComparison
from megatronapp_trainer.scope.comparison.comparison_service import BranchText, ComparisonService
from megatronapp_trainer.scope.comparison.rank_comparer import RankComparer
from megatronapp_trainer.scope.comparison.row_results import RowResult

SKIPPED = 16
"""First tokens of a call, in which graphs are captured."""
COLLECT_EVERY = 8
"""Tokens after which the rows are gathered, as the server does."""
ABLATED = parse_recipe(
    {"perturbations": [{"kind": "calculation", "site": "mlp2", "layers": [1], "action": {"type": "zero"}}]}
)
NOTHING = parse_recipe(
    {
        "perturbations": [
            {"kind": "calculation", "site": "mlp2", "action": {"type": "gaussian", "coefficient": 0}},
        ]
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallTimes:
    """Seconds of a call: from its begin to its end, and from the first counted token on."""

    whole_s: float
    steady_s: float


@dataclasses.dataclass(kw_only=True)
class CompareBench:
    """Engine and prompt that both measurements share."""

    options: argparse.Namespace
    device: Device
    engine: Engine
    service: ComparisonService
    prompt: tuple[int, ...]
    rows: list[RowResult] = dataclasses.field(default_factory=list)
    calls: int = 0

    def wait(self) -> float:
        """Wait for the device; return the time in seconds."""
        if self.device.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def plain(self) -> CallTimes:
        """Generate without a comparison."""
        request = GenerationRequest(id="plain-0", prompt=self.prompt, max_new_tokens=self.options.new, temperature=0)
        return self._timed([request], "plain", branch=0)

    def compared(self, recipe: Any = ABLATED) -> CallTimes:  # noqa: ANN401 - Recipe
        """Generate both branches of a comparison."""
        self.calls += 1
        name = f"{self.calls:012x}"
        sampling = SamplingSettings(temperature=0.0)
        text = BranchText(name=name, ids=self.prompt, tokens=self.options.new, sampling=sampling, seed=0, top=10)
        self.rows.clear()
        self.service.begin(
            BeginComparison(name=name, drift=True, heads=True), lambda _number, rows: self.rows.extend(rows)
        )
        times = self._timed([text.request(0, None), text.request(1, recipe, is_forced=True)], name, branch=1)
        self.service.end(name)
        self.engine.step()
        assert len(self.rows) == self.options.new, f"{len(self.rows)} rows of {self.options.new} tokens"
        return times

    def _timed(self, requests: list[GenerationRequest], name: str, *, branch: int) -> CallTimes:
        """Generate, and gather rows as the server does; `branch`: the one whose tokens are counted."""
        began_s = steady_s = self.wait()
        self.engine.submit(*requests)
        tokens = 0
        while self.engine.is_busy:
            events = self.engine.step()
            if any(isinstance(event, TokenEvent) and event.request_id == f"{name}-{branch}" for event in events):
                tokens += 1
                if tokens == SKIPPED:
                    steady_s = self.wait()
                if branch and tokens % COLLECT_EVERY == 0:
                    self.service.collect(name, 0)
        if branch:
            self.service.collect(name, 1)
            self.engine.step()
        ended_s = self.wait()
        assert tokens == self.options.new, f"{tokens} tokens of {self.options.new}"
        return CallTimes(whole_s=ended_s - began_s, steady_s=ended_s - steady_s)


def check_null(bench: CompareBench) -> dict[str, float]:
    """Compare with coefficient 0, which must change nothing, CUDA graphs or not."""
    bench.compared(NOTHING)
    largest = {
        "kl": max(row.divergence.kl for row in bench.rows),
        "drift": max(float(row.drift.max()) for row in bench.rows if row.drift is not None),
        "heads": max(float(row.heads.max()) for row in bench.rows if row.heads is not None),
    }
    assert set(largest.values()) == {0.0}, f"coefficient 0 changes the model: {largest}"
    return largest


def ratios_of(blocks: dict[str, list[CallTimes]], field: str) -> dict[str, float]:
    """Return the median of plain seconds over compared seconds of each pair, and its bounds at 95 %."""
    pairs = zip(blocks["plain"], blocks["compared"], strict=True)
    ratios = [getattr(plain, field) / getattr(compared, field) for plain, compared in pairs]
    low, high = median_bounds(ratios)
    return {"median": statistics.median(ratios), "low": low, "high": high}


def measure(bench: CompareBench) -> dict[str, Any]:
    """Alternate blocks of plain generation and of comparisons."""
    for _ in range(2):  # graphs, compilation
        bench.plain()
        bench.compared()
    blocks: dict[str, list[CallTimes]] = {"plain": [], "compared": []}
    for pair in range(bench.options.pairs):
        for name in ("plain", "compared") if pair % 2 else ("compared", "plain"):
            blocks[name].append(bench.plain() if name == "plain" else bench.compared())
    counted = bench.options.new - SKIPPED
    return {
        "tokens_per_s": {
            name: counted / statistics.median(times.steady_s for times in found) for name, found in blocks.items()
        },
        "compared_over_plain": ratios_of(blocks, "steady_s"),
        "whole_calls": ratios_of(blocks, "whole_s"),
        "seconds": {name: [dataclasses.asdict(times) for times in found] for name, found in blocks.items()},
    }


def main() -> int:
    options = options_of(__doc__, "pairs", "gpu_compare.json")
    device = prepare_device(0)
    config = parse(flags(options, bf16=device.is_cuda))
    layout = generation_layout(config)
    initialize_groups(config, layout, device)
    model = build_model(config, layout, device, vocab_size=options.vocabulary)
    settings = RunnerOptions(slots=2, capacity=options.prompt + options.new, prefill_chunk=4096)
    gang = open_worker_group(model, config, layout, device, settings, vocab_size=options.vocabulary)
    comparer = RankComparer(gang)
    comparer.attach(gang)
    engine = Engine(gang)
    bench = CompareBench(
        options=options,
        device=device,
        engine=engine,
        service=ComparisonService(engine, comparer),
        prompt=tuple(prompts_of(options, 1)[0].tolist()),
    )
    found: dict[str, Any] = {"device": device.name, "torch": torch.__version__, "null": check_null(bench)}
    found |= measure(bench)
    options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    speed, ratio = found["tokens_per_s"], found["compared_over_plain"]
    print(
        f"{device.name}: plain {speed['plain']:.1f} tokens/s, compared {speed['compared']:.1f}, ratio "
        f"{ratio['median']:.3f} (95 %: {ratio['low']:.3f} to {ratio['high']:.3f}); whole calls "
        f"{found['whole_calls']['median']:.3f}",
        flush=True,
    )
    engine.close()
    destroy_groups()
    return 0


if __name__ == "__main__":
    sys.exit(main())
