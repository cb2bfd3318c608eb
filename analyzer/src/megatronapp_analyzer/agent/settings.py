"""Settings of the agent; the only place that reads its environment."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Self

from megatronapp_analyzer.errors import SettingsError
from megatronapp_common.attempt_order import AttemptOrder, prefix_at, read_order
from megatronapp_common.names import DEFAULT_SHM_DIR, Env
from megatronapp_common.web.tokens import TokenRole, derive_token, read_secret


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AgentSettings:
    """Hub, worker, folders and limits of the agent."""

    job: str
    uid: str
    attempt: int
    worker: int
    node: str
    address: str
    shm_dir: pathlib.Path
    shm_prefix: str
    hub_url: str
    """http://host:port of the hub; if empty, records are only read and dropped."""
    token: str
    """Access token of the `agent` role."""
    run_dir: pathlib.Path | None = None
    """Folder in which ranks find the socket of MegaScope; None for no socket."""
    attempt_file: pathlib.Path | None = None
    """File that orders further attempts of the worker (restart in place); None: the agent ends with its attempt."""
    spare: bool = False
    """True until an order gives the worker a place in the gang."""
    poll_s: float = 0.05
    """Interval at which rings are read: the age of the newest span at the hub."""
    discover_s: float = 0.25
    """Interval at which new rings are discovered."""
    status_s: float = 0.5
    buffer_bytes: int = 32 << 20
    """Memory for records while the hub is unreachable; the oldest are dropped beyond it, and counted."""
    resend_bytes: int = 4 << 20
    """Records retained after sending, in case the hub lost them by being killed."""
    backoff_min_s: float = 0.2
    backoff_max_s: float = 5.0
    linger_s: float = 1.0
    """Time to wait for another ring after the last one has ended."""
    quiet_s: float = 5.0
    """Age of a heartbeat from which a launcher has ended without closing its ring; it has one every second."""
    deliver_s: float = 10.0
    """Longest time to deliver what is buffered at the end."""

    def order(self) -> AttemptOrder | None:
        """Return the order to continue with a later attempt; None without such an order."""
        return None if self.attempt_file is None else read_order(self.attempt_file, after=self.attempt)

    def following(self, order: AttemptOrder) -> Self:
        """Return the settings for the attempt that is ordered."""
        worker = self.worker if order.worker is None else order.worker
        prefix = prefix_at(self.shm_prefix, order.attempt, before=self.attempt, worker=self.worker, place=worker)
        return dataclasses.replace(self, attempt=order.attempt, worker=worker, shm_prefix=prefix, spare=False)

    @property
    def socket_url(self) -> str:
        """Address of the hub's agent socket."""
        scheme, _, rest = self.hub_url.partition("://")
        return f"{'wss' if scheme == 'https' else 'ws'}://{rest.rstrip('/')}/api/v1/agent"


def _required(environment: Mapping[str, str], name: Env) -> str:
    value = environment.get(name, "")
    if not value:
        raise SettingsError(f"{name.value} is not set; the backend that starts the agent has to set it")
    return value


def _number(environment: Mapping[str, str], name: Env) -> int:
    text = _required(environment, name)
    if not text.isdecimal():
        raise SettingsError(f"{name.value}={text!r} is not a number; give one from 0 on")
    return int(text)


def _optional_path(environment: Mapping[str, str], name: Env) -> pathlib.Path | None:
    value = environment.get(name, "")
    return pathlib.Path(value) if value else None


def load_settings(environment: Mapping[str, str]) -> AgentSettings:
    """Read the settings from the variables of names.Env. Raises SettingsError that names the variable."""
    secret_file = pathlib.Path(_required(environment, Env.SECRET_FILE))
    try:
        token = derive_token(read_secret(secret_file), TokenRole.AGENT)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{Env.SECRET_FILE.value}={secret_file}: {error}") from error
    shm_dir = pathlib.Path(environment.get(Env.SHM_DIR) or DEFAULT_SHM_DIR)
    if not shm_dir.is_dir():
        raise SettingsError(f"{Env.SHM_DIR.value}={shm_dir} is not a directory; give the one that holds the rings")
    return AgentSettings(
        job=_required(environment, Env.JOB),
        uid=_required(environment, Env.JOB_UID),
        attempt=_number(environment, Env.ATTEMPT),
        worker=_number(environment, Env.WORKER_INDEX),
        node=environment.get(Env.NODE_NAME, ""),
        address=environment.get(Env.ADDRESS, ""),
        shm_dir=shm_dir,
        shm_prefix=_required(environment, Env.SHM_PREFIX),
        hub_url=environment.get(Env.HUB_URL, ""),
        token=token,
        run_dir=_optional_path(environment, Env.RUN_DIR),
        attempt_file=_optional_path(environment, Env.ATTEMPT_FILE),
        spare=environment.get(Env.SPARE) == "1",
    )
