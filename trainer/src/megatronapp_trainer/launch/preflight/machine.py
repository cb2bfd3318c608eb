"""Checks of the node before the ranks start: GPUs, shared memory, locked memory, links. Each fault is a sentence."""

import os
import pathlib
import resource
from collections.abc import Iterator

import psutil

from megatronapp_trainer.launch.config.requirements import PreflightRequirements
from megatronapp_trainer.launch.preflight.infiniband import verbs_faults

INFINIBAND = pathlib.Path("/sys/class/infiniband")
PROC_STATUS = pathlib.Path("/proc/self/status")
CAP_IPC_LOCK = 14
"""Bit of the capability that lifts the limit on locked memory."""
MIB = 1 << 20


def find_faults(requirements: PreflightRequirements, *, shm: pathlib.Path, interface: str | None) -> Iterator[str]:
    """Yield what this node lacks, one sentence for each fault."""
    if requirements.gpus is not None:
        from megatronapp_trainer.launch.preflight.gpu_counters import DeviceReader  # with it NumPy is loaded

        yield from gpu_faults(requirements.gpus, DeviceReader().count)
    if requirements.shm_bytes is not None:
        yield from shm_faults(requirements.shm_bytes, shm)
    if requirements.rdma:
        yield from memlock_faults(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], PROC_STATUS.read_text())
        yield from link_faults(requirements.hca, INFINIBAND)
        yield from verbs_faults(requirements.hca, is_chosen)
    if interface is not None and not _is_up(interface):
        yield f"the interface {interface} is down"


def gpu_faults(required: int, seen: int) -> Iterator[str]:
    """Yield a fault if fewer GPUs answer than requested; if more do, the ranks take the first ones."""
    if seen < required:
        yield f"{seen} of {required} GPUs answer; check nvidia-smi and dmesg of that node"


def shm_faults(required_bytes: int, shm: pathlib.Path) -> Iterator[str]:
    """Yield a fault if the file system is too small; its total size is compared, not its free space."""
    try:
        found = os.statvfs(shm)
    except OSError as error:
        yield f"{shm} cannot be inspected: {error.strerror}"
        return
    size = found.f_frsize * found.f_blocks
    if size < required_bytes:
        yield f"{shm} holds {size // MIB} MiB, but {required_bytes // MIB} MiB are needed; raise spec.shm.sizeLimit"


def memlock_faults(limit: int, proc_status: str) -> Iterator[str]:
    """Yield a fault if memory cannot be locked: RDMA pins its buffers, which needs no limit, or the capability."""
    if limit == resource.RLIM_INFINITY or limit >= psutil.virtual_memory().total or may_lock(proc_status):
        return
    yield (
        f"memlock is limited to {limit // 1024} KiB, and IPC_LOCK is not effective: let the container run as root with "
        "network.rdma.ipcLock true, or raise the limit in the container runtime of that node"
    )


def may_lock(proc_status: str) -> bool:
    """Return True if CAP_IPC_LOCK is among the effective capabilities in the text of a /proc/PID/status."""
    for line in proc_status.splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> CAP_IPC_LOCK & 1)
    return False


def link_faults(hca: str, infiniband: pathlib.Path) -> Iterator[str]:
    """Yield a fault for each adapter named by `hca` that is not up; without names, only if no port is up."""
    ports = {
        f"{state.parts[-4]}:{state.parts[-2]}": state.read_text().strip()
        for state in sorted(infiniband.glob("*/ports/*/state"))
    }
    chosen = {name: state for name, state in ports.items() if is_chosen(name, hca)}
    down = [f"{name} is {state}" for name, state in chosen.items() if not state.endswith("ACTIVE")]
    if not chosen:
        there = ", ".join(ports) or "none"
        yield f"no port of InfiniBand or RoCE {f'matches {hca}' if hca else 'was found'}; ports here: {there}"
    elif down and (hca or len(down) == len(chosen)):
        yield f"links that are not active: {', '.join(down)}"


def is_chosen(port: str, hca: str) -> bool:
    """Return True if NCCL_IB_HCA chooses `adapter:port`: by prefixes, or by names after `=`; `^` inverts the choice."""
    names = [name.strip() for name in hca.lstrip("^=").split(",") if name.strip()]
    if not names:
        return True
    exact = hca.lstrip("^").startswith("=")
    return any(_fits(port, name, exact=exact) for name in names) != hca.startswith("^")


def _fits(port: str, selector: str, *, exact: bool) -> bool:
    adapter, _, number = port.partition(":")
    name, _, selected_number = selector.partition(":")
    if selected_number and selected_number != number:
        return False
    return adapter == name if exact else adapter.startswith(name)


def _is_up(interface: str) -> bool:
    stats = psutil.net_if_stats().get(interface)
    return stats is not None and stats.isup
