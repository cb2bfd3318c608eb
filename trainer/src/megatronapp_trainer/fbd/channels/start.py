"""Exchange of small objects between the ranks of both roles while they start, over the launcher's store."""

import hashlib
import hmac
import os
import pathlib
import pickle
from typing import Any

from torch._C._distributed_c10d import Store

from megatronapp_common.names import Env
from megatronapp_common.web.tokens import TokenRole, derive_token, read_secret
from megatronapp_trainer.errors import TransferError, UsageError


def exchange_key() -> bytes:
    """Return the key with which ranks of this job seal what they publish; empty where no backend has started them.

    Raises UsageError if the job's secret cannot be read.
    """
    path = os.environ.get(Env.SECRET_FILE)
    if not path:
        return b""
    try:
        return derive_token(read_secret(pathlib.Path(path)), TokenRole.GATHER).encode()
    except (OSError, ValueError) as error:
        raise UsageError(f"{Env.SECRET_FILE.value}={path}: {error}") from error


class StartExchange:
    """Objects that ranks publish once and others read, by name and rank of the launcher.

    torch's store lets everyone write who reaches it, and reading a pickle may run what it names. So each object is
    sealed with `key`, which only ranks of the job have.
    """

    def __init__(self, store: Store, rank: int, world_size: int, *, key: bytes) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._key = key

    def put(self, name: str, value: object) -> None:
        """Publish an object of this rank."""
        data = pickle.dumps(value)
        self._store.set(f"fbd/{name}/{self._rank}", (self._seal(name, self._rank, data) + data).hex())

    def get(self, name: str, rank: int) -> Any:  # noqa: ANN401 - what `put` was given
        """Return the object of a rank; wait for it up to the timeout of the store.

        Raises TransferError for one that no rank of this job has published.
        """
        stored = self._store.get(f"fbd/{name}/{rank}").decode()
        try:
            sealed = bytes.fromhex(stored)
        except ValueError:
            sealed = b""
        seal, data = sealed[: hashlib.sha256().digest_size], sealed[hashlib.sha256().digest_size :]
        if not hmac.compare_digest(seal, self._seal(name, rank, data)):
            raise TransferError(
                f"{name} of rank {rank} in torch's store is not what that rank has published: a process without this "
                "job's secret has written it"
            )
        return pickle.loads(data)

    def _seal(self, name: str, rank: int, data: bytes) -> bytes:
        return hmac.digest(self._key, f"{name}:{rank}:".encode() + data, hashlib.sha256)

    def gather(self, name: str, value: object) -> list[Any]:
        """Return the objects of all ranks, by rank; collective over both roles.

        Rank 0 collects them, so that the store answers twice as many requests as there are ranks, not their square.
        """
        self.put(name, value)
        if self._rank == 0:
            self.put(f"{name}/all", [self.get(name, rank) for rank in range(self._world_size)])
        found: list[Any] = self.get(f"{name}/all", 0)
        if self._store.add(f"fbd/{name}/read", 1) == self._world_size:
            self._store.set(f"fbd/{name}/done", "")
        if self._rank == 0:  # it may serve the store, and end because of what it has read
            self._store.wait([f"fbd/{name}/done"])
        return found
