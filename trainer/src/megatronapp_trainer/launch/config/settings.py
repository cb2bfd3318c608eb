"""Settings that a launcher reads from its environment (docs/contracts.md, sections 1 to 3)."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Self

from megatronapp_common.attempt_order import AttemptOrder, ends_at_checkpoint, prefix_at, read_order
from megatronapp_common.names import DEFAULT_SHM_DIR, Env, RankOrder, ShmFile
from megatronapp_common.save_request import SaveRequest, read_save_request
from megatronapp_common.text.run_length import parse_run_lengths
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.launch.config.requirements import PreflightRequirements


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Host and port; the host is resolved where it is used."""

    host: str
    port: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LauncherSettings:
    """Identity and settings of one worker; `coordinator` and `secret_file` are set in every gang of two or more
    workers.

    The address of the worker is found later (see `interface`), because that may read the node's interfaces.
    """

    job: str
    uid: str
    attempt: int
    index: int
    proc_per_node: tuple[int, ...]
    coordinator: Endpoint | None
    secret_file: pathlib.Path | None
    rank_order: RankOrder
    topology: str
    status_port: int | None
    log_to_stdout: bool
    preflight: PreflightRequirements | None
    node: str
    shm_dir: pathlib.Path
    shm_prefix: str
    run_dir: pathlib.Path
    termination_log: pathlib.Path | None
    hub_url: str
    attempt_file: pathlib.Path | None = None
    """File that orders further attempts of this launcher (restart in place); None: it ends with its attempt."""
    save_file: pathlib.Path | None = None
    """File with requests for a checkpoint; None: there are none."""
    spare: bool = False
    """True until an order gives this worker, whose index follows those of the gang, one of the gang's places."""

    @property
    def num_workers(self) -> int:
        """Return the number of workers in the gang."""
        return len(self.proc_per_node)

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of this worker."""
        return self.proc_per_node[self.index]

    @property
    def progress_file(self) -> pathlib.Path:
        """Return the path of the progress document, which exists only if a rank of this worker writes it."""
        return self.shm_dir / f"{self.shm_prefix}.{ShmFile.PROGRESS}"

    def order(self) -> AttemptOrder | None:
        """Return the order to continue with a later attempt; None without such an order."""
        return None if self.attempt_file is None else read_order(self.attempt_file, after=self.attempt)

    def following(self, order: AttemptOrder) -> Self:
        """Return the settings of the attempt that is ordered.

        Raises UsageError if the order names no place of the gang.
        """
        index = self.index if order.worker is None else order.worker
        if index >= self.num_workers:
            raise UsageError(f"the order {order.text!r} gives worker {index} of a gang of {self.num_workers}")
        prefix = prefix_at(self.shm_prefix, order.attempt, before=self.attempt, worker=self.index, place=index)
        where = self.coordinator if order.coordinator is None else parse_endpoint(order.coordinator)
        coordinator = None if self.coordinator is None else where
        return dataclasses.replace(
            self, attempt=order.attempt, index=index, shm_prefix=prefix, coordinator=coordinator, spare=False
        )

    def ends_at_checkpoint(self) -> bool:
        """Return True if the ranks of this attempt are ordered to end with their next checkpoint."""
        return self.attempt_file is not None and ends_at_checkpoint(self.attempt_file, attempt=self.attempt)

    def save_request(self) -> SaveRequest | None:
        """Return the newest request for a checkpoint of this attempt; None without one."""
        return None if self.save_file is None else read_save_request(self.save_file, attempt=self.attempt)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], *, host_name: str) -> Self:
        """Read the variables.

        Raises UsageError that names the variable that is missing or wrong.
        """
        proc_per_node = _proc_per_node(environment)
        index = _integer(environment, Env.WORKER_INDEX)
        spare = environment.get(Env.SPARE) == "1"
        if spare:
            _required(environment, Env.ATTEMPT_FILE)
        elif index >= len(proc_per_node):
            raise UsageError(f"{Env.WORKER_INDEX} is {index}, but the gang has {len(proc_per_node)} workers, from 0 on")
        alone = len(proc_per_node) == 1
        status_port = _port(environment, Env.STATUS_PORT)
        if not alone:
            _required(environment, Env.COORDINATOR)
        if not alone or status_port is not None:
            _required(environment, Env.SECRET_FILE)
        return cls(
            job=_required(environment, Env.JOB),
            uid=_required(environment, Env.JOB_UID),
            attempt=_integer(environment, Env.ATTEMPT),
            index=index,
            proc_per_node=proc_per_node,
            coordinator=None if alone else parse_endpoint(environment[Env.COORDINATOR]),
            secret_file=_optional_path(environment, Env.SECRET_FILE),
            rank_order=_rank_order(environment),
            topology=environment.get(Env.TOPOLOGY, ""),
            status_port=status_port,
            log_to_stdout=environment.get(Env.LOG_TO_STDOUT) == "1",
            preflight=PreflightRequirements.parse(environment.get(Env.PREFLIGHT, "")),
            node=environment.get(Env.NODE_NAME) or host_name,
            shm_dir=pathlib.Path(environment.get(Env.SHM_DIR) or DEFAULT_SHM_DIR),
            shm_prefix=_required(environment, Env.SHM_PREFIX),
            run_dir=pathlib.Path(_required(environment, Env.RUN_DIR)),
            termination_log=_optional_path(environment, Env.TERMINATION_LOG),
            hub_url=environment.get(Env.HUB_URL, ""),
            attempt_file=_optional_path(environment, Env.ATTEMPT_FILE),
            save_file=_optional_path(environment, Env.SAVE_FILE),
            spare=spare,
        )


def parse_endpoint(text: str) -> Endpoint:
    """Parse `host:port`.

    Raises UsageError for any other text, including IPv6 addresses.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"{Env.COORDINATOR} is {text!r}; write it as host:port")
    if ":" in host:
        raise UsageError(f"{Env.COORDINATOR} is {text!r}: IPv6 is not supported; give a name or an IPv4 address")
    return Endpoint(host=host, port=int(port))


def _required(environment: Mapping[str, str], name: Env) -> str:
    value = environment.get(name)
    if not value:
        raise UsageError(f"the variable {name} is not set; the backend that starts a launcher sets it")
    return value


def _integer(environment: Mapping[str, str], name: Env) -> int:
    text = _required(environment, name)
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"{name} is {text!r}; it must be an integer from 0 on")
    return int(text)


def _proc_per_node(environment: Mapping[str, str]) -> tuple[int, ...]:
    text = _required(environment, Env.PROC_PER_NODE)
    try:
        counts = parse_run_lengths(text)
    except ValueError as error:
        raise UsageError(f"{Env.PROC_PER_NODE} is {text!r}; write the ranks of each worker as 4,4 or 4x2") from error
    num_workers = _integer(environment, Env.NUM_WORKERS)
    if num_workers != len(counts):
        raise UsageError(f"{Env.NUM_WORKERS} is {num_workers}, but {Env.PROC_PER_NODE} ({text}) names {len(counts)}")
    return counts


def _port(environment: Mapping[str, str], name: Env) -> int | None:
    text = environment.get(name)
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 65536:
        raise UsageError(f"{name} is {text!r}; write a port from 1 to 65535")
    return int(text)


def _rank_order(environment: Mapping[str, str]) -> RankOrder:
    text = environment.get(Env.RANK_ORDER) or RankOrder.INDEX
    try:
        return RankOrder(text)
    except ValueError:
        raise UsageError(f"{Env.RANK_ORDER} is {text!r}; write one of {', '.join(RankOrder)}") from None


def _optional_path(environment: Mapping[str, str], name: Env) -> pathlib.Path | None:
    text = environment.get(name)
    return pathlib.Path(text) if text else None
