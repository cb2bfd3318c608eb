"""Flags of mixtures of experts: taken, or refused with what to write instead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.config import ModelConfig, parse
from megatronapp_trainer.config.checks import check_world
from megatronapp_trainer.errors import UsageErrors
from megatronapp_trainer.training.metrics import flops_per_token

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --train-iters 1 "
    "--lr 1e-3 --mock-data --vocab-size 60"
)
EXPERTS = f"{BASE} --disable-bias-linear --num-experts 4"


def refusal(flags: str) -> str:
    with pytest.raises(UsageErrors) as caught:
        parse(flags.split())
    return str(caught.value)


def test_flags_of_a_deepseek_model_are_taken() -> None:
    config = parse(
        f"{EXPERTS} --moe-router-topk 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-topk-scaling-factor 2.5 "
        "--moe-layer-freq ([0]*1+[1]*3) --moe-shared-expert-intermediate-size 32 --moe-ffn-hidden-size 16 "
        "--moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 1e-3 1e-4 "
        "--moe-token-dispatcher-type alltoall --moe-grouped-gemm --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1".split()
    )
    assert config.model.expert_layers(4) == (False, True, True, True)
    assert config.model.balancing_losses == ("seq_aux_loss", "global_aux_loss")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{BASE} --num-experts 4", "--num-experts needs --disable-bias-linear"),
        (f"{BASE} --moe-router-topk 3", "--moe-router-topk needs --num-experts"),
        (f"{BASE} --expert-model-parallel-size 2", "--expert-model-parallel-size 2 needs --num-experts"),
        (f"{EXPERTS} --expert-model-parallel-size 3", "must be a multiple of --expert-model-parallel-size 3"),
        (f"{EXPERTS} --tensor-model-parallel-size 2", "needs --sequence-parallel"),
        (f"{EXPERTS} --expert-tensor-parallel-size 2", "--expert-tensor-parallel-size 2 is not supported"),
        (f"{EXPERTS} --moe-router-topk 5", "--moe-router-topk 5 is more than --num-experts 4"),
        (f"{EXPERTS} --moe-router-topk 1", "needs --moe-router-pre-softmax"),
        (f"{EXPERTS} --moe-router-enable-expert-bias", "needs --moe-router-score-function sigmoid"),
        (f"{EXPERTS} --moe-router-num-groups 2", "together, or neither"),
        (f"{EXPERTS} --moe-router-num-groups 3 --moe-router-group-topk 1", "a multiple of --moe-router-num-groups 3"),
        (f"{EXPERTS} --moe-router-num-groups 4 --moe-router-group-topk 1", "fit into its groups"),
        (f"{EXPERTS} --moe-router-load-balancing-type even", "take one of aux_loss"),
        (f"{EXPERTS} --moe-router-load-balancing-type aux_loss seq_aux_loss", "has 2 names"),
        (f"{EXPERTS} --moe-router-load-balancing-type none --moe-aux-loss-coeff 1", "none adds none"),
        (
            f"{EXPERTS} --moe-router-load-balancing-type aux_loss none --moe-aux-loss-coeff 1 0",
            "none cannot be combined",
        ),
        (f"{EXPERTS} --moe-aux-loss-coeff -1", "must be 0 or more"),
        (f"{EXPERTS} --moe-aux-loss-coeff nan", "must be 0 or more"),
        (f"{EXPERTS} --moe-pad-expert-input-to-capacity", "needs --moe-expert-capacity-factor"),
        (
            f"{EXPERTS} --moe-router-topk 3 --moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity",
            "a capacity of more than all tokens; give at most 1.333",
        ),
        (f"{EXPERTS} --moe-token-drop-policy position", "needs --moe-expert-capacity-factor"),
        (f"{EXPERTS} --moe-grouped-gemm --moe-ffn-hidden-size 20", "--moe-grouped-gemm needs multiples of 8"),
        (f"{EXPERTS} --moe-shared-expert-gate", "needs --moe-shared-expert-intermediate-size"),
        (f"{EXPERTS} --moe-token-dispatcher-type flex", "invalid choice: 'flex'"),
        (f"{EXPERTS} --moe-permute-fusion", "does not support yet"),
        (f"{EXPERTS} --model-type bert", "not supported with --model-type bert"),
        (f"{EXPERTS} --transformer-impl transformer_engine", "write torch or local"),
        (f"{EXPERTS} --training-control", "--training-control is not supported with --num-experts yet"),
        (f"{EXPERTS} --scope-capture-interval 5", "--scope-capture-interval is not supported with --num-experts"),
        (f"{EXPERTS} --forward-backward-disaggregating", "cannot be combined yet"),
        (
            f"{EXPERTS} --pipeline-model-parallel-size 2 --use-dpp --expert-model-parallel-size 2",
            "--use-dpp needs --expert-model-parallel-size 1",
        ),
        (f"{EXPERTS} --moe-layer-freq [0]*4", "gives no layer experts"),
        (
            f"{EXPERTS} --moe-layer-freq [0]*2+[1]*2 --pipeline-model-parallel-size 2",
            "gives no experts to pipeline rank 0 of 2",
        ),
        (
            f"{EXPERTS} --moe-layer-freq [0,1,1,0] --pipeline-model-parallel-size 2 "
            "--num-virtual-stages-per-pipeline-rank 2 --use-dpp --dpp-placement vee",
            "gives no experts to pipeline rank 0 of 2",
        ),
        (f"{EXPERTS} --moe-layer-freq 0", "must be 1 or more"),
        (f"{EXPERTS} --moe-layer-freq [1]*3", "it has 3 layers, and the model 4"),
        (f"{EXPERTS} --moe-layer-freq [1]*3+[2]", "only 0 (no experts) and 1"),
        (f"{EXPERTS} --moe-layer-freq __import__('os').getcwd()", "neither a number nor a list"),
        (f"{EXPERTS} --moe-layer-freq [1]*99999999999", "it is a list of 99999999999 layers"),
        (f"{EXPERTS} --moe-layer-freq [1", "neither a number nor a list"),
    ],
)
def test_wrong_flags_are_refused(flags: str, message: str) -> None:
    assert message in refusal(flags)


def test_numbers_of_replicas_that_experts_do_not_divide_are_refused() -> None:
    config = parse(f"{EXPERTS} --expert-model-parallel-size 2 --global-batch-size 6".split())
    check_world(config, 2)
    with pytest.raises(UsageErrors, match="3 replicas cannot share experts in groups"):
        check_world(config, 3)


@given(pattern=st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=3), st.integers(0, 3)), min_size=1, max_size=4))
def test_patterns_mean_what_they_mean_in_python(pattern: list[tuple[list[int], int]]) -> None:
    text = "+".join(f"{part}*{times}" for part, times in pattern)
    expected = [value == 1 for part, times in pattern for value in part * times]
    model = ModelConfig(num_experts=2, moe_layer_freq=text)
    assert model.expert_layers(len(expected)) == tuple(expected)


@given(every=st.integers(1, 5), layers=st.integers(1, 12))
def test_a_number_is_every_nth_layer_from_the_first(every: int, layers: int) -> None:
    found = ModelConfig(num_experts=2, moe_layer_freq=str(every)).expert_layers(layers)
    assert [layer for layer, has in enumerate(found) if has] == list(range(0, layers, every))


def test_operations_count_the_experts_of_a_token_only() -> None:
    dense = parse(f"{BASE} --disable-bias-linear --ffn-hidden-size 48".split()).model
    sparse = parse(f"{EXPERTS} --moe-ffn-hidden-size 24 --moe-router-topk 2".split()).model
    shared = parse(f"{EXPERTS} --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 40".split()).model
    router = 6.0 * 4 * 64 * 4
    assert flops_per_token(sparse, 128) == flops_per_token(dense, 128) + router
    assert flops_per_token(shared, 128) == flops_per_token(sparse, 128) + 6.0 * 4 * 2 * 64 * 40
