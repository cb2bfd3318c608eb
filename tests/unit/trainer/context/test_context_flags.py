"""Flags of ranks that share a sequence: taken, or refused with what to write instead."""

import pytest

from megatronapp_trainer.config import parse
from megatronapp_trainer.errors import UsageErrors
from megatronapp_trainer.training.check import find_problems

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --group-query-attention --num-query-groups 4 "
    "--seq-length 32 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --vocab-size 60"
)
PLAIN = f"{BASE} --attention-dropout 0"
CP2, CP4 = "--context-parallel-size 2", "--context-parallel-size 4"
HEADS = "--cp-comm-type a2a"
TP2 = "--tensor-model-parallel-size 2"


@pytest.mark.parametrize(
    "flags",
    [
        f"{PLAIN} {CP4}",
        f"{PLAIN} {CP2} --cp-comm-type p2p {TP2} --sequence-parallel --use-distributed-optimizer",
        f"{BASE} {CP2} {HEADS} --window-size 7,0",
        f"{PLAIN} {CP2} --pipeline-model-parallel-size 2 --use-dpp",
        f"{PLAIN} {CP2} --transformer-impl torch --position-embedding-type rope",
    ],
)
def test_layouts_are_taken(flags: str) -> None:
    parse(flags.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{PLAIN} --context-parallel-size 0", "--context-parallel-size 0 must be 1 or more"),
        (f"{PLAIN} {HEADS}", "--cp-comm-type needs --context-parallel-size above 1"),
        (f"{PLAIN} {CP2} --cp-comm-type all_gather", "all_gather is not supported; write p2p, which needs less memory"),
        (f"{PLAIN} {CP2} --cp-comm-type a2a+p2p", "a2a+p2p is not supported; write a2a within a node"),
        (f"{PLAIN} {CP2} --cp-comm-type ring", "ring is not supported; write p2p or a2a"),
        (f"{PLAIN} {CP2} --cp-comm-type p2p a2a p2p a2a", "give a single value, p2p or a2a"),
        (f"{PLAIN} {CP2} --hierarchical-context-parallel-sizes 2 1", "does not support"),
        (f"{BASE} {CP2}", "write --attention-dropout 0 or --cp-comm-type a2a"),
        (f"{PLAIN} {CP2} --window-size 7,0", "p2p has no --window-size; write --cp-comm-type a2a"),
        (f"{PLAIN} --context-parallel-size 3 --seq-length 32", "divides a sequence into 6 chunks"),
        (
            f"{PLAIN} {CP2} --tensor-model-parallel-size 8 --num-query-groups 8 --sequence-parallel --seq-length 24",
            "--seq-length 24 must be a multiple of --tensor-model-parallel-size 8 x 2",
        ),
        (
            f"{PLAIN} --context-parallel-size 16 {HEADS}",
            "--num-attention-heads 8 is not a multiple of --tensor-model-parallel-size 1 x --context-parallel-size 16",
        ),
        (f"{PLAIN} {CP4} {HEADS} {TP2}", "the 4 heads of keys (--num-query-groups) are not a multiple"),
        (f"{PLAIN} {CP2} --transformer-impl local", "with --transformer-impl local; write torch"),
        (f"{PLAIN} {CP2} --transformer-impl transformer_engine", "write torch"),
        (f"{PLAIN} {CP2} --num-experts 4 --disable-bias-linear", "cannot be combined with --num-experts yet"),
        (f"{PLAIN} {CP2} --forward-backward-disaggregating", "with --forward-backward-disaggregating yet"),
        (f"{PLAIN} {CP2} --training-control", "cannot be combined with --training-control yet"),
        (f"{PLAIN} {CP2} --scope-capture-interval 5", "cannot be combined with --scope-capture-interval yet"),
    ],
)
def test_wrong_flags_are_refused(flags: str, message: str) -> None:
    with pytest.raises(UsageErrors) as caught:
        parse(flags.split())
    assert message in str(caught.value)


def test_worlds_that_are_not_whole_replicas_are_refused() -> None:
    flags = f"{PLAIN} {CP4} {TP2}".split()
    assert find_problems(flags, 16) == []
    (problem,) = find_problems(flags, 12)
    assert "--tensor-model-parallel-size 2 x --context-parallel-size 4 x" in problem.message
    assert "start a multiple of 8 ranks" in problem.message


def test_ranks_of_a_sequence_are_a_single_replica() -> None:
    assert parse(f"{PLAIN} {CP4} {TP2}".split()).world_size(3) == 24
