"""Forward ranks on the CPU with backward ranks on GPUs: what can be seen of it without a GPU."""

import contextlib
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from evaluated_training import Record, train

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
Saved = list[tuple[tuple[int, ...], tuple[int, ...], str]]


def saved_by_norm(device: str, kind: str, dtype_name: str, *, recomputed: bool) -> Saved:
    """Return shapes, strides and types of what a final norm saves, on a GPU by torch's rules for fake tensors."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from megatronapp_trainer.fbd.ship_modes import recompute_final_norms

    saved: Saved = []

    def pack(tensor: Any) -> Any:
        if not random.is_checkpointing():
            saved.append((tuple(tensor.shape), tensor.stride(), str(tensor.dtype)))
        return tensor

    from megatron.core.tensor_parallel import random

    with FakeTensorMode(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(random, "_get_all_rng_states", lambda: (None, None, None))
        made = {"device": device, "dtype": getattr(torch, dtype_name)}
        norm_class = torch.nn.RMSNorm if kind == "RMSNorm" else torch.nn.LayerNorm
        block = torch.nn.Module()
        block.final_layernorm = norm_class(8, eps=1e-5, **made)
        if recomputed:
            recompute_final_norms([block])
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            block.final_layernorm(torch.empty(4, 2, 8, requires_grad=True, **made))
    return saved


def norms_on_both_devices() -> list[tuple[bool, bool]]:
    """Return for each norm and type whether a CPU and a GPU save the same, without and with recomputation."""
    return [
        tuple(  # type: ignore[misc]
            saved_by_norm("cpu", kind, dtype, recomputed=recomputed)
            == saved_by_norm("cuda", kind, dtype, recomputed=recomputed)
            != []
            for recomputed in (False, True)
        )
        for kind in ("LayerNorm", "RMSNorm")
        for dtype in ("float32", "bfloat16")
    ]


def test_a_recomputed_final_norm_saves_the_same_on_a_cpu_and_a_gpu(run_ranks: RunRanks) -> None:
    (found,) = run_ranks(1, norms_on_both_devices)
    assert found == [(True, True), (False, True), (False, True), (False, True)]


@contextlib.contextmanager
def gpus_seen(count: int) -> Iterator[None]:
    """Let torch see this number of GPUs within the context."""
    import torch

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: count > 0)
        patched.setattr(torch.cuda, "device_count", lambda: count)
        yield


def choices_of_devices() -> dict[str, Any]:
    """Return what a forward rank on the CPU hides, and the errors of ranks that find other devices than they need."""
    from megatronapp_trainer.device import prepare_device
    from megatronapp_trainer.errors import UsageError
    from megatronapp_trainer.fbd.setup import refuse_other_device

    found: dict[str, Any] = {}
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    found["device"] = prepare_device(None, 2).name
    found["visible"] = os.environ["CUDA_VISIBLE_DEVICES"]
    calls: dict[str, Callable[[], object]] = {
        "used": lambda: prepare_device(None),
        "too few": lambda: prepare_device(1),
        "forward": lambda: refuse_other_device(1, 0, on_gpu=True, partner_on_gpu=False, may_differ=True),
        "backward": lambda: refuse_other_device(1, 0, on_gpu=False, partner_on_gpu=True, may_differ=False),
    }
    for name, call in calls.items():
        with gpus_seen(1), pytest.raises(UsageError) as error:
            call()
        found[name] = str(error.value)
    for on_gpu, partner_on_gpu, may_differ in ((False, True, True), (True, True, False), (False, False, True)):
        refuse_other_device(1, 0, on_gpu=on_gpu, partner_on_gpu=partner_on_gpu, may_differ=may_differ)
    return found


def test_a_forward_rank_on_the_cpu_hides_gpus_and_other_pairs_are_refused_by_name(run_ranks: RunRanks) -> None:
    (found,) = run_ranks(1, choices_of_devices)
    assert (found["device"], found["visible"]) == ("cpu", "")
    assert "start forward ranks with CUDA_VISIBLE_DEVICES= set to nothing" in found["used"]
    assert found["too few"].startswith("number 1 of the ranks here that use a GPU has none: this machine shows 1")
    assert found["forward"].startswith("forward rank 1 has a GPU, and its backward rank 0 has none")
    assert "write --fbd-forward-on-cpu (in a manifest fbd.forward with gpusPerNode: 0)" in found["backward"]


def backends(flags: str) -> list[str]:
    """Return the backends of a backward rank with a GPU and of its forward rank on the CPU."""
    import torch

    from megatronapp_trainer.config import parse
    from megatronapp_trainer.device import Device
    from megatronapp_trainer.parallel import groups
    from megatronapp_trainer.training.build import layout_of

    found: list[str] = []
    config = parse(f"{MODEL} {flags}".split())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(groups, "start_role_world", lambda _layout, backend, _timeout: found.append(backend))
        patched.setattr(groups, "initialize_model_groups", lambda *_: None)
        for rank, device in enumerate(("cuda:0", "cpu")):
            patched.setitem(os.environ, "RANK", str(rank))
            patched.setitem(os.environ, "WORLD_SIZE", "2")
            own = Device(torch_device=torch.device(device), name=device)
            groups.initialize_groups(config, layout_of(config), own)
    return found


ON_CPU = "--forward-backward-disaggregating --fbd-ship full --fbd-forward-on-cpu"
STILL = "--attention-dropout 0 --hidden-dropout 0"
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --train-iters 2 "
    f"--lr 2e-3 --mock-data --vocab-size 120 {STILL} {ON_CPU}"
)


@pytest.mark.parametrize("flags", ["", "--distributed-backend nccl"])
def test_the_backend_is_for_ranks_with_gpus_and_forward_ranks_take_gloo(run_ranks: RunRanks, flags: str) -> None:
    assert run_ranks(1, backends, flags) == [["nccl", "gloo"]]


def needed_memory(devices: tuple[int | None, int | None]) -> int:
    """Return MiB of shared memory for a pair of ranks, from the error where none is free."""
    import re

    import torch

    from megatronapp_trainer.errors import UsageError
    from megatronapp_trainer.fbd.channels import agreement
    from megatronapp_trainer.fbd.channels.plan import ChannelPlan
    from megatronapp_trainer.pipeline.transport.shared_memory import SharedMemory
    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

    plans = [
        ChannelPlan(
            rank=rank,
            unit=1,
            partners=(1 - rank,),
            leads=rank == 0,
            neighbours=(),
            activation=TensorSpec((64,), torch.uint8),
            control_bytes=1 << 20,
            shipment_bytes=8 << 20,
            shipments=4,
            deadline_s=1.0,
            device=device,
            threads=1,
        )
        for rank, device in enumerate(devices)
    ]
    proposals: list[Any] = []

    class ProposedError(Exception):
        """Ends an agreement whose proposal is kept."""

    def propose(_name: str, own: object) -> list[Any]:
        proposals.append(own)
        raise ProposedError

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(agreement, "find_shared_memory", lambda _flag: SharedMemory("node", 0))
        for plan in plans:
            exchange: Any = types.SimpleNamespace(gather=propose)
            with pytest.raises(ProposedError):
                agreement.agree(plan, exchange)
        exchange.gather = lambda _name, _own: proposals
        with pytest.raises(UsageError) as error:
            agreement.agree(plans[0], exchange)
    return int(re.findall(r"need (\d+) MiB", str(error.value))[0])


def test_messages_of_a_mixed_pair_lie_in_shared_memory_at_both_ends(run_ranks: RunRanks) -> None:
    pairs = [(0, None), (None, None), (0, 1)]
    mixed, hosts, devices = (run_ranks(1, needed_memory, pair)[0] for pair in pairs)
    assert mixed == hosts > 2 * 4 * 8 > devices


def train_with_states_of_a_gpu(flags: str) -> tuple[int, Record | None]:
    """Train with a backward rank whose generator has states of the size of a GPU's, and takes no others."""
    import torch

    from megatronapp_trainer.device import cpu

    cpu.install()
    if os.environ["RANK"] == "0":
        from megatron.core.tensor_parallel import random

        def add_state(tracker: Any, name: str, _seed: int) -> None:
            tracker.states_[name] = torch.zeros(16, dtype=torch.uint8)

        def set_states(tracker: Any, states: dict[str, Any]) -> None:
            assert {state.numel() for state in states.values()} == {16}
            tracker.states_ = states

        def set_state(state: Any, *_options: Any, **_more: Any) -> None:
            assert state.numel() == 16

        patched: Any = random
        patched._get_cuda_rng_state = lambda *_options, **_more: torch.zeros(16, dtype=torch.uint8)
        patched._set_cuda_rng_state = set_state
        patched.CudaRNGStatesTracker.add = add_state
        patched.CudaRNGStatesTracker.set_states = set_states
        patched.CudaRNGStatesTracker.fork = lambda _tracker, _name="": contextlib.nullcontext()
    return train(flags)


def test_random_states_of_a_device_stay_on_it(run_ranks: RunRanks) -> None:
    flags = f"{STILL} --bf16 --transformer-impl local"  # which enters the tracker's states, and draws nothing
    (plain,) = run_ranks(1, train, flags)
    environment = {"MEGATRONAPP_JOB_UID": f"fbd-states-{os.getpid()}"}
    backward, forward = run_ranks(2, train_with_states_of_a_gpu, f"{flags} {ON_CPU}", environment=environment)
    assert backward == plain
    assert forward == (0, None)
