"""Job `megatronapp serve` of a tiny model as users start it: a gang of real ranks with its hub, on this machine."""

import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest
import served_model
from shared_tls import SHARED_TLS

from megatronapp_common import cli
from megatronapp_common.web.tokens import TokenRole, derive_token, read_secret

DEADLINE_S = 240.0
MEGATRONAPP = (sys.executable, "-m", "megatronapp_common.cli")


def make_model(run_ranks: Callable[..., list[Any]], folder: pathlib.Path) -> pathlib.Path:
    """The folder, with the tiny model and its tokenizer in it."""
    run_ranks(1, served_model.write_model, str(folder))
    return folder


class Served:
    """A job of `megatronapp serve`. `megatronapp`: that command, or `megatronapp_forking`'s."""

    def __init__(self, state: pathlib.Path, name: str, megatronapp: Sequence[str] = MEGATRONAPP) -> None:
        self.name = name
        self.megatronapp = megatronapp
        self.environment = os.environ | {"XDG_STATE_HOME": str(state)}
        self.folder = state / "megatronapp" / "jobs" / name

    def cli(self, *arguments: str) -> str:
        """Return the output of `megatronapp`, run as a process."""
        command = [*self.megatronapp, *arguments]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=DEADLINE_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def call(self, *arguments: str) -> str:
        """Return the same, run within this process, which takes a second of processor time less."""
        out, errors = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as changed,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(errors),
        ):
            changed.setenv("XDG_STATE_HOME", self.environment["XDG_STATE_HOME"])
            code = cli.main(arguments)
        assert code == 0, out.getvalue() + errors.getvalue()
        return out.getvalue()

    def status(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.folder / "status.json").read_text())
        except FileNotFoundError:
            return {}
        return found

    def until_phase(self, phase: str, attempt: int) -> None:
        self._until(lambda: (self.status().get("phase"), self.status().get("attempt")) == (phase, attempt))

    def until_ready(self) -> None:
        """Wait until the hub takes runs of pages; in phase Running it may not listen yet."""

        def ready() -> bool:
            with contextlib.suppress(FileNotFoundError, httpx.TransportError), self.hub() as hub:
                return bool(hub.get("scope").raise_for_status().json()["state"] == "ready")
            return False

        self._until(ready)

    def _until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            logs = [path.read_text() for path in self.folder.glob("attempt-*/worker-*/*.log")]
            assert time.monotonic() < deadline, (self.status(), *logs)
            time.sleep(0.05)

    def client(self) -> httpx.Client:
        lines = self.call("serve", "--print", self.name).splitlines()
        url, key = (line.partition("=")[2] for line in lines)
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=url, headers=headers, timeout=DEADLINE_S, trust_env=False, verify=SHARED_TLS)

    def entry(self, role: TokenRole) -> str:
        """Return the address of the page that logs a user of this role in, once."""
        with self.hub(role) as hub:
            code = hub.post("codes").raise_for_status().json()["code"]
            return f"{str(hub.base_url).removesuffix('/api/v1/')}/#code={code}"

    def hub(self, role: TokenRole = TokenRole.CONTROLLER) -> httpx.Client:
        """The hub as its page asks it."""
        key = derive_token(read_secret(self.folder / "secret"), role)
        url = json.loads((self.folder / "hub.json").read_text())["url"] + "/api/v1"
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=url, headers=headers, timeout=DEADLINE_S, trust_env=False, verify=SHARED_TLS)

    def rank(self, rank: int) -> int:
        """The process of a rank."""
        uid = json.loads((self.folder / "backend.json").read_text())["uid"]
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                found = path.read_bytes().split(b"\0")
                if {f"RANK={rank}".encode(), f"MEGATRONAPP_JOB_UID={uid}".encode()} <= set(found):
                    return int(path.parent.name)
        raise AssertionError(f"no rank {rank}")


@contextlib.contextmanager
def served(
    state: pathlib.Path, model: pathlib.Path, name: str, *arguments: str, megatronapp: Sequence[str] = MEGATRONAPP
) -> Iterator[Served]:
    """Serve in the background."""
    job = Served(state, name, megatronapp)
    job.cli(*command(model, name), "--detach", *arguments)
    try:
        yield job
    finally:
        job.cli("delete", name, "--force")


def command(model: pathlib.Path, name: str) -> list[str]:
    serve = ["serve", "--name", name, "--port", "0", "--load", str(model / "saved")]
    return [*serve, "--tokenizer-file", str(model / "tokenizer.json")]
