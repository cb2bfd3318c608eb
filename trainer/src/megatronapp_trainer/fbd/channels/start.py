"""Exchange of small objects between the ranks of both roles while they start, over the launcher's store."""

import pickle
from typing import Any

from torch._C._distributed_c10d import Store


class StartExchange:
    """Objects that ranks publish once and others read, by name and rank of the launcher."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size

    def put(self, name: str, value: object) -> None:
        """Publish an object of this rank."""
        self._store.set(f"fbd/{name}/{self._rank}", pickle.dumps(value).hex())

    def get(self, name: str, rank: int) -> Any:  # noqa: ANN401 - what `put` was given
        """Return the object of a rank; wait for it up to the timeout of the store."""
        return pickle.loads(bytes.fromhex(self._store.get(f"fbd/{name}/{rank}").decode()))

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
