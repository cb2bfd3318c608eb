"""The functions between their tensors and ours, on tensors of any size; and the tables of names."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.checkpoint.convert import tensors
from megatronapp_trainer.checkpoint.convert.families import FAMILIES
from megatronapp_trainer.checkpoint.convert.families.config_keys import ConfigKeys
from megatronapp_trainer.checkpoint.convert.rules import steps
from megatronapp_trainer.checkpoint.convert.shape import ModelShape
from megatronapp_trainer.config import ModelConfig
from megatronapp_trainer.errors import CheckpointError

SHAPES = st.builds(
    lambda heads, groups, width, layers, vocab, mlp: ModelShape(
        model=ModelConfig(
            num_layers=layers,
            hidden_size=heads * groups * width,
            num_attention_heads=heads * groups,
            group_query_attention=True,
            num_query_groups=groups,
            kv_channels=width,
            ffn_hidden_size=mlp,
            seq_length=8,
            make_vocab_size_divisible_by=16,
            add_qkv_bias=True,
            untie_embeddings_and_output_weights=True,
            num_experts=layers + 1,
            moe_shared_expert_intermediate_size=mlp + 1,
        ),
        vocab_size=vocab,
    ),
    *(
        st.integers(1, 3),
        st.integers(1, 3),
        st.integers(1, 4),
        st.integers(1, 3),
        st.integers(1, 40),
        st.integers(1, 9),
    ),
)


@pytest.mark.parametrize("name", FAMILIES)
@given(shape=SHAPES)
def test_every_tensor_is_restored_unchanged(name: str, shape: ModelShape) -> None:
    import torch

    if name == "gpt2":  # has as many key heads as query heads
        shape = dataclasses.replace(shape, model=dataclasses.replace(shape.model, group_query_attention=False))
    seen: set[str] = set()
    for step in steps(FAMILIES[name].rules, shape, "p."):
        parts = [torch.randn(size) for size in step.sizes(shape)]
        ours = step.pack(parts, shape)
        assert tuple(ours.shape) == step.our_size(shape)
        back = step.unpack(ours, shape)
        assert [part.tolist() for part in back] == [part.tolist() for part in parts]
        assert not seen & set(step.names)
        seen |= set(step.names)
    assert f"p.{FAMILIES[name].embedding}" in seen


@given(vocab=st.integers(1, 40), multiple=st.integers(1, 20))
def test_rows_without_a_token_repeat_the_last_row(vocab: int, multiple: int) -> None:
    """So that their logits are those of a token: 0 could be far above all of them."""
    import torch

    model = ModelConfig(
        num_layers=1, hidden_size=4, num_attention_heads=1, seq_length=8, make_vocab_size_divisible_by=multiple
    )
    weight = torch.randn(vocab, 4)
    rows = tensors.padded([weight], ModelShape(model=model, vocab_size=vocab))
    assert rows.size(0) % multiple == 0
    assert torch.equal(rows[:vocab], weight)
    assert torch.equal(rows[vocab:], weight[-1].expand(rows.size(0) - vocab, -1))


def test_query_key_and_value_are_stored_group_by_group() -> None:
    import torch

    from megatronapp_trainer.checkpoint.convert.tensors import interleaved

    model = ModelConfig(hidden_size=4, num_attention_heads=4, group_query_attention=True, num_query_groups=2)
    rows = [torch.tensor(values) for values in ([0, 1, 2, 3], [10, 11], [20, 21])]
    assert interleaved(rows, ModelShape(model=model, vocab_size=1)).tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(name: str, **values: object) -> ModelConfig:
    return FAMILIES[name].read(ConfigKeys(LLAMA | values if name != "gpt2" else values, "config.json")).model


def test_both_spellings_of_rotary_positions() -> None:
    old = read("llama", rope_theta=500000.0, rope_scaling=LLAMA3)
    new = read("llama", rope_parameters=LLAMA3 | {"rope_theta": 500000.0})
    assert old == new
    assert (old.rotary_base, old.use_rope_scaling, old.rope_scaling_factor) == (500000, True, 32)
    assert read("llama", rope_scaling=None) == read("llama") == read("llama", rope_parameters={"rope_type": "default"})


def test_heads_of_qwen3_have_a_width_of_their_own() -> None:
    assert read("qwen3").head_width == 128
    assert read("qwen3", head_dim=32).head_width == 32
    assert read("qwen3", hidden_size=66).qk_layernorm
    assert not read("qwen2").qk_layernorm


def test_windows_count_the_token_itself_in_theirs_only() -> None:
    assert read("mistral").attention_window == 4095
    assert read("mistral", sliding_window=None).attention_window is None
    assert read("qwen2", sliding_window=64).attention_window is None
    assert read("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=0).attention_window == 63
    assert read("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=2).attention_window is None
    assert (
        read(
            "qwen2", use_sliding_window=True, sliding_window=64, layer_types=["sliding_attention"] * 2
        ).attention_window
        == 63
    )


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("llama", {"attention_bias": True}, "attention_bias is true; supported: false"),
        ("llama", {"mlp_bias": True}, "mlp_bias is true; supported: false"),
        ("llama", {"hidden_act": "relu"}, 'hidden_act is "relu"; supported: "silu"'),
        ("llama", {"rope_scaling": {"type": "yarn"}}, 'rope_scaling: type is "yarn"; supported: "default", "llama3"'),
        ("llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 2}}, "low_freq_factor is 2; supported: 1"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5; supported: 1"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads is 4; a multiple of num_key_value_heads (3) is"),
        ("llama", {"hidden_size": 66}, "hidden_size is 66; a multiple of num_attention_heads (4)"),
        ("llama", {"num_hidden_layers": "2"}, 'num_hidden_layers is "2"; a whole number above 0'),
        ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings is 1; true or false"),
        ("llama", {"rms_norm_eps": -1}, "rms_norm_eps is -1; a number above 0"),
        ("llama", {"rope_scaling": "llama3"}, 'rope_scaling is "llama3"; an object is needed'),
        ("mistral", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, "max_window_layers is 1; supported: one kind"),
        ("qwen3", {"attention_bias": True}, "attention_bias is true; supported: false"),
        ("gpt2", {"activation_function": "relu"}, 'activation_function is "relu"; supported: "gelu_new"'),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is true"),
        ("gpt2", {"n_embd": 65}, "n_embd is 65; a multiple of n_head"),
    ],
)
def test_what_is_not_supported_is_refused_under_its_key(name: str, values: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(name, **values)
    assert message in str(caught.value)
    assert str(caught.value).startswith("config.json: ")


@pytest.mark.parametrize("name", FAMILIES)
@given(shape=SHAPES, data=st.data())
def test_a_config_that_is_written_reads_as_the_same_model(name: str, shape: ModelShape, data: st.DataObject) -> None:
    family = FAMILIES[name]
    model = family.read(ConfigKeys(family.write(shape) if name != "gpt2" else {}, "")).model
    slides = name in ("mistral", "qwen2", "qwen3")
    windows = st.none() | st.integers(0, 99).map(lambda left: f"{left},0") if slides else st.none()
    scaled = name != "gpt2" and data.draw(st.booleans())
    model = dataclasses.replace(
        model,
        window_size=data.draw(windows),
        use_rope_scaling=scaled,
        rope_scaling_factor=32 if scaled else 8,
        rotary_base=500000 if scaled else 10000,
        untie_embeddings_and_output_weights=data.draw(st.booleans()),
    )
    changed = dataclasses.replace(shape, model=model)
    values = {"vocab_size": shape.vocab_size, **family.write(changed)}
    again = family.read(ConfigKeys(values, ""))
    assert again.model == model
