"""Tokens per second of our decode loop and of transformers' generate with a static cache, in one run on one GPU.

    python bench/gpu_generate.py --out gpu_generate.json

Both generate with the same random weights of a model of Llama's shape (1.26 billion parameters in bf16), greedily, from
the same prompts. First it is shown that they compute the same, and that no step waits for the device inside of its
forward pass. Then blocks of one call each take turns; the ratio of a pair of blocks is judged, not the times. The calls
include reading the prompt. transformers compiles its forward pass to CUDA graphs by itself where the cache is static.

A small model on a CPU shows that the script works:
    python bench/gpu_generate.py --layers 2 --hidden 64 --heads 4 --key-heads 2 --ffn 128 --vocabulary 512 --new 16
"""

import argparse
import dataclasses
import gc
import json
import math
import pathlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from exact_bounds import binomial_at_least

from megatronapp_trainer.config import TrainerConfig, parse
from megatronapp_trainer.device import Device, prepare_device
from megatronapp_trainer.hooks.forward_observer import Segment
from megatronapp_trainer.inference.build import build_model, generation_layout, open_worker_group
from megatronapp_trainer.inference.engine import Engine
from megatronapp_trainer.inference.events import TokenEvent
from megatronapp_trainer.inference.model_runner import RunnerOptions
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.inference.step_plan import OutputRequest, StepPlan
from megatronapp_trainer.inference.worker_group import WorkerGroup
from megatronapp_trainer.parallel.groups import destroy_groups, initialize_groups
from megatronapp_trainer.parallel.layout import Layout

BOUND_FP32, BOUND_BF16 = 1e-3, 0.25
"""Deviations of a logit by which the two may differ. A wrong mask or position moves logits by more than one."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Model, prompts and settings that all measurements share."""

    options: argparse.Namespace
    config: TrainerConfig
    layout: Layout
    device: Device
    model: Any
    theirs: Any

    def open(self, batch: int, **changes: Any) -> tuple[WorkerGroup, Engine]:  # noqa: ANN401 - fields of Options
        capacity = self.options.prompt + self.options.new
        options = RunnerOptions(**({"slots": batch, "capacity": capacity, "prefill_chunk": 4096} | changes))
        gang = open_worker_group(
            self.model, self.config, self.layout, self.device, options, vocab_size=self.options.vocabulary
        )
        return gang, Engine(gang)

    def wait(self) -> None:
        if self.device.is_cuda:
            torch.cuda.synchronize()


def flags(options: argparse.Namespace, *, bf16: bool) -> list[str]:
    shape: dict[str, Any] = {
        "--num-layers": options.layers,
        "--hidden-size": options.hidden,
        "--num-attention-heads": options.heads,
        "--num-query-groups": options.key_heads,
        "--ffn-hidden-size": options.ffn,
        "--seq-length": options.prompt + options.new,
        "--vocab-size": options.vocabulary,
        "--norm-epsilon": 1e-5,
        "--rotary-base": 10000,
        "--micro-batch-size": 1,
        "--global-batch-size": 1,
        "--train-iters": 1,
        "--lr": 1,
        "--transformer-impl": "torch",
    }
    switches = (
        "--mock-data --group-query-attention --swiglu --normalization RMSNorm --position-embedding-type rope "
        "--disable-bias-linear --untie-embeddings-and-output-weights"
    )
    return [
        *(str(argument) for pair in shape.items() for argument in pair),
        *switches.split(),
        *(["--bf16"] if bf16 else []),
    ]


def build_theirs(options: argparse.Namespace, ours: Any, device: Device) -> Any:  # noqa: ANN401 - GPTModel, LlamaForCausalLM
    """transformers' Llama with our weights."""
    import transformers

    shape = transformers.LlamaConfig(
        num_hidden_layers=options.layers,
        hidden_size=options.hidden,
        num_attention_heads=options.heads,
        num_key_value_heads=options.key_heads,
        intermediate_size=options.ffn,
        vocab_size=options.vocabulary,
        max_position_embeddings=options.prompt + options.new,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(device.torch_device):
        # Not built in fp32 and turned to bf16 afterwards, which would round the rotary frequencies, too.
        build: Any = transformers.AutoModelForCausalLM.from_config
        theirs = build(shape, dtype=next(ours.parameters()).dtype).eval()
    theirs.load_state_dict(dict(their_weights(ours, options)), strict=False)
    return theirs


def their_weights(ours: Any, options: argparse.Namespace) -> list[tuple[str, torch.Tensor]]:  # noqa: ANN401 - GPTModel
    state, repeats, width = ours.state_dict(), options.heads // options.key_heads, options.hidden // options.heads
    found = [
        ("model.embed_tokens.weight", state["embedding.word_embeddings.weight"][: options.vocabulary]),
        ("model.norm.weight", state["decoder.final_layernorm.weight"]),
        ("lm_head.weight", state["output_layer.weight"][: options.vocabulary]),
    ]
    for layer in range(options.layers):
        mine, their = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        qkv = state[mine + "self_attention.linear_qkv.weight"].view(options.key_heads, repeats + 2, width, -1)
        gate, up = state[mine + "mlp.linear_fc1.weight"].chunk(2)
        parts = {
            "self_attn.q_proj": qkv[:, :repeats].flatten(0, 2),
            "self_attn.k_proj": qkv[:, repeats].flatten(0, 1),
            "self_attn.v_proj": qkv[:, repeats + 1].flatten(0, 1),
            "self_attn.o_proj": state[mine + "self_attention.linear_proj.weight"],
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": state[mine + "mlp.linear_fc2.weight"],
            "input_layernorm": state[mine + "input_layernorm.weight"],
            "post_attention_layernorm": state[mine + "pre_mlp_layernorm.weight"],
        }
        found += [(f"{their}{name}.weight", value) for name, value in parts.items()]
    return found


def prompts_of(options: argparse.Namespace, batch: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(batch)
    return torch.randint(0, options.vocabulary, (batch, options.prompt), generator=source)


def generate_ours(bench: Bench, engine: Engine, prompts: torch.Tensor, **fields: Any) -> list[TokenEvent]:  # noqa: ANN401
    for index, prompt in enumerate(prompts.tolist()):
        request_fields: dict[str, Any] = {"max_new_tokens": bench.options.new, "temperature": 0} | fields
        engine.submit(GenerationRequest(id=str(index), prompt=tuple(prompt), **request_fields))
    events: list[TokenEvent] = []
    others: list[object] = []
    while engine.is_busy:
        for event in engine.step():
            if isinstance(event, TokenEvent):
                events.append(event)
            else:
                others.append(event)
    assert len(events) == len(prompts) * bench.options.new, others
    return events


def generate_theirs(bench: Bench, prompts: torch.Tensor) -> torch.Tensor:
    new = bench.options.new
    ids = prompts.to(bench.device.torch_device)
    with torch.no_grad():
        tokens: torch.Tensor = bench.theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            cache_implementation="static",
        )
    assert tokens.shape == (len(prompts), bench.options.prompt + new)
    return tokens


def seconds(bench: Bench, call: Callable[[], object]) -> float:
    bench.wait()
    began_s = time.perf_counter()
    call()
    bench.wait()
    return time.perf_counter() - began_s


def check_equal(bench: Bench, batch: int, **changes: Any) -> dict[str, Any]:  # noqa: ANN401 - fields of Options
    """Our logits against their forward pass without a cache over what we generated, in deviations of a logit."""
    _, engine = bench.open(batch, **changes)
    prompts = prompts_of(bench.options, batch)
    events = generate_ours(bench, engine, prompts, logits=True)
    differences, same = [], 0
    for row, prompt in enumerate(prompts):
        mine = [event for event in events if event.request_id == str(row)]
        whole = torch.cat((prompt, torch.tensor([event.token for event in mine])))[None].to(bench.device.torch_device)
        with torch.no_grad():
            theirs = bench.theirs(whole).logits[0, len(prompt) - 1 : -1].float().cpu()
        ours = torch.stack([event.logits for event in mine if event.logits is not None])
        differences.append(((ours - theirs).abs().amax() / theirs.std()).item())
        same += int((ours.argmax(1) == theirs.argmax(1)).sum())
    bound = BOUND_BF16 if bench.device.is_cuda else BOUND_FP32
    assert max(differences) < bound, f"logits differ by {max(differences)} deviations, more than {bound}"
    return {"largest_difference": max(differences), "bound": bound, "same_token": same, "tokens": len(events)}


def check_no_waits(bench: Bench, batch: int, **changes: Any) -> dict[str, int]:  # noqa: ANN401 - fields of Options
    """Forward passes of decode steps where torch raises if the host waits for the device, and a profile of them."""
    gang, engine = bench.open(batch, **changes)
    generate_ours(bench, engine, prompts_of(bench.options, batch))
    segments = tuple(Segment(slot=slot, start=bench.options.prompt, tokens=(1,)) for slot in range(batch))
    plan = StepPlan(segments=segments, outputs=tuple(OutputRequest(row=row) for row in range(batch)), decode=True)
    gang.runner.run(plan)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            gang.runner.run(plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    bench.wait()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile, torch.profiler.record_function("steps"):
        for _ in range(5):
            gang.runner.run(plan)
    events = list(profile.events())
    (span,) = [event.time_range for event in events if event.name == "steps" and event.device_type.name == "CPU"]
    inside = [event for event in events if span.start <= event.time_range.start < span.end]
    waits = sum(event.name in WAITS for event in inside)
    assert waits == 0, f"{waits} waits inside of 5 forward passes"
    return {"forward_passes": 5, "waits": waits, "graph_launches": sum(e.name == "cudaGraphLaunch" for e in inside)}


def median_bounds(values: list[float], level: float = 0.95) -> tuple[float, float]:
    """Bounds of the median at this level or above, from the order of the values alone (sign test)."""
    ordered, tail = sorted(values), (1 - level) / 2
    outside = max(k for k in range(len(values) // 2) if binomial_at_least(len(values) - k, len(values), 0.5) <= tail)
    return ordered[outside], ordered[-1 - outside]


def compare(bench: Bench, batch: int) -> dict[str, Any]:
    """Alternating blocks, and what their ratios say."""
    _, engine = bench.open(batch)
    prompts = prompts_of(bench.options, batch)

    def ours() -> object:
        return generate_ours(bench, engine, prompts)

    def theirs() -> object:
        return generate_theirs(bench, prompts)

    for _ in range(2):  # graphs, compilation
        ours()
        theirs()
    blocks: dict[str, list[float]] = {"ours": [], "theirs": []}
    for pair in range(bench.options.pairs):
        order = ("ours", "theirs") if pair % 2 else ("theirs", "ours")
        for name in order:
            blocks[name].append(seconds(bench, ours if name == "ours" else theirs))
    tokens = batch * bench.options.new
    ratios = [their_s / our_s for our_s, their_s in zip(blocks["ours"], blocks["theirs"], strict=True)]
    low, high = median_bounds(ratios)
    return {
        "tokens_per_s": {name: tokens / statistics.median(values) for name, values in blocks.items()},
        "ours_over_theirs": {"median": statistics.median(ratios), "low": low, "high": high},
        "seconds": blocks,
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "as served": {},
    "not fused": {"fuse": False},
    "mask kernel": {"decode_kernel": "mask"},
    "no graphs": {"cuda_graphs": False},
}


def measure_variants(bench: Bench, batch: int) -> dict[str, float]:
    """Tokens per second of our own ways, each alone: median of three calls."""
    found = {}
    for name, changes in VARIANTS.items():
        _, engine = bench.open(batch, **changes)
        prompts = prompts_of(bench.options, batch)
        generate_ours(bench, engine, prompts)
        times = [seconds(bench, lambda: generate_ours(bench, engine, prompts)) for _ in range(3)]  # noqa: B023 - called here
        found[name] = batch * bench.options.new / statistics.median(times)
    return found


def work(options: argparse.Namespace) -> dict[str, Any]:
    device = prepare_device(0)
    config = parse(flags(options, bf16=device.is_cuda))
    layout = generation_layout(config)
    initialize_groups(config, layout, device)
    model = build_model(config, layout, device, vocab_size=options.vocabulary)
    bench = Bench(
        options=options,
        config=config,
        layout=layout,
        device=device,
        model=model,
        theirs=build_theirs(options, model, device),
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    results: dict[str, Any] = {"device": device.name, "torch": torch.__version__, "parameters": parameters}
    print(f"{device.name}: {parameters / 1e9:.2f} billion parameters", flush=True)
    for batch in options.batches:
        results[f"batch {batch}"] = row = measure(bench, batch)
        options.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
        speed, ratio = row["compared"]["tokens_per_s"], row["compared"]["ours_over_theirs"]
        print(
            f"batch {batch}: ours {speed['ours']:.1f} tokens/s, transformers {speed['theirs']:.1f}, ratio "
            f"{ratio['median']:.3f} (95 %: {ratio['low']:.3f} to {ratio['high']:.3f})",
            flush=True,
        )
    destroy_groups()
    return results


def measure(bench: Bench, batch: int) -> dict[str, Any]:
    row: dict[str, Any] = {"equal": {"as served": check_equal(bench, batch)}}
    if bench.device.is_cuda:
        row["equal"]["mask kernel"] = check_equal(bench, batch, decode_kernel="mask")
        row["waits"] = {name: check_no_waits(bench, batch, **VARIANTS[name]) for name in ("as served", "no graphs")}
        row["variants"] = measure_variants(bench, batch)
    for name, value in row.items():
        print(f"batch {batch}, {name}: {json.dumps(value)}", flush=True)
    gc.collect()
    row["compared"] = compare(bench, batch)
    return row


def options_of(description: str | None, rounds: str, out: str, *switches: str) -> argparse.Namespace:
    """The command line of a measurement of this model; `turns` is the word for how often its blocks take turns, and
    `switches` are its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--ffn", type=int, default=5632)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument(f"--{rounds}", type=int, default=12)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(out))
    for switch in switches:
        parser.add_argument(switch, action="store_true")
    options = parser.parse_args()
    if getattr(options, rounds) < math.ceil(1 - math.log2(0.05)):
        parser.error(f"--{rounds} must be 6 or more, for bounds of 95 %")
    return options


def main() -> int:
    options = options_of(__doc__, "pairs", "gpu_generate.json")
    warnings.filterwarnings("ignore", category=FutureWarning)
    work(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
