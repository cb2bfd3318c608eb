"""Process of the job's hub, and requests to it."""

import subprocess

import httpx

from megatronapp_common.web.loopback import V4, is_shared
from megatronapp_common.web.tokens import TokenRole, derive_token
from megatronapp_operator.backends.process.ports import ReservedPort
from megatronapp_operator.backends.process.settings import ProcessSettings, base_environment
from megatronapp_operator.backends.process.spawn import spawn
from megatronapp_operator.backends.process.state.files import write_json
from megatronapp_operator.plan import HubPhase, HubState
from megatronapp_operator.plan_io import hub_summary

POLL_S = 1.0
TIMEOUT_S = 1.0
STOP_S = 8.0
"""Seconds for the hub to end after SIGTERM: 3 for requests, 3 for its traces, and a reserve."""


class HubProcess:
    """Hub process on one port for the whole life of the job, whose summary is polled.

    `tick` blocks for one second at most.
    """

    def __init__(self, settings: ProcessSettings, *, secret: str, serve_url: str | None = None) -> None:
        """Reserve the port; `serve_url` is the address of a served model."""
        self._settings = settings
        self._port = ReservedPort(settings.hub_host, settings.hub_port, pages=True)
        self._client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {derive_token(secret, TokenRole.VIEWER)}"},
            timeout=TIMEOUT_S,
            trust_env=False,  # a proxy of the environment cannot reach this node's loopback
        )
        self._model = () if serve_url is None else ("--serve-url", serve_url)
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self.ended_at: float | None = None
        """When it ended, if it is not running."""
        self._deleted_at: float | None = None
        self._poll_due = 0.0
        self._ready = False
        self.summary: hub_summary.HubSummary | None = None
        """Newest answer to GET /api/v1/summary; None while the hub does not answer."""

    @property
    def url(self) -> str:
        """Address of the hub for users and agents."""
        host = self._settings.hub_host
        host = V4 if host == "0.0.0.0" or is_shared(host) else host  # `localhost` may be another program's [::1]
        return f"http://{host}:{self._port.number}"

    @property
    def pids(self) -> set[int]:
        """Process id of the hub, if it was started."""
        return set() if self._process is None else {self._process.pid}

    def start(self) -> None:
        """Start or restart the hub on the same port, with its stored state. Raises OSError."""
        paths, commands = self._settings.paths, self._settings.commands
        paths.hub_state.mkdir(parents=True, exist_ok=True)
        arguments = (
            *("--host", self._settings.hub_host, "--port", str(self._port.number)),
            *("--job-file", str(paths.manifest), "--state-dir", str(paths.hub_state)),
            *self._model,
        )
        environment = base_environment(self._settings)
        write_json(paths.hub, {"url": self.url})
        self._process = spawn((*commands.hub, *arguments), environment=environment, log=paths.hub_log)
        self._starts, self.ended_at = self._starts + 1, None

    def give_up_start(self, now: float) -> None:
        """Record a failed start as one that ended at once, so that the next one backs off."""
        self._starts, self.ended_at = self._starts + 1, now

    def delete(self, now: float) -> None:
        """Ask the hub to end."""
        if self._deleted_at is None and self._process is not None:
            self._deleted_at = now
            self._process.terminate()

    def observe(self) -> HubState | None:
        """Return the hub's state for the plan; None if it was never started."""
        if self._process is None and self.ended_at is None:
            return None
        phase = HubPhase.READY if self._ready else HubPhase.STARTING
        if self.ended_at is not None:
            phase = HubPhase.ENDED
        return HubState(phase=phase, starts=self._starts, ended_at=self.ended_at, deleting=self._deleted_at is not None)

    def tick(self, now: float) -> None:
        """Notice the end of the hub; request its summary once a second."""
        if self._process is None or self.ended_at is not None:
            return
        if self._process.poll() is not None:
            self.ended_at, self._ready, self.summary = now, False, None
        elif self._deleted_at is not None:
            if now >= self._deleted_at + STOP_S:
                self._process.kill()
        elif now >= self._poll_due:
            self.summary = self._request()
            self._ready = self.summary is not None
            self._poll_due = now + POLL_S

    def close(self) -> None:
        """Release port and connection."""
        self._client.close()
        self._port.close()

    def _request(self) -> hub_summary.HubSummary | None:
        """Return the summary, or None from a hub that is starting or stopped: training does not need it."""
        try:
            answer = self._client.get("/api/v1/summary")
            return hub_summary.read_summary(answer.json()) if answer.is_success else None
        except (httpx.HTTPError, ValueError):
            return None
