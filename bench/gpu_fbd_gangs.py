"""Gangs of `gpu_fbd.py` that are alive at the same time, and take turns on the devices."""

import argparse
import contextlib
import json
import pathlib
import queue
import secrets
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener
from typing import Any

from bench_layouts import fork_server
from gpu_fbd_ranks import KEY, Figures, Gang, work

START_S = 240.0
"""Time for the start of a gang, beyond that of the measurement."""


class GangError(Exception):
    """A rank has failed; the text is that of all ranks."""


class RunningGang:
    """A gang that waits for commands; the ranks answer each of them."""

    def __init__(self, bench: "GangBench", gang: Gang) -> None:
        self.gang = gang
        self.token = secrets.token_hex(4)
        self._error: Exception | None = None
        self._connections: dict[int, Connection[Any, Any]] = {}
        self.roles: dict[int, Figures] = {}
        self._thread = threading.Thread(target=self._run, args=(bench,), daemon=True)
        self._thread.start()

    def _run(self, bench: "GangBench") -> None:
        flags = "compete" if self.gang.competes else bench.flags(self.gang)
        environment = {"MEGATRONAPP_JOB_UID": f"bench-{self.token}"}
        if not bench.options.cpu:
            visible = range(self.gang.first_gpu, self.gang.first_gpu + self.gang.gpus)
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, visible))
        if self.gang.deterministic:
            environment |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
        try:
            bench.server.run(
                self.gang.ranks,
                work,
                bench.address,
                self.token,
                flags,
                timeout_s=bench.options.seconds + START_S,
                environment=environment,
            )
        except Exception as error:
            self._error = error

    def admit(self, rank: int, connection: "Connection[Any, Any]") -> None:
        self._connections[rank] = connection

    @property
    def is_complete(self) -> bool:
        """Return whether all ranks have connected. Raises GangError if the gang has failed."""
        self._refuse_failed()
        return len(self._connections) == self.gang.ranks

    def learn_roles(self) -> None:
        self.roles = {rank: self._receive(rank) for rank in self._connections}

    def command(self, *command: str | int) -> dict[int, Figures]:
        """Let the ranks that train do something. Returns the figures of all ranks."""
        for rank, role in self.roles.items():
            if role["role"] != "forward":
                self._connections[rank].send(command)
        return {rank: self._receive(rank) for rank in self.roles}

    def end(self) -> None:
        """End all ranks, and wait for them. Raises GangError where one does not end well."""
        for rank, role in self.roles.items():
            if role["role"] != "forward":
                self._connections[rank].send(("end",))
        self._thread.join(60)
        self._refuse_failed()

    def _receive(self, rank: int) -> Figures:
        connection = self._connections[rank]
        while not connection.poll(1.0):
            self._refuse_failed()
            if not self._thread.is_alive():
                raise GangError(f"{self.gang.name}: rank {rank} has ended without an answer")
        try:
            figures: Figures = connection.recv()
        except EOFError as error:
            self._thread.join(30)
            self._refuse_failed()
            raise GangError(f"{self.gang.name}: rank {rank} has ended") from error
        return figures

    def _refuse_failed(self) -> None:
        if self._error is not None:
            raise GangError(f"{self.gang.name}: {self._error}") from self._error


class GangBench:
    """Starts gangs, gives them their turns, and keeps what they measure."""

    def __init__(self, options: argparse.Namespace, directory: pathlib.Path) -> None:
        self.options = options
        self._directory = directory
        self.server = fork_server(directory, devices=not options.cpu)
        self.address = str(directory / "commander")
        self.server.python()  # starts it
        self._listener = Listener(self.address, authkey=KEY)
        self._accepted: queue.Queue[tuple[str, int, Connection[Any, Any]]] = queue.Queue()
        threading.Thread(target=self._accept, daemon=True).start()
        self._ends = time.monotonic() + options.seconds
        self.results: dict[str, Any] = {"options": {name: str(value) for name, value in vars(options).items()}}

    def flags(self, gang: Gang) -> str:
        """Return the command line of a gang's ranks."""
        options = self.options
        values = {
            "--num-layers": options.layers * gang.stages,
            "--hidden-size": options.hidden,
            "--num-attention-heads": options.heads,
            "--seq-length": options.sequence,
            "--vocab-size": options.vocabulary,
            "--micro-batch-size": options.micro_batch,
            "--global-batch-size": options.batch,
            "--train-iters": 100_000,
            "--lr": 1e-4,
            "--eval-iters": 0,
            "--attention-dropout": 0,
            "--hidden-dropout": 0,
        }
        text = " ".join(f"{name} {value}" for name, value in values.items())
        text += f" --mock-data --bf16 --untie-embeddings-and-output-weights {gang.flags}"
        if options.cpu:
            text = text.replace("--ranks-per-gpu 2", "")
        return text + (" --deterministic-mode" if gang.deterministic else "")

    def start(self, gangs: list[Gang]) -> dict[str, RunningGang]:
        """Start gangs at once; returns when all their ranks wait for commands."""
        running = {gang.name: RunningGang(self, gang) for gang in gangs}
        by_token = {gang.token: gang for gang in running.values()}
        while not all([gang.is_complete for gang in running.values()]):
            with contextlib.suppress(queue.Empty):
                token, rank, connection = self._accepted.get(timeout=0.2)
                if token in by_token:  # not of a gang that has failed
                    by_token[token].admit(rank, connection)
        for gang in running.values():
            gang.learn_roles()
        return running

    def _accept(self) -> None:
        while True:
            connection = self._listener.accept()
            self._accepted.put((*connection.recv(), connection))

    def run(
        self, name: str, gangs: list[Gang], measure: Callable[["GangBench", dict[str, RunningGang]], list[Figures]]
    ) -> None:
        """Run an experiment: its gangs take turns in blocks; what it gives is printed and kept."""
        begun = time.monotonic()
        rows: list[Figures] = []
        try:
            running = self.start(gangs)
            started = time.monotonic()
            rows = measure(self, running)
            for gang in running.values():
                gang.end()
            notes: Figures = {"start_s": round(started - begun, 1), "measured_s": round(time.monotonic() - started, 1)}
        except Exception:
            notes = {"failed": traceback.format_exc()}
            self._replace_server()
        for row in rows:
            print(json.dumps({"experiment": name, **row}), flush=True)
        print(json.dumps({"experiment": name, **notes}), flush=True)
        self.results[name] = {**notes, "rows": rows}
        self.options.out.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")

    def _replace_server(self) -> None:
        """End all ranks of an experiment that has failed: they would keep their memory."""
        self.server.stop()
        directory = self._directory / secrets.token_hex(4)
        directory.mkdir()
        self.server = fork_server(directory, devices=not self.options.cpu)
        self.server.python()  # starts it

    def alternate(self, variants: dict[str, Callable[[], Figures]]) -> dict[str, list[Figures]]:
        """Give each its turn in every block, from another one on each time; returns their figures by block."""
        found: dict[str, list[Figures]] = defaultdict(list)
        names = list(variants)
        for name in names:
            for _ in range(self.options.warm):
                variants[name]()
        for block in range(self.options.blocks):
            for name in names[block % len(names) :] + names[: block % len(names)]:
                found[name].append(variants[name]())
            if time.monotonic() > self._ends:
                break
        return found

    @property
    def is_over(self) -> bool:
        return bool(time.monotonic() > self._ends)

    def close(self) -> None:
        self.server.stop()
        self._listener.close()
