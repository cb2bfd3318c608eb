"""Generation on several GPUs of a host: tokens of every layout compared with one GPU, and tokens per second of each.

    python bench/gpu_generate_layouts.py --gpus 4 --out gpu_generate_layouts.json

Each layout runs in separate processes over NCCL, with CUDA graphs, in fp32, where tokens must be equal, and in bf16,
where they are counted. Without GPUs the same runs over gloo: give --layers 2 --hidden 64 --gpus 2.
"""

import argparse
import json
import pathlib
import sys
import tempfile
import time
from typing import Any

import torch
from gpu_ranks import give_up_after, run_ranks

from megatronapp_trainer.config import parse
from megatronapp_trainer.device import prepare_device
from megatronapp_trainer.inference.build import build_model, generation_layout, open_worker_group
from megatronapp_trainer.inference.engine import Engine
from megatronapp_trainer.inference.events import TokenEvent
from megatronapp_trainer.inference.model_runner import RunnerOptions
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.parallel.groups import destroy_groups, initialize_groups

LAYOUTS = {"one": (1, 1), "TP2": (2, 1), "PP2": (1, 2), "TP2xPP2": (2, 2), "TP4": (4, 1), "PP4": (1, 4)}
VOCABULARY, NEW = 512, 64
MODEL = (
    "--num-attention-heads 8 --group-query-attention --num-query-groups 4 --seq-length 512 --micro-batch-size 1 "
    f"--global-batch-size 1 --train-iters 1 --lr 1 --mock-data --vocab-size {VOCABULARY} --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --init-method-std 0.1 "
    "--untie-embeddings-and-output-weights --transformer-impl torch"
)


def requests() -> list[GenerationRequest]:
    """Eight prompts of unequal length; every second one is sampled."""
    source = torch.Generator().manual_seed(1)
    lengths = (5, 40, 130, 1, 64, 17, 99, 250)
    prompts = [tuple(torch.randint(0, VOCABULARY, (length,), generator=source).tolist()) for length in lengths]
    return [
        GenerationRequest(id=str(place), prompt=prompt, max_new_tokens=NEW, temperature=float(place % 2), seed=place)
        for place, prompt in enumerate(prompts)
    ]


def work(options: argparse.Namespace) -> None:
    """One rank of one layout."""
    give_up_after()
    tensor, pipeline = LAYOUTS[options.layout]
    shape = f"--num-layers {options.layers} --hidden-size {options.hidden} {'--bf16' if options.bf16 else ''}"
    groups = f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}"
    config = parse(f"{MODEL} {shape} {groups}".split())
    layout = generation_layout(config)
    device = prepare_device(layout.local_rank)
    initialize_groups(config, layout, device)
    model = build_model(config, layout, device, vocab_size=VOCABULARY)
    limits = RunnerOptions(slots=8, capacity=512, prefill_chunk=128)
    gang = open_worker_group(model, config, layout, device, limits, vocab_size=VOCABULARY)
    if layout.rank == 0:
        options.out.write_text(json.dumps(generate(Engine(gang))), encoding="utf-8")
    else:
        gang.follow()
    destroy_groups()


def generate(engine: Engine) -> dict[str, Any]:
    engine.warm_up()
    tokens: dict[str, list[int]] = {}
    began_s = time.perf_counter()
    for request in requests():
        engine.submit(request)
        tokens[request.id] = []
    while engine.is_busy:
        for event in engine.step():
            if isinstance(event, TokenEvent):
                tokens[event.request_id].append(event.token)
    seconds = time.perf_counter() - began_s
    engine.close()
    return {"tokens": tokens, "tokens_per_s": sum(map(len, tokens.values())) / seconds}


def run_layout(options: argparse.Namespace, name: str, *, bf16: bool) -> dict[str, Any]:
    """Start the ranks of a layout and wait for them."""
    world = LAYOUTS[name][0] * LAYOUTS[name][1]
    with tempfile.TemporaryDirectory() as directory:
        out = pathlib.Path(directory) / "out.json"
        shape = ["--layers", str(options.layers), "--hidden", str(options.hidden), *(["--bf16"] if bf16 else [])]
        run_ranks([__file__, *shape, "--layout", name, "--out", str(out)], world)
        answer: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return answer


def compare(options: argparse.Namespace, *, bf16: bool) -> dict[str, Any]:
    """All layouts that have room, against one process."""
    kind = "bf16" if bf16 else "fp32"
    names = [name for name, (tensor, pipeline) in LAYOUTS.items() if tensor * pipeline <= options.gpus]
    answers = {name: run_layout(options, name, bf16=bf16) for name in names}
    rows: dict[str, Any] = {}
    for name, answer in answers.items():
        pairs = [(answer["tokens"][key], tokens) for key, tokens in answers["one"]["tokens"].items()]
        whole = sum(mine == theirs for mine, theirs in pairs)
        rows[name] = {"equal_sequences": whole, "sequences": len(pairs), "tokens_per_s": answer["tokens_per_s"]}
        print(f"{kind} {name}: {whole} of {len(pairs)} equal, {answer['tokens_per_s']:.1f} tokens/s", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=max(torch.cuda.device_count(), 1))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu_generate_layouts.json"))
    parser.add_argument("--layout", choices=tuple(LAYOUTS), help=argparse.SUPPRESS)
    parser.add_argument("--bf16", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.layout is not None:
        work(options)
        return 0
    results = {kind: compare(options, bf16=kind == "bf16") for kind in ("fp32", "bf16")}
    options.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return int(any(row["equal_sequences"] != row["sequences"] for row in results["fp32"].values()))


if __name__ == "__main__":
    sys.exit(main())
