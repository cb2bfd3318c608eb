"""Execution of megatron-core on a CPU, without changing torch for other modules.

megatron-core 0.16 names CUDA in about fifty places. Three measures, all confined to megatron-core, replace them:

1. In its modules the *name* ``torch`` refers to a facade that reads as torch, except that ``torch.cuda`` describes the
   CPU and factories with a CUDA device make CPU tensors.
2. Where it compares ``tensor.type()`` with CUDA type names or calls ``tensor.cuda()``, those two methods are replaced
   for the duration of that one function.
3. Its random-number tracker keeps states of the CPU's generator.
"""

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatronapp_trainer.utils.silence_megatron import silence_megatron_imports

_CPU = torch.device("cpu")
_FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")
_ROOTS = (
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel",
)
"""Modules whose import loads every module that training needs."""
_CUDA_CALLS = (
    ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer.__init__"),
    ("megatron.core.optimizer.optimizer", "Float16OptimizerWithFloat16Params.__init__"),
    (
        "megatron.core.models.common.language_module.language_module",
        "LanguageModule.setup_embeddings_and_output_layer",
    ),
    ("megatron.core.models.common.embeddings.rotary_pos_embedding", "get_pos_emb_on_this_cp_rank"),
    ("megatron.core.optimizer.clip_grads", "clip_grad_by_total_norm_fp32"),
    ("megatron.core.optimizer.grad_scaler", "DynamicGradScaler.load_state_dict"),
)
"""Functions that compare ``type()`` with CUDA names or call ``cuda()``; found by omitting them one by one."""


def install() -> None:
    """Make megatron-core run on this CPU. Call it again after importing more of megatron-core; that costs little.

    What was imported of megatron-core before the first call is compiled, which costs seconds.
    """
    with silence_megatron_imports(), _without_compile():
        for root in _ROOTS:
            importlib.import_module(root)
    _bind_facade()
    if _installed():
        return
    for module, path in _CUDA_CALLS:
        _treat_cpu_as_cuda_in(importlib.import_module(module), path)
    _rebind_clip()
    _use_cpu_generator()
    _give_counts_as_arrays()


def _installed() -> bool:
    module = importlib.import_module(_CUDA_CALLS[0][0])
    return hasattr(module.DistributedOptimizer.__init__, "__wrapped__")


@contextlib.contextmanager
def _without_compile() -> Iterator[None]:
    """Let torch.compile return functions unchanged inside the context.

    megatron-core compiles its fused functions where it defines them. On a CPU the first call would take 20 s, the
    definitions alone seconds of import, and the fusions are off.
    """
    compile_function = torch.compile

    def leave(function: Any = None, **_options: Any) -> Any:  # noqa: ANN401 - torch.compile's own, also as a decorator
        return leave if function is None else function

    torch.compile = leave  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_function


class _ModuleProxy(types.ModuleType):
    """A module that forwards every name that was not set on it."""

    def __init__(self, target: types.ModuleType, own: dict[str, Any]) -> None:
        super().__init__(target.__name__)
        self.__dict__.update(own, _target=target)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever torch holds
        return getattr(self.__dict__["_target"], name)


class _CpuStream:
    """The only stream of a CPU, on which all work is done when it is launched; also its events."""

    def wait_stream(self, _stream: "_CpuStream") -> None:
        """Return immediately: nothing is pending."""

    def record_event(self) -> "_CpuStream":
        """Return an event that has happened already."""
        return self

    def synchronize(self) -> None:
        """Return immediately, because everything is done."""


_CPU_STREAM = _CpuStream()


def _bind_facade() -> None:
    """Let the name ``torch`` in every loaded megatron-core module refer to the facade."""
    facade = _torch_facade()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            vars(module)["torch"] = facade


@functools.cache
def _torch_facade() -> types.ModuleType:
    cuda = _ModuleProxy(
        torch.cuda,
        {
            "current_device": lambda: _CPU,
            "synchronize": lambda *_args, **_kwargs: None,
            "empty_cache": lambda: None,
            "manual_seed": torch.manual_seed,
            "get_rng_state": lambda *_args, **_kwargs: torch.get_rng_state(),
            "set_rng_state": lambda state, *_args, **_kwargs: torch.set_rng_state(state),
            "Stream": lambda *_args, **_kwargs: _CPU_STREAM,
            "current_stream": lambda *_args, **_kwargs: _CPU_STREAM,
            "stream": lambda _stream: contextlib.nullcontext(),
        },
    )
    return _ModuleProxy(torch, {"cuda": cuda} | {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a tensor factory so that it makes a CPU tensor if a CUDA device is requested."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401 - the factory's own
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


def _treat_cpu_as_cuda_in(module: types.ModuleType, path: str) -> None:
    """Wrap the function at ``path`` (``Class.method`` or a name) of the module."""
    owner_name, _, name = path.rpartition(".")
    owner = getattr(module, owner_name) if owner_name else module
    function = getattr(owner, name)

    @functools.wraps(function)
    def scoped(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's own
        with _cpu_tensors_as_cuda():
            return function(*args, **kwargs)

    setattr(owner, name, scoped)


@contextlib.contextmanager
def _cpu_tensors_as_cuda() -> Iterator[None]:
    """Let CPU tensors return CUDA's type name, and themselves from ``cuda()``, inside the context."""
    plain_type, plain_cuda = torch.Tensor.type, torch.Tensor.cuda

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - Tensor.type's own
        answer = plain_type(self, *args, **kwargs)
        if isinstance(answer, str) and answer.startswith("torch.") and not answer.startswith("torch.cuda."):
            return "torch.cuda." + answer.removeprefix("torch.")
        return answer

    torch.Tensor.type = type_name  # type: ignore[method-assign,assignment]
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.type = plain_type  # type: ignore[method-assign]
        torch.Tensor.cuda = plain_cuda  # type: ignore[method-assign]


def _rebind_clip() -> None:
    """Replace the clipping function that optimizer.py imported by name before it was wrapped."""
    clip = importlib.import_module("megatron.core.optimizer.clip_grads")
    optimizer: Any = importlib.import_module("megatron.core.optimizer.optimizer")
    optimizer.clip_grad_by_total_norm_fp32 = clip.clip_grad_by_total_norm_fp32


def _give_counts_as_arrays() -> None:
    """Convert the counts of tokens per expert to arrays, which collectives take.

    megatron-core turns them into arrays where it copies them from a GPU alone.
    """
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")

    def on_host(counts: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ANN401
        return counts.numpy() if as_numpy and isinstance(counts, torch.Tensor) else counts

    dispatcher.maybe_move_tensor_to_cpu = on_host


def _get_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:  # noqa: ANN401 - device and graph flags of CUDA
    return torch.get_rng_state()


def _set_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:  # noqa: ANN401 - as above
    torch.set_rng_state(state)


def _use_cpu_generator() -> None:
    """Replace the tracker's fork: megatron-core's warns whenever the CPU's generator moves within, as it must here."""
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = _get_state
    random._set_cuda_rng_state = _set_state

    @contextlib.contextmanager
    def fork(self: Any, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:  # noqa: ANN401
        outer_name, outer_state = self._current_state_name, torch.get_rng_state()
        if outer_name != "default-rng":
            self.states_[outer_name] = outer_state
        torch.set_rng_state(self.states_[name])
        self._current_state_name = name
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outer_state if outer_name == "default-rng" else self.states_[outer_name])
            self._current_state_name = outer_name

    random.CudaRNGStatesTracker.fork = fork
