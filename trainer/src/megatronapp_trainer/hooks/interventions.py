"""Write hooks: functions that may replace the value of a site in a forward pass.

hooks = WriteHooks(model)
hooks.add(site_of("mlp2"), lambda value, layer: 1.1 * value)
"""

from collections.abc import Callable
from typing import Any

import torch

from megatronapp_trainer.hooks.errors import CaptureError
from megatronapp_trainer.hooks.sites import Put, Site, modules_of

WriteHook = Callable[[torch.Tensor, int], torch.Tensor | None]
"""Gets the value of a site, with the bias added, and the layer (-1 for a site without layers). Returns a replacement of
equal shape, or None to leave the value. Must not write into it, nor wait for the device."""


class WriteHooks:
    """The write hooks on one model. They run before read hooks, the one that was added last first.

    CUDA graphs have the forward pass baked in: call `forget_graphs` of the model runner after each change.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._handles: list[Any] = []
        self._found: dict[Site, list[tuple[int, torch.nn.Module | None]]] = {}
        """Modules of sites, by layer: finding them takes longer than hooking them."""

    def add(self, site: Site, hook: WriteHook, *, layers: frozenset[int] | None = None, required: bool = True) -> None:
        """Add a hook to these layers of a site; None: all.

        Raises CaptureError for a site that can only be read, or that no layer has. With `required` False the latter is
        no error: other pipeline stages may have it.
        """
        if site.put is None:
            raise CaptureError(f"site {site.name} can only be read; choose a site that has `put`, such as mlp2")
        if site not in self._found:
            self._found[site] = modules_of(site, self._model, required=required)
        for layer, module in self._found[site]:
            if module is not None and (layers is None or not site.per_layer or layer in layers):
                forward_hook = _forward_hook(site, site.put, layer, hook)
                self._handles.append(module.register_forward_hook(forward_hook, with_kwargs=True, prepend=True))

    def remove(self) -> None:
        """Remove all hooks, so that the model computes as before."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _forward_hook(site: Site, put: Put, layer: int, hook: WriteHook) -> Callable[..., Any]:
    def forward_hook(_module: object, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:  # noqa: ANN401
        taken = site.take((*args, *kwargs.values()), output)
        value, bias = taken if isinstance(taken, tuple) else (taken, None)
        value = value if bias is None else value + bias
        replacement = hook(value, layer)
        if replacement is None:
            return None
        if replacement.shape != value.shape:
            raise CaptureError(
                f"site {site.name}, layer {layer}: the hook returned shape {tuple(replacement.shape)}; "
                f"return {tuple(value.shape)}"
            )
        return put(output, replacement)

    return forward_hook
