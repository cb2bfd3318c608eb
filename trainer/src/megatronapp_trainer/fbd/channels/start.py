"""Exchange of small objects between the ranks of both roles while they start, over the launcher's store."""

import pickle
from typing import Any

from torch._C._distributed_c10d import Store


class StartExchange:
    """Objects that ranks publish once and others read, by name and rank of the launcher."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank

    def put(self, name: str, value: object) -> None:
        """Publish an object of this rank."""
        self._store.set(f"fbd/{name}/{self._rank}", pickle.dumps(value).hex())

    def get(self, name: str, rank: int) -> Any:  # noqa: ANN401 - what `put` was given
        """Return the object of a rank; wait for it up to the timeout of the store."""
        return pickle.loads(bytes.fromhex(self._store.get(f"fbd/{name}/{rank}").decode()))
