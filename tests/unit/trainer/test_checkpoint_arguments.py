"""Arguments that must match, and the messages when they do not."""

import json
from dataclasses import replace
from typing import Any

from megatronapp_trainer.checkpoint import arguments
from megatronapp_trainer.checkpoint.directory import Manifest
from megatronapp_trainer.config import DataConfig, ModelConfig, OptimizerConfig, TrainerConfig, TrainingConfig

CONFIG = TrainerConfig(
    model=ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=4, seq_length=32),
    training=TrainingConfig(micro_batch_size=1, train_iters=10),
    optimizer=OptimizerConfig(lr=1e-3),
    data=DataConfig(mock_data=True, vocab_size=100),
)
STORED = json.loads(json.dumps(arguments.record(CONFIG)))


def test_the_same_run_fits() -> None:
    assert arguments.conflict(STORED, CONFIG, optimizer=True) is None
    assert arguments.notes(STORED, CONFIG) is None


def test_another_model_is_named() -> None:
    other = replace(CONFIG, model=replace(CONFIG.model, hidden_size=128, swiglu=True))
    reason = arguments.conflict(STORED, other, optimizer=False)
    assert reason is not None
    assert "--hidden-size (64 there, 128 here)" in reason
    assert "--swiglu (off there, on here)" in reason
    assert "--num-layers" not in reason


def test_a_default_spelled_out_is_no_difference() -> None:
    spelled = replace(CONFIG, model=replace(CONFIG.model, ffn_hidden_size=256, kv_channels=16))
    assert arguments.conflict(STORED, spelled, optimizer=True) is None


def test_the_optimizer_matters_only_where_it_is_read() -> None:
    other = replace(CONFIG, parallel=replace(CONFIG.parallel, use_distributed_optimizer=True))
    assert arguments.conflict(STORED, other, optimizer=False) is None
    reason = arguments.conflict(STORED, other, optimizer=True)
    assert reason is not None
    assert "--use-distributed-optimizer (off there, on here)" in reason
    assert "--no-load-optim" in reason


def test_another_order_of_samples_gives_a_note() -> None:
    other = replace(CONFIG, training=replace(CONFIG.training, seed=7, train_iters=20))
    note = arguments.notes(STORED, other)
    assert note is not None
    assert "--seed (1234 there, 7 here)" in note
    assert "--train-iters (10 there, 20 here)" in note
    assert arguments.conflict(STORED, other, optimizer=True) is None


def test_another_padding_of_the_vocabulary_gives_a_note_if_its_size_changes() -> None:
    finer = replace(CONFIG, model=replace(CONFIG.model, make_vocab_size_divisible_by=64))  # 128 rows as well
    assert arguments.notes(STORED, finer) is None
    note = arguments.notes(STORED, replace(CONFIG, model=replace(CONFIG.model, make_vocab_size_divisible_by=200)))
    assert note is not None
    assert "rows without a token" in note
    assert "--make-vocab-size-divisible-by (128 there, 200 here)" in note


def test_other_masks_and_other_lengths_of_bert_give_notes() -> None:
    bert = replace(CONFIG, model=replace(CONFIG.model, model_type="bert"))
    stored = json.loads(json.dumps(arguments.record(bert)))
    assert arguments.notes(stored, bert) is None
    masks = replace(bert, data=replace(bert.data, mask_prob=0.3))
    note = "other tokens are masked than before, because this run differs in --mask-prob (0.15 there, 0.3 here)"
    assert arguments.notes(stored, masks) == note
    assert arguments.order_samples(of_run(stored, 160), masks, 1) == 160
    both = replace(masks, data=replace(masks.data, short_seq_prob=0.2))
    order = "samples are read in another order than before, because this run differs in --short-seq-prob (0.1 there, "
    assert arguments.notes(stored, both) == f"{order}0.2 here); {note}"
    assert arguments.order_samples(of_run(stored, 160), both, 1) is None
    assert arguments.conflict(stored, both, optimizer=True) is None


def test_a_checkpoint_of_an_earlier_release_has_no_norms_of_queries_and_keys() -> None:
    old = {flag: value for flag, value in STORED.items() if flag != "--qk-layernorm"}
    assert arguments.conflict(old, CONFIG, optimizer=True) is None
    normed = replace(CONFIG, model=replace(CONFIG.model, qk_layernorm=True))
    assert "--qk-layernorm (off there, on here)" in str(arguments.conflict(old, normed, optimizer=True))


def test_a_checkpoint_without_a_model_type_holds_gpt() -> None:
    old = {flag: value for flag, value in STORED.items() if flag != "--model-type"}
    assert arguments.conflict(old, CONFIG, optimizer=True) is None
    bert = replace(CONFIG, model=replace(CONFIG.model, model_type="bert"))
    assert "--model-type (gpt there, bert here)" in str(arguments.conflict(old, bert, optimizer=False))


def of_run(stored: dict[str, Any], order_samples: int | None = None) -> Manifest:
    return Manifest(
        iteration=2,
        consumed_samples=4,
        skipped_iterations=0,
        attempt=0,
        layout={},
        optimizer="plain",
        random_states=True,
        arguments=stored,
        order_samples=order_samples,
    )


def test_a_run_of_an_earlier_release_keeps_its_order_under_a_ramp_up() -> None:
    """Check a release in which all steps counted in full, and neither flag was kept."""
    ramp = replace(CONFIG, training=replace(CONFIG.training, global_batch_size=16, rampup_batch_size=(2, 2, 100)))
    new = json.loads(json.dumps(arguments.record(ramp)))
    old = {flag: value for flag, value in new.items() if flag not in ("--train-samples", "--rampup-batch-size")}
    assert arguments.order_samples(of_run(old), ramp, 1) == 160
    assert arguments.order_samples(of_run(new), ramp, 1) is None
    assert arguments.order_samples(of_run(new, 160), ramp, 1) == 160
    assert arguments.order_samples(of_run(old), CONFIG, 1) is None
    longer = replace(ramp, training=replace(ramp.training, train_iters=20))
    for stored in (of_run(old), of_run(new, 160)):
        assert arguments.order_samples(stored, longer, 1) is None
        assert "in another order" in str(arguments.notes(stored.arguments, longer))


def test_the_layout_does_not_matter() -> None:
    other = replace(CONFIG, parallel=replace(CONFIG.parallel, tensor_model_parallel_size=2))
    assert arguments.conflict(STORED, other, optimizer=True) is None


def test_only_learned_positions_are_part_of_the_model() -> None:
    longer = replace(CONFIG, model=replace(CONFIG.model, max_position_embeddings=64))
    reason = arguments.conflict(STORED, longer, optimizer=False)
    assert reason is not None
    assert "--max-position-embeddings (32 there, 64 here)" in reason
    rope = replace(CONFIG, model=replace(CONFIG.model, position_embedding_type="rope"))
    stored = arguments.record(rope)
    assert stored["--max-position-embeddings"] == 32
    longer = replace(rope, model=replace(rope.model, max_position_embeddings=64))
    assert arguments.conflict(stored, longer, optimizer=False) is None
