"""Forward pass of one rank: its layers of the model, its part of the cache, and transfers to its neighbours.

Shapes: N tokens of the step, packed; B slots of a decode step; H here the hidden size; R outputs, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable
from typing import Any, Literal

import torch

from megatronapp_trainer.device import Device
from megatronapp_trainer.device.compiling import can_compile
from megatronapp_trainer.device.cuda_graphs import GraphCache
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.hooks.forward_observer import ForwardObserver, ForwardResult, StepContext
from megatronapp_trainer.inference.model.cached_attention import (
    Attend,
    AttentionStep,
    CachedAttention,
    CurrentStep,
    FlashDecode,
    MaskedDecode,
    PrefillAttention,
    decode_mask,
)
from megatronapp_trainer.inference.model.kv_cache import KvCache, KvCacheShape
from megatronapp_trainer.inference.model.stage_transfer import StageTransfer
from megatronapp_trainer.inference.model.step_inputs import StepInputs
from megatronapp_trainer.inference.model.step_perturbation import StepPerturbation
from megatronapp_trainer.inference.perturbed_steps import PerturbedGraphs
from megatronapp_trainer.inference.step_plan import StepPlan
from megatronapp_trainer.parallel.layout import Layout

DecodeKernel = Literal["auto", "mask", "flash"]
_LEAST_ATTENDED = 64


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunnerOptions:
    """Settings of how a rank computes."""

    slots: int = 8
    """Number of sequences at a time."""
    capacity: int = 2048
    """Number of tokens of a sequence, prompt and generated ones together."""
    prefill_chunk: int = 512
    """Number of prompt tokens that one step reads at most, over all sequences."""
    decode_kernel: DecodeKernel = "auto"
    """Kernel flash: torch's flash kernel (CUDA, fp16 or bf16); mask: any device; auto: flash where it runs."""
    cuda_graphs: bool = True
    """Replay decode steps as CUDA graphs; without effect on a CPU."""
    fuse: bool = True
    """Compile rotation and SwiGLU to a kernel each (some 20 s at the first step); without effect on a CPU, and where
    there is no C compiler."""
    async_scheduling: bool | None = None
    """Launch a decode step before the tokens of the one before are read, where no stage needs them from another; None:
    on a GPU, where the host's work then costs no time."""

    def __post_init__(self) -> None:
        for name in ("slots", "capacity", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be 1 or more")


def cache_shape(model: Any, options: RunnerOptions) -> KvCacheShape:  # noqa: ANN401 - GPTModel
    """Return the size of this rank's cache. Raises UsageError if a slot has more tokens than the model positions."""
    learned = model.position_embedding_type == "learned_absolute"
    if learned and options.capacity > model.max_sequence_length:
        raise UsageError(
            f"capacity {options.capacity} is more than the model's {model.max_sequence_length} learned positions; "
            f"give at most {model.max_sequence_length}"
        )
    layers = model.decoder.layers
    heads = [layer.self_attention.num_query_groups_per_partition for layer in layers]
    return KvCacheShape(
        layers=len(layers),
        slots=options.slots,
        capacity=options.capacity,
        key_heads=heads[0] if heads else 1,
        channels=model.config.kv_channels,
        dtype=model.config.params_dtype,
    )


class ModelRunner:
    """A rank's model, ready to generate. The model's core attention is replaced for good."""

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - GPTModel, in evaluation mode
        layout: Layout,
        device: Device,
        options: RunnerOptions,
        *,
        vocab_size: int,
    ) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.options = options
        self.layout = layout
        self.observer: ForwardObserver | None = None
        """Observer that is called at the boundaries of each step; may be set between steps."""
        self.plan: StepPlan | None = None
        """Plan that was begun last. Forward hooks find here whose tokens they see: at prefill those of the segments in
        sequence, at decode one per slot, those of idle slots included.
        """
        self._device = device
        self._shape = cache_shape(model, options)
        self._holder = CurrentStep()
        self.cache = KvCache(self._shape, device.torch_device)
        for layer, cache in zip(model.decoder.layers, self.cache.layers(), strict=True):
            layer.self_attention.core_attention = CachedAttention(self._holder, cache)
        self._scale = model.config.softmax_scale or 1.0 / math.sqrt(model.config.kv_channels)
        self._window = _window(model.config)
        self._flash = _takes_flash(options.decode_kernel, device, self._shape)
        self._cos_TD, self._sin_TD = _rotary_tables(model, self._shape)
        self._fuse = device.is_cuda and options.fuse and can_compile()
        _fuse_swiglu(model, fuse=self._fuse)
        self._inputs = StepInputs(self._shape, device)
        self._transfer = StageTransfer(
            layout, hidden=model.config.hidden_size, dtype=self._shape.dtype, device=device.torch_device
        )
        self._buffer_set = 0
        self._graphs = GraphCache(enabled=device.is_cuda and options.cuda_graphs, forget=self._forgotten)
        self.perturbation = StepPerturbation(
            model,
            layout,
            device,
            vocab_size=vocab_size,
            slots=options.slots,
            capacity=options.capacity,
            step_tokens=max(options.slots, options.prefill_chunk),
            drop_graphs=self._graphs.drop,
            clear_slot=self.cache.clear_slot,
        )

    def run(self, plan: StepPlan, chosen_R: torch.Tensor | None = None) -> torch.Tensor | None:
        """Compute a plan together with the other ranks.

        Returns logits [R, V] of its outputs on the last stage, without meaning if it has none; None on other stages.

        `chosen_R`: tokens that the step before has chosen, on the device, for a plan that is ahead.
        """
        self.plan = plan
        self.perturbation.activate(plan)
        with torch.no_grad():
            result = self._decode(plan, chosen_R) if plan.decode else self._prefill(plan)
            self.perturbation.end_pass()
            if self.layout.is_last_stage:
                return result
            self._transfer.send(result)
            return None

    @property
    def uses_graphs(self) -> bool:
        """Return true if decode steps are replayed as CUDA graphs."""
        return self._graphs.enabled

    @property
    def capacity(self) -> int:
        """Return the most tokens of a sequence, prompt and generated ones together."""
        return self.options.capacity

    @property
    def keys_LZTGD(self) -> torch.Tensor:
        """Return the cached keys of this rank's layers, by slot, position, key head and channel."""
        return self.cache.keys_LZTGD

    @property
    def decode_sizes(self) -> list[int]:
        """Return the numbers of slots that decode steps have."""
        return sorted({_bucket(count, least=1, most=self.options.slots) for count in range(1, self.options.slots + 1)})

    def forget_graphs(self) -> None:
        """Capture graphs again from the next step on; needed after the forward hooks of the model have changed."""
        self._graphs.clear()

    def _prefill(self, plan: StepPlan) -> torch.Tensor:
        inputs_3N = self._inputs.of_prompts(plan)
        captured = self._begin(plan, inputs_3N)
        hidden = self._transfer.receive(inputs_3N.size(1))
        attend = PrefillAttention(segments=plan.segments, scale=self._scale, window=self._window)
        rows = self._selected([output.row for output in plan.outputs], inputs_3N.size(1))
        self.perturbation.begin_prefill(plan, inputs_3N[1], rows)
        result, found = self._seen(lambda: self._forward(inputs_3N, hidden, attend, rows), captured is not None)
        self._finish(found, result, captured is not None)
        return result

    def _decode(self, plan: StepPlan, chosen_R: torch.Tensor | None) -> torch.Tensor:
        """Decode all slots up to the last used one, so that shapes are few; results of idle slots are unused."""
        used = max(plan.least_slots, max(segment.slot for segment in plan.segments) + 1)
        slots = _bucket(used, least=1, most=self.options.slots)
        longest = max(segment.end for segment in plan.segments)
        attended = 0 if self._flash else _bucket(longest, least=_LEAST_ATTENDED, most=self.options.capacity)
        if plan.reads_chosen and chosen_R is not None:
            self._inputs.advance(plan, slots, chosen_R)
        else:
            self._inputs.fill(plan, slots)
        inputs_3B = self._inputs.of_slots(slots)
        self.perturbation.begin_decode(plan, inputs_3B[1])
        # First the observer: its reading of an earlier step on a separate stream uses buffers that are written below.
        captured = self._begin(plan, inputs_3B, chosen_R)
        # Two sets of buffers alternate while a step is observed: one is read while the step fills the other.
        self._buffer_set ^= captured is not None
        hidden = self._transfer.receive_decode(slots, None if captured is None else self._buffer_set)

        def forward() -> torch.Tensor:
            attend = self._decode_attention(inputs_3B[1], attended)
            return self._forward(inputs_3B, hidden, attend, None, fused=self._fuse)

        def seen() -> tuple[torch.Tensor, Any]:
            return self._seen(forward, captured is not None)

        buffer_set = 0 if captured is None else self._buffer_set
        family = captured if plan.digest is None else PerturbedGraphs(digest=plan.digest, captured=captured)
        result, found = self._graphs.run(family, (slots, attended), seen, buffer_set=buffer_set)
        if self.layout.is_last_stage:
            rows = self._selected([plan.segments[output.row].slot for output in plan.outputs], slots)
            result = result if rows is None else result.index_select(0, rows)
        self._finish(found, result, captured is not None)
        return result

    def _begin(self, plan: StepPlan, inputs_3N: torch.Tensor, chosen_R: torch.Tensor | None = None) -> Hashable:
        if self.observer is None:
            return None
        rows = tuple(output.row for output in plan.outputs)
        return self.observer.step_begin(
            StepContext(
                segments=plan.segments,
                output_rows=rows,
                decode=plan.decode,
                positions_N=inputs_3N[1],
                compared=plan.compared,
                is_ahead=plan.is_ahead,
                chosen_R=chosen_R,
            )
        )

    def _forgotten(self, family: Hashable) -> None:
        captured = family.captured if isinstance(family, PerturbedGraphs) else family
        if self.observer is not None and captured is not None:
            self.observer.forget(captured)

    def _seen(self, forward: Callable[[], torch.Tensor], is_captured: bool) -> tuple[torch.Tensor, Any]:
        result = forward()
        return result, self.observer.collect() if is_captured and self.observer is not None else None

    def _finish(self, found: Any, result: torch.Tensor, is_captured: bool) -> None:  # noqa: ANN401
        if is_captured and self.observer is not None:
            logits = result if self.layout.is_last_stage else None
            self.observer.step_end(ForwardResult(collected=found, logits=logits))

    def _forward(
        self,
        inputs_3N: torch.Tensor,
        hidden: torch.Tensor | None,
        attend: Attend,
        rows_R: torch.Tensor | None,
        *,
        fused: bool = False,
    ) -> torch.Tensor:
        """Run this stage's layers; return hidden states [N, 1, H], or logits [R, V] on the last stage."""
        tokens_N, positions_N, rows_N = inputs_3N.unbind()
        self._holder.step = AttentionStep(
            rows_N=rows_N,
            cos_N1D=_angles(self._cos_TD, positions_N),
            sin_N1D=_angles(self._sin_TD, positions_N),
            attend=attend,
            fused=fused,
        )
        try:
            return self._layers(tokens_N, positions_N, hidden, rows_R)
        finally:
            self._holder.step = None

    def _layers(
        self,
        tokens_N: torch.Tensor,
        positions_N: torch.Tensor,
        hidden: torch.Tensor | None,
        rows_R: torch.Tensor | None,
    ) -> torch.Tensor:
        model = self.model
        if self.layout.is_first_stage:
            hidden = model.embedding(input_ids=tokens_N[None], position_ids=positions_N[None])
        else:
            model.decoder.set_input_tensor(hidden)
        hidden_N1H: torch.Tensor = model.decoder(hidden_states=hidden, attention_mask=None)
        if not self.layout.is_last_stage or (rows_R is not None and rows_R.numel() == 0):
            return hidden_N1H
        return self.logits_of(hidden_N1H if rows_R is None else hidden_N1H.index_select(0, rows_R))

    def logits_of(self, hidden_N1H: torch.Tensor) -> torch.Tensor:
        """Return logits [N, V] of hidden states after the final norm, on the last stage; collective over its ranks."""
        model = self.model
        weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        logits_N1V, _ = model.output_layer(hidden_N1H, weight=weight, runtime_gather_output=True)
        return logits_N1V.squeeze(1)[:, : self.vocab_size]  # type: ignore[no-any-return] # untyped library

    def _decode_attention(self, positions_B: torch.Tensor, attended: int) -> Attend:
        if not self._flash:
            mask_B11T = decode_mask(positions_B, attended, self._window, self._shape.dtype)
            return MaskedDecode(mask_B11T=mask_B11T, scale=self._scale)
        count_B1 = torch.arange(positions_B.size(0) + 1, dtype=torch.int32, device=positions_B.device)
        return FlashDecode(
            lengths_B=(positions_B + 1).int(),
            query_starts_B1=count_B1,
            key_starts_B1=count_B1 * self._shape.rows_per_slot,
            rows_per_slot=self._shape.rows_per_slot,
            scale=self._scale,
            window=self._window,
        )

    def _selected(self, rows: list[int], count: int) -> torch.Tensor | None:
        """Return the rows on the device, or None if they are all rows in order."""
        return None if rows == list(range(count)) else self._device.to_device(torch.tensor(rows, dtype=torch.int64))


def _angles(table_TD: torch.Tensor | None, positions_N: torch.Tensor) -> torch.Tensor | None:
    return None if table_TD is None else table_TD.index_select(0, positions_N).unsqueeze(1)


def _bucket(count: int, *, least: int, most: int) -> int:
    """Return the smallest power of two that holds `count`, within bounds."""
    return min(max(1 << (count - 1).bit_length(), least), most)


def _window(config: Any) -> int | None:  # noqa: ANN401 - TransformerConfig
    """Return the tokens that a query sees before itself, if megatron-core's `window_size` limits them."""
    window = getattr(config, "window_size", None)
    return None if window is None or window[0] < 0 else int(window[0])


def _takes_flash(kernel: DecodeKernel, device: Device, shape: KvCacheShape) -> bool:
    fits = device.is_cuda and shape.dtype in {torch.bfloat16, torch.float16} and shape.channels % 8 == 0
    if kernel == "flash" and not fits:
        raise UsageError("decode_kernel flash needs CUDA, fp16 or bf16 and heads of a multiple of 8; take auto or mask")
    return fits and kernel != "mask"


def _fuse_swiglu(model: Any, *, fuse: bool) -> None:  # noqa: ANN401 - GPTModel
    """Let megatron-core's MLP take its compiled SwiGLU. Its compiled GELU is an approximation, so that stays off."""
    for layer in model.decoder.layers:
        config = layer.mlp.config
        if config.gated_linear_unit and config.activation_func is torch.nn.functional.silu:
            config.bias_activation_fusion = fuse


def _rotary_tables(model: Any, shape: KvCacheShape) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # noqa: ANN401
    """Return cosines and sines [T, D] of all positions in the model's type, the first half of the sines negated."""
    rotary = getattr(model, "rotary_pos_emb", None)
    if rotary is None:
        return None, None
    angles_TD = rotary.get_emb(shape.capacity).flatten(1)
    sin_TD = angles_TD.sin()
    sin_TD[:, : sin_TD.size(1) // 2].neg_()
    return angles_TD.cos().to(shape.dtype), sin_TD.to(shape.dtype)
