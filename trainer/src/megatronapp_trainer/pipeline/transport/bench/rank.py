"""One rank of `megatronapp transport bench`: the first one calls pairs up in turn, so that one pair measures at a time.

    python -m megatronapp_trainer.pipeline.transport.bench.rank OPTIONS

OPTIONS is a JSON object with the fields of `RankOptions`. The first rank prints a JSON list: the results of all pairs.
"""

import dataclasses
import datetime
import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import megatronapp_native as native
from megatronapp_trainer.pipeline.transport.bench.pair import DEADLINE_S, PairOptions, PairRank

RESULT_BYTES = 64 << 10
"""More than the result of a pair takes."""
PATIENCE_S = 3600.0
"""For the measurements of all other pairs."""


@dataclasses.dataclass(frozen=True, slots=True)
class RankOptions:
    """Options of a rank, from the process that starts it."""

    rank: int
    ranks: int
    pair: PairOptions


def main(arguments: list[str]) -> int:
    """Measure the pairs of one rank. Returns the exit code."""
    fields = json.loads(arguments[0])
    pair = fields.pop("pair")
    pair["sizes"] = tuple(pair["sizes"])
    options = RankOptions(**fields, pair=PairOptions(**pair))
    if options.pair.gloo:
        _begin_gloo(options)
    control = native.TransportEndpoint(
        directory=options.pair.directory,
        job=options.pair.job,
        attempt=1,
        rank=options.rank,
        slot_bytes=RESULT_BYTES,
        slots=1,
        deadline_s=DEADLINE_S,
        threads=1,
    )
    for peer in range(1, options.ranks) if options.rank == 0 else (0,):
        control.add_peer(peer, True)
    control.connect()
    if options.rank == 0:
        print(json.dumps(list(_lead(options, control))), flush=True)
    else:
        _follow(options, control)
    control.close(True)
    return 0


def _lead(options: RankOptions, control: native.TransportEndpoint) -> Iterator[dict[str, Any]]:
    """Yield the result of each pair."""
    control.lead(range(1, options.ranks))
    for number, (first, second) in enumerate(_pairs(options.ranks)):
        control.append(number, PATIENCE_S)
        if first == 0:
            result = _measured(options, second)
        else:
            result = json.loads(bytes(memoryview(control.receive(first, number, PATIENCE_S))))
        yield {"ranks": [first, second], **result}


def _follow(options: RankOptions, control: native.TransportEndpoint) -> None:
    """Measure the pairs of this rank, and send the first rank the results of those that begin with it."""
    for number, (first, second) in enumerate(_pairs(options.ranks)):
        control.next_entry(0, PATIENCE_S)
        if options.rank == second:
            _measured(options, first)
        elif options.rank == first:
            result = np.frombuffer(json.dumps(_measured(options, second)).encode(), np.uint8)
            control.send(0, number, result.ctypes.data, result.size, result)


def _measured(options: RankOptions, peer: int) -> dict[str, Any]:
    pair = PairRank(options.pair, options.rank, peer)
    try:
        return pair.measure()
    finally:
        pair.close()


def _pairs(ranks: int) -> Iterator[tuple[int, int]]:
    return itertools.combinations(range(ranks), 2)


def _begin_gloo(options: RankOptions) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    torch.set_num_threads(1)
    store = FileStore(f"{options.pair.directory}/gloo", options.ranks)
    timeout = datetime.timedelta(seconds=DEADLINE_S)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.ranks, timeout=timeout)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
