"""Paths of a job's state: $XDG_STATE_HOME/megatronapp/jobs/<name>/ (docs/contracts.md, section 8)."""

import dataclasses
import os
import pathlib

from megatronapp_common.state import jobs_dir
from megatronapp_operator.backends.process.state import files


def shm_dir() -> pathlib.Path:
    """Return the folder of rings and documents in shared memory."""
    return pathlib.Path(os.environ.get("MEGATRONAPP_SHM_DIR") or "/dev/shm")


@dataclasses.dataclass(frozen=True, slots=True)
class JobPaths:
    """Files of one job."""

    root: pathlib.Path

    @classmethod
    def of(cls, name: str) -> "JobPaths":
        """Return the files of the job of this name."""
        return cls(jobs_dir() / name)

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def manifest(self) -> pathlib.Path:
        """The MegatronJob that was accepted, with its effective spec."""
        return self.root / "job.yaml"

    @property
    def layers(self) -> pathlib.Path:
        """Layers of the effective spec: fields of the job itself, and profiles."""
        return self.root / "layers.json"

    @property
    def status(self) -> pathlib.Path:
        return self.root / "status.json"

    @property
    def events(self) -> pathlib.Path:
        """Events of the job, one JSON object a line."""
        return self.root / "events.jsonl"

    @property
    def lock(self) -> pathlib.Path:
        """Lock file, held (flock) while the backend lives."""
        return self.root / "backend.lock"

    @property
    def backend(self) -> pathlib.Path:
        """Process id and start time of the backend; deleted after an orderly end."""
        return self.root / "backend.json"

    @property
    def backend_log(self) -> pathlib.Path:
        """Output of a detached backend."""
        return self.root / "backend.log"

    @property
    def secret(self) -> pathlib.Path:
        return self.root / "secret"

    @property
    def hub(self) -> pathlib.Path:
        """Address of the hub."""
        return self.root / "hub.json"

    @property
    def serve(self) -> pathlib.Path:
        """Address of the API of a served model."""
        return self.root / "serve.json"

    @property
    def hub_state(self) -> pathlib.Path:
        """State folder of the hub."""
        return self.root / "hub"

    @property
    def hub_log(self) -> pathlib.Path:
        return self.root / "hub.log"

    def attempt(self, attempt: int) -> pathlib.Path:
        return self.root / f"attempt-{attempt}"

    def run_dir(self, attempt: int, worker: int) -> pathlib.Path:
        """Return RUN_DIR of one worker."""
        return self.attempt(attempt) / f"worker-{worker}"

    def attempts(self) -> list[int]:
        """Return the numbers of the attempts that left a folder, oldest first."""
        return sorted(int(path.name.removeprefix("attempt-")) for path in self.root.glob("attempt-*"))

    def remove(self) -> None:
        """Delete the files of the job, its logs included. Raises OSError."""
        files.remove_tree(self.root)


def shm_prefix(uid: str, attempt: int | None = None, worker: int | None = None) -> str:
    """Return the prefix of the shared-memory files of a job, of one attempt, or of one worker.

    It ends where the next part begins ('-' or '.'), so that worker 1 is no prefix of worker 10.
    """
    prefix = f"megatronapp-{uid}-"
    if attempt is not None:
        prefix += f"a{attempt}-"
    return prefix if worker is None else f"{prefix}w{worker}"
