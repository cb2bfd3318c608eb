"""The workers of a job on this machine, with what they share: the coordinator's port and their progress documents."""

from collections.abc import Iterator
from typing import Any

from megatronapp_common.names import Env, ShmFile
from megatronapp_common.shared_documents import DocumentReader
from megatronapp_operator.backends.process.ports import ReservedPort
from megatronapp_operator.backends.process.settings import ProcessSettings, worker_address, worker_environment
from megatronapp_operator.backends.process.worker import WorkerProcess
from megatronapp_operator.plan import CreateWorker, DeleteWorker, Progress, Worker
from megatronapp_operator.plan_io import hub_summary


class Gang:
    """Workers of the current attempt, and those of older ones that have not ended."""

    def __init__(self, settings: ProcessSettings) -> None:
        self._settings = settings
        self._workers: dict[int, WorkerProcess] = {}
        self._documents: dict[int, DocumentReader] = {}
        self._coordinator: ReservedPort | None = None

    @property
    def pids(self) -> set[int]:
        return {pid for worker in self._workers.values() for pid in worker.pids}

    @property
    def gone(self) -> bool:
        """True if all workers have ended."""
        return all(worker.gone for worker in self._workers.values())

    def create(self, action: CreateWorker, *, hub_url: str, api: ReservedPort | None, now: float) -> None:
        """Start a worker. Before the first of an attempt, release what belongs to the attempt before."""
        if not self._workers:
            self.close()
            self._coordinator = ReservedPort(worker_address(0))
        assert self._coordinator is not None
        environment = worker_environment(
            self._settings,
            index=action.index,
            attempt=action.attempt,
            coordinator=f"{self._coordinator.address}:{self._coordinator.number}",
            hub_url=hub_url,
            serve="" if api is None else f"{api.address}:{api.number}",
        )
        document = self._settings.shm / f"{environment[Env.SHM_PREFIX]}.{ShmFile.PROGRESS}"
        self._documents[action.index] = DocumentReader(document)
        self._workers[action.index] = WorkerProcess(
            self._settings, index=action.index, attempt=action.attempt, environment=environment, now=now
        )

    def delete(self, action: DeleteWorker, now: float) -> None:
        """Request the end of a worker, after its grace period by force."""
        self._workers[action.index].delete(action.grace_s, now)

    def tick(self, now: float, *, attempt: int) -> Iterator[str]:
        """Notice ends and keep agents alive; yield problems of agents.

        Workers of older attempts that have ended are forgotten: the ends of current workers decide over the job.
        """
        for worker in self._workers.values():
            worker.tick(now)
            if worker.trouble is not None:
                yield worker.trouble
                worker.trouble = None
        for index, worker in list(self._workers.items()):
            if worker.attempt != attempt and worker.gone and worker.observe().deletion is not None:
                del self._workers[index]

    def observe(self) -> tuple[Worker, ...]:
        """Return the state of all workers."""
        return tuple(worker.observe() for worker in self._workers.values())

    def progress(self) -> list[Progress | None]:
        """Read the progress documents of the workers."""
        return [hub_summary.read_page(document) for document in self._documents.values()]

    def rank_table(self) -> dict[str, Any] | None:
        """Return the rank table; None until the gang has gathered."""
        return self._workers[0].rank_table() if 0 in self._workers else None

    def close(self) -> None:
        """Release what belongs to one attempt."""
        for document in self._documents.values():
            document.close()
        self._documents.clear()
        if self._coordinator is not None:
            self._coordinator.close()
            self._coordinator = None
