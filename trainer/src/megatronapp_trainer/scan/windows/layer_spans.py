"""Spans of attention, MLP, norms, embedding and loss, by hooks that exist only while a window is on.

A forward span begins in the hook before a module and ends in the one after it. A backward span begins where the
gradient of the module's output is ready, and ends where that of its input is: hooks of nodes of autograd's graph, which
add no node to it and which go with it. Torch's own backward hooks of modules would add nodes, and so change which
memory megatron-core may free. In recomputed layers the hooks of modules run within the backward pass.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from megatronapp_common.trace import NO_LAYER, LayerSite, RecordKind
from megatronapp_trainer.scan.recorder import Recorder, RecordKey, TimeMark
from megatronapp_trainer.scan.windows.open_pass import OpenPass

_LAYER_MODULES = {
    "input_layernorm": LayerSite.ATTENTION_NORM,
    "self_attention": LayerSite.ATTENTION,
    "pre_mlp_layernorm": LayerSite.MLP_NORM,
    "mlp": LayerSite.MLP,
}
MAX_LAYERS = NO_LAYER
"""Layers of a chunk that the records can number."""


class _Part(NamedTuple):
    """A timed part of a model chunk."""

    site: LayerSite
    layer: int
    module: Any
    """Module whose call begins the part."""
    last: Any
    """Module whose call ends the part: the same one, but for the loss."""


class _OpenSpan(NamedTuple):
    key: RecordKey
    mark: TimeMark


class LayerSpans:
    """Layer spans of a rank. Hooks exist from `install` to `remove`, and record within passes alone."""

    def __init__(self, recorder: Recorder, chunks: Sequence[Any]) -> None:
        """Take the model chunks of this rank, in order, in any of megatron-core's wrappers."""
        self._recorder = recorder
        self._parts = [part for chunk in chunks for part in parts_of(chunk)]
        self._handles: list[Any] = []
        self._pass: OpenPass | None = None
        self._forward: list[_OpenSpan] = []
        """Begun, the innermost last."""
        self._backward: _OpenSpan | None = None
        self.recorded = 0
        """Spans so far."""

    @property
    def is_installed(self) -> bool:
        """Return True while the hooks exist."""
        return bool(self._handles)

    def install(self) -> None:
        """Install the hooks, between two steps."""
        for part in self._parts:
            self._handles += _PartHooks(self, part).install()

    def remove(self) -> None:
        """Remove the hooks, between two steps, so that the model computes as before."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def pass_begin(self, opened: OpenPass) -> None:
        """Record the parts of a pass from now on."""
        self._pass = opened

    def pass_end(self) -> None:
        """End the span of the part whose gradient the pass computed last."""
        self._end_backward()
        self._forward.clear()
        self._pass = None

    def forward_begin(self, part: _Part) -> None:
        """Begin a part of a forward pass, or of one that is recomputed."""
        if self._pass is not None:
            key = self._key(RecordKind.LAYER_FORWARD, part, self._pass)
            self._forward.append(_OpenSpan(key, self._recorder.enter(key)))

    def forward_end(self, part: _Part) -> None:
        """End the part that `forward_begin` began."""
        if self._forward and self._forward[-1].key.ordinal == part.site:
            self._recorder.leave(*self._forward.pop())
            self.recorded += 1

    def backward_begin(self, part: _Part) -> None:
        """Begin a part of a backward pass, whose output's gradient is ready."""
        self._end_backward()
        if self._pass is not None:
            key = self._key(RecordKind.LAYER_BACKWARD, part, self._pass)
            self._backward = _OpenSpan(key, self._recorder.enter(key))

    def backward_end(self, part: _Part) -> None:
        """End a part, whose input's gradient is ready, unless the part before it has begun already."""
        opened = self._backward
        if opened is not None and (opened.key.ordinal, opened.key.layer) == (part.site, part.layer):
            self._end_backward()

    def _end_backward(self) -> None:
        opened, self._backward = self._backward, None
        if opened is not None:
            self._recorder.leave(*opened)
            self.recorded += 1

    @staticmethod
    def _key(kind: RecordKind, part: _Part, opened: OpenPass) -> RecordKey:
        return RecordKey(kind, opened.microbatch, opened.chunk, ordinal=part.site, layer=part.layer)


class _PartHooks:
    """Hooks of one part; they call `LayerSpans`."""

    def __init__(self, spans: LayerSpans, part: _Part) -> None:
        self._spans = spans
        self._part = part
        self._input: torch.Tensor | None = None

    def install(self) -> list[Any]:
        """Install the hooks and return their handles."""
        return [
            self._part.module.register_forward_pre_hook(self._before, with_kwargs=True),
            self._part.last.register_forward_hook(self._after),
        ]

    def _before(self, _module: object, inputs: tuple[Any, ...], named_inputs: dict[str, Any]) -> None:
        self._input = next(_tensors((*inputs, *named_inputs.values())), None)
        self._spans.forward_begin(self._part)

    def _after(self, _module: object, _inputs: object, output: Any) -> None:  # noqa: ANN401 - the module's
        self._spans.forward_end(self._part)
        given, self._input = self._input, None
        made = next(_tensors(output if isinstance(output, tuple) else (output,)), None)
        if made is None or made.grad_fn is None:
            return
        part, spans = self._part, self._spans
        made.grad_fn.register_prehook(lambda _gradients: spans.backward_begin(part))
        if given is None or not given.requires_grad:
            return
        if given.grad_fn is None:
            given.register_hook(lambda _gradient: spans.backward_end(part))  # type: ignore[no-untyped-call]
        else:
            given.grad_fn.register_prehook(lambda _gradients: spans.backward_end(part))


def parts_of(chunk: Any) -> Iterator[_Part]:  # noqa: ANN401 - a model in wrappers
    """Yield the timed parts of a model chunk that this rank has. Modules that compute nothing are none."""
    model = chunk
    while hasattr(model, "module"):
        model = model.module
    if getattr(model, "pre_process", False):
        yield _Part(LayerSite.EMBEDDING, NO_LAYER, model.embedding, model.embedding)
    for number, layer in enumerate(model.decoder.layers[:MAX_LAYERS]):  # a record has no number for more
        for name, site in _LAYER_MODULES.items():
            module = getattr(layer, name, None)
            if module is not None and type(module).__name__ != "IdentityOp":
                yield _Part(site, number, module, module)
    norm = getattr(model.decoder, "final_layernorm", None)
    if norm is not None:
        yield _Part(LayerSite.FINAL_NORM, NO_LAYER, norm, norm)
    if getattr(model, "post_process", False):
        yield _Part(LayerSite.LOSS, NO_LAYER, model.output_layer, model)


def _tensors(values: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    return (value for value in values if isinstance(value, torch.Tensor))
