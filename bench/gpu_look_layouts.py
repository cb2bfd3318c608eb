"""Captures of a model on several GPUs of a host: every layout compared with one GPU.

    python bench/gpu_look_layouts.py --gpus 2 --out gpu_look_layouts.json

Each layout generates in fp32 over NCCL with CUDA graphs, first without, then with a capture and pinned
heads. Tokens must be equal in all of them; the numbers of prompts and steps, merged as the hub merges them, must agree
with those of one GPU within 1e-3 of the largest number of their kind, codes within one code. Pictures of heads are not
compared. Without GPUs the same over gloo: give --layers 2 --hidden 64 --gpus 2.
"""

import argparse
import collections
import json
import pathlib
import pickle
import sys
import tempfile
from typing import Any

import numpy as np
import torch
from gpu_generate_layouts import LAYOUTS, MODEL, VOCABULARY, requests
from gpu_ranks import give_up_after, run_ranks

from megatronapp_analyzer.scope.parts.merge import MergedTensor, ShardTensor, merge, shard_tensors_of
from megatronapp_common.frames import FrameType, decode, encode
from megatronapp_common.scope.protocol import Tensor, build_frame
from megatronapp_common.scope.protocol_requests import CaptureSettings
from megatronapp_trainer.config import parse
from megatronapp_trainer.device import prepare_device
from megatronapp_trainer.inference.build import build_model, generation_layout, open_worker_group
from megatronapp_trainer.inference.engine import Engine
from megatronapp_trainer.inference.events import TokenEvent
from megatronapp_trainer.inference.model_runner import RunnerOptions
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.parallel.groups import destroy_groups, initialize_groups
from megatronapp_trainer.scope.capture.step_capture import StepCapture
from megatronapp_trainer.scope.coordinator import CaptureCoordinator
from megatronapp_trainer.scope.transfer.publisher import FrameJob

RUN = "0" * 12
TOLERANCE = 1e-3
"""Largest difference, relative to the largest number of a tensor."""


def work(options: argparse.Namespace) -> None:
    """One rank of one layout."""
    give_up_after()
    tensor, pipeline = LAYOUTS[options.layout]
    shape = f"--num-layers {options.layers} --hidden-size {options.hidden}"
    groups = f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}"
    config = parse(f"{MODEL} {shape} {groups}".split())
    layout = generation_layout(config)
    device = prepare_device(layout.local_rank)
    initialize_groups(config, layout, device)
    model = build_model(config, layout, device, vocab_size=VOCABULARY)
    limits = RunnerOptions(slots=8, capacity=512, prefill_chunk=128, fuse=False)
    gang = open_worker_group(model, config, layout, device, limits, vocab_size=VOCABULARY)
    jobs: list[FrameJob] = []
    session = StepCapture(gang.runner, attempt=0, sink=jobs.append)
    session.attach(gang)
    tokens: list[list[list[int]]] = []
    if layout.rank == 0:
        engine = Engine(gang)
        leader = CaptureCoordinator(engine, session, jobs.append)
        tokens = [generated(engine, leader, capture=capture) for capture in (False, True, True)]
        engine.close()
    else:
        gang.follow()
    if device.is_cuda:
        torch.cuda.synchronize()
    assert all(job.ready() for job in jobs)
    frames = [encode(frame) for job in jobs for part in job.split() for frame in part.build()]
    answer = {"tp": layout.tensor_rank, "tokens": tokens, "frames": frames}
    options.out.with_name(f"rank{layout.rank}").write_bytes(pickle.dumps(answer))
    destroy_groups()


def generated(engine: Engine, leader: CaptureCoordinator, *, capture: bool) -> list[list[int]]:
    """Tokens of all requests, which are pure functions of their seeds."""
    generation_requests: list[GenerationRequest] = requests()
    if capture:
        leader.set_basis(basis(leader._capture.shard.num_layers, leader._capture.shard.hidden))
        pinned = [{"layer": layer, "head": head} for layer, head in ((0, 0), (1, 7), (1, 3))]
        generation_requests = leader.begin_run(
            RUN, CaptureSettings.model_validate({"pinned": pinned}), generation_requests
        )
    tokens: dict[str, list[int]] = {request.id: [] for request in generation_requests}
    engine.submit(*generation_requests)
    while engine.is_busy:
        events = engine.step()
        leader.observe(events)
        for event in events:
            if isinstance(event, TokenEvent):
                tokens[event.request_id].append(event.token)
    return list(tokens.values())


def basis(layers: int, hidden: int) -> Any:  # noqa: ANN401 - Frame
    source = np.random.default_rng(0)
    mean = source.standard_normal((layers, hidden), dtype=np.float32)
    axes = source.standard_normal((layers, 8, hidden), dtype=np.float32)
    header = {"version": 1, "layers": list(range(layers))}
    return build_frame(FrameType.SCOPE_BASIS, header, [Tensor("mean", "f32", mean), Tensor("basis", "f32", axes)])


def run_layout(options: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """Start the ranks of a layout; what each of them wrote."""
    world = LAYOUTS[name][0] * LAYOUTS[name][1]
    with tempfile.TemporaryDirectory() as directory:
        shape = ["--layers", str(options.layers), "--hidden", str(options.hidden)]
        run_ranks([__file__, *shape, "--layout", name, "--out", f"{directory}/out"], world)
        return [pickle.loads(pathlib.Path(directory, f"rank{rank}").read_bytes()) for rank in range(world)]


def tables(answers: list[dict[str, Any]], layers: int) -> dict[tuple[int, str], MergedTensor]:
    """Numbers of the last run, by step and name, as the hub merges them."""
    shards: dict[tuple[int, str], list[ShardTensor]] = collections.defaultdict(list)
    for answer in answers:
        frames = [decode(data) for data in answer["frames"]]
        parts = [frame for frame in frames if frame.type == FrameType.SCOPE_PART]
        for frame in parts[len(parts) // 2 :]:  # both captured runs send the same
            for shard in shard_tensors_of(frame, answer["tp"]):
                name = shard.tensor.name
                pinned = f" {shard.layers} {shard.span}" if name == "attention" else ""
                if name != "atlas":
                    shards[frame.header["step"], name + pinned].append(shard)
    return {key: merge(found, layers=None if " " in key[1] else layers) for key, found in shards.items()}


def worst(ours: dict[tuple[int, str], MergedTensor], theirs: dict[tuple[int, str], MergedTensor]) -> dict[str, float]:
    """Largest difference of each tensor: in parts of its largest number, or in codes."""
    if set(ours) != set(theirs):
        raise SystemExit(f"other tensors: {sorted(set(ours) ^ set(theirs))[:4]}")
    out: dict[str, float] = collections.defaultdict(float)
    for key, table in theirs.items():
        mine, name = ours[key], key[1].partition(" ")[0]
        if mine.rows != table.rows or mine.data.shape != table.data.shape:
            raise SystemExit(f"{key}: {mine.data.shape} of {len(mine.rows)} rows, not {table.data.shape}")
        apart = float(np.abs(mine.data.astype(float) - table.data.astype(float)).max())
        unit = 1.0 if table.data.dtype.kind != "f" else max(float(np.abs(table.data).max()), 1e-9)
        out[name] = max(out[name], apart / unit)
    return dict(out)


def compare(options: argparse.Namespace) -> dict[str, Any]:
    names = [name for name, (tensor, pipeline) in LAYOUTS.items() if tensor * pipeline <= options.gpus]
    rows: dict[str, Any] = {}
    single = run_layout(options, "one")
    expected = tables(single, options.layers)
    for name in names:
        answers = single if name == "one" else run_layout(options, name)
        equal = all(tokens == single[0]["tokens"][0] for tokens in answers[0]["tokens"])
        apart = worst(tables(answers, options.layers), expected)
        rows[name] = {"tokens_equal": equal, "tensors": len(expected), "largest_differences": apart}
        print(f"{name}: tokens {'equal' if equal else 'DIFFER'}, {json.dumps(apart)}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=max(torch.cuda.device_count(), 1))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu_look_layouts.json"))
    parser.add_argument("--layout", choices=tuple(LAYOUTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.layout is not None:
        work(options)
        return 0
    rows = compare(options)
    options.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    limits = [
        value <= (1 if name == "attention" else TOLERANCE)
        for row in rows.values()
        for name, value in row["largest_differences"].items()
    ]
    return int(not all(limits) or not all(row["tokens_equal"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
