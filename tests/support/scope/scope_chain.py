"""A served model in real ranks for tests of MegaScope's whole chain, and plain torch's numbers on the same weights.

All functions here but `request_of` and `until_ranks_project` run in ranks, where torch is imported.
"""

import asyncio
import dataclasses
import os
import pathlib
import signal
import threading
from typing import Any

VOCABULARY = 300
POSITIONS = 512
TEXTS = ["hello world, this is a small text about whales and ships. " * 20, "né à Paris, 日本語 " * 10]
PROMPTS = ("Whales né 日本 ", "this is a small text about ships, a hello to whales. " * 20)
"""The second one is longer than a tile of attention."""
TOKENS = 6
SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4"
ROTARY = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
VARIANTS = {
    "MHA": SHAPE,
    "GQA": f"{SHAPE} {ROTARY} --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights",
}
LAYOUTS = {
    "TP1 PP1": (1, ""),
    "TP2": (2, "--tensor-model-parallel-size 2"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "TP2 x PP2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}
CAPTURE: dict[str, Any] = {
    "pixels": {"qkv": 24, "mlp": 16},
    "pinned": [{"layer": 0, "head": 2}, {"layer": 1, "head": 1}, {"layer": 1, "head": 3}],
    "candidates": 10,
}


def request_of(tokens: int = TOKENS, prompts: tuple[str, ...] = PROMPTS) -> dict[str, Any]:
    """Return a request for a run: greedy, so that plain torch can predict its tokens."""
    return {"prompts": list(prompts), "tokens": tokens, "sampling": {"temperature": 0}, "capture": CAPTURE}


def write_model(folder: str, variant: str) -> None:
    """A tokenizer, and a checkpoint after one step on random tokens."""
    from megatronapp_trainer.data.tokenizer import train
    from megatronapp_trainer.pretrain import main

    train(TEXTS, VOCABULARY).backend.save(f"{folder}/tokenizer.json")
    steps = "--seq-length 32 --micro-batch-size 1 --train-iters 1 --lr 0.001 --eval-iters 0 --mock-data"
    wide = f"--max-position-embeddings {POSITIONS} --vocab-size {VOCABULARY} --init-method-std 0.2"
    assert main(f"{VARIANTS[variant]} {steps} {wide} --save {folder}/{variant}".split()) == 0


def flags_of(folder: str, variant: str, layout: str = "TP1 PP1") -> list[str]:
    """Command line of a server."""
    place = ["--load", f"{folder}/{variant}", "--tokenizer-file", f"{folder}/tokenizer.json", "--port", "0"]
    return [*place, "--prefill-chunk", "256", *LAYOUTS[layout][1].split()]


def serve_rank(folder: str, variant: str, layout: str, stop: str) -> int:
    """One rank of the server, whole, until the pipe `stop` is opened to write; its exit code."""
    from megatronapp_trainer.serve.rank_main import main

    def wait() -> None:
        pathlib.Path(stop).read_bytes()
        os.kill(os.getpid(), signal.SIGTERM)

    if os.environ["RANK"] == "0":
        threading.Thread(target=wait, daemon=True).start()
    return main(flags_of(folder, variant, layout))


def plain_sites(folder: str, variant: str, texts: list[list[int]]) -> list[dict[str, Any]]:
    """Alone: all sites of these tokens, by plain torch."""
    from generating_ranks import plain_of
    from plain_sites import SeenGpt

    from megatronapp_trainer.parallel.groups import destroy_groups
    from megatronapp_trainer.serve.rank_main import load
    from megatronapp_trainer.serve.settings import configure, read_command

    command = read_command(flags_of(folder, variant))
    config = configure(command)
    plain = plain_of(load(command, config).runner.model, config)
    seen = SeenGpt(plain._weights, dataclasses.replace(plain._shape, vocab_size=VOCABULARY))
    found = [seen.sites(ids) for ids in texts]
    destroy_groups()
    return found


async def until_ranks_project(pca: Any) -> None:
    """Wait until the ranks have the newest basis: pages get it first, and a run may begin in between."""
    while pca.given_version < pca.version:
        await asyncio.sleep(0.01)
