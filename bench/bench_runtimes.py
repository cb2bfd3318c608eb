"""Losses and gradient norms of MegaDPP and MegaFBD compared with plain training, on CPU ranks in fp32.

    python bench/bench_runtimes.py [--only dpp] [--steps 50] [--ship saved,selective,full,auto] [--layouts "PP2;VPP3"]

Each row is a layout, each column a schedule of MegaDPP or what MegaFBD ships. "equal" is to the last bit, in the
losses and the gradient norms of all steps, to plain training in the same layout (megatron-core's static schedule);
otherwise the largest relative difference is given. Asked is "equal"; of placements of ZB-V and of merged forward ranks,
where the order of sums differs, at most 1e-5. In "delayed" columns ranks pause at random before they send, and inputs
are withheld and arrive in another order (MegaDPP), or ranks pause before and after messages (MegaFBD; ranks that choose
their passes find messages late, in another order). "policy auto" of MegaFBD is that of --use-dpp. The last column
is the largest relative difference of plain training in that layout to one process, at most 1e-5. Ends with 1 where
something is not as asked.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

from bench_layouts import TOLERANCE, TP2, UNTIED, Record, fork_server, largest_difference, record_of, train

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 4 --lr 2e-3 --lr-decay-style cosine --lr-warmup-iters 2 --mock-data "
    "--vocab-size 120 --eval-iters 0"
)
STILL = "--attention-dropout 0 --hidden-dropout 0"
PP2, PP4 = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
VPP2, SP = f"{PP2} --num-virtual-stages-per-pipeline-rank 2", "--sequence-parallel"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 2000"
SELECTIVE = "--recompute-granularity selective"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SWITCH, MERGED = "--forward-backward-disaggregating", "--ignore-forward-tensor-parallel"
UNCLIPPED = f"{UNTIED} --clip-grad 1000"
"""With a norm that nothing reaches, so that it is computed and changes nothing."""
SCHEDULES = ("static", "auto", "dfc", "bfc", "zero-bubble")
DELAYED = ("auto", "dfc", "bfc")
SEED = 7
PAUSE_S = 2e-3


@dataclasses.dataclass(frozen=True)
class LayoutCase:
    """A layout and the flags of its model."""

    ranks: int
    """Ranks of plain training."""
    layout: str
    model: str = STILL
    own: str = ""
    """Flags of MegaFBD alone."""
    fbd_ranks: int = 0
    """0: twice as many as of plain training."""
    exact: bool = True
    comparable: bool = True
    """True if one process draws the same dropout masks, so that losses are comparable."""


EIGHT = "--global-batch-size 8"
"""Samples of a step, where two replicas share them."""
DPP = {
    "PP2": LayoutCase(2, PP2),
    "VPP2, untied, full recompute": LayoutCase(2, f"{VPP2} {FULL}", f"{STILL} {UNCLIPPED}"),
    "VPP3": LayoutCase(2, f"{PP2} --num-virtual-stages-per-pipeline-rank 3", f"{STILL} --num-layers 6"),
    "PP4": LayoutCase(4, PP4),
    "PP2, selective recompute": LayoutCase(2, f"{PP2} {SELECTIVE}"),
    "TP2 x PP2, SP": LayoutCase(4, f"{TP2} {PP2} {SP}"),
    "DP2 x PP2, distributed optimizer": LayoutCase(4, f"{PP2} {SHARDED}", f"{STILL} {EIGHT}"),
    "TP2 x PP2": LayoutCase(4, f"{TP2} {PP2}"),
    "DP2 x PP2": LayoutCase(4, PP2, f"{STILL} {EIGHT}"),
}
FOR_TWO = "--fbd-backward-per-forward 2"
FBD = {
    "pair": LayoutCase(1, ""),
    "pair, dropout 0.1": LayoutCase(1, "", "", comparable=False),
    "pair, selective recompute": LayoutCase(1, SELECTIVE),
    "pair, full recompute": LayoutCase(1, FULL),
    "PP2": LayoutCase(2, PP2),
    "VPP2, untied": LayoutCase(2, VPP2, f"{STILL} {UNCLIPPED}"),
    "TP2": LayoutCase(2, TP2),
    "TP2, SP, dropout 0.1": LayoutCase(2, f"{TP2} {SP}", "", comparable=False),
    "DP2": LayoutCase(2, "", f"{STILL} {EIGHT}"),
    "DP2, distributed optimizer": LayoutCase(2, SHARDED, f"{STILL} {EIGHT}"),
    "one forward rank for DP2": LayoutCase(2, SHARDED, f"{STILL} {EIGHT}", FOR_TWO, 3),
    "merged forward, TP2": LayoutCase(2, TP2, STILL, MERGED, 3, exact=False),
    "merged forward, TP2, SP": LayoutCase(2, f"{TP2} {SP}", STILL, MERGED, 3, exact=False),
    "PP2, full recompute, dropout 0.1": LayoutCase(2, f"{PP2} {FULL}", "", comparable=False),
    "TP2 x PP2, SP": LayoutCase(4, f"{TP2} {PP2} {SP}"),
}


@dataclasses.dataclass(frozen=True)
class Column:
    """A variant of the runtime."""

    name: str
    flags: str
    delayed: bool = False

    def runs(self, case: LayoutCase) -> bool:
        """Return whether the layout can run the variant with the masks of plain training."""
        chunks = 3 if "rank 3" in case.layout else 1
        if "zero-bubble" in self.flags:
            return chunks <= 2
        if SWITCH in self.flags and "--use-dpp" in self.flags:
            return PP2 in case.layout and TP2 not in case.layout and STILL in case.model
        return True


class DelayedSends:
    """A transport of MegaDPP that pauses at random before it sends."""

    def __init__(self, transport: Any, seed: int) -> None:  # noqa: ANN401 - of the schedule
        import random

        self._transport = transport
        self._draw = random.Random(seed)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of the transport
        return getattr(self._transport, name)

    def send(self, target: Any, tensor: Any) -> None:  # noqa: ANN401 - of the transport
        time.sleep(PAUSE_S * self._draw.random())
        self._transport.send(target, tensor)


def delay_tasks(seed: int) -> None:
    """Let inputs of this rank's tasks arrive late and in another order, and its outputs leave late."""
    import late_inputs

    late_inputs.wrap_transport(lambda transport: late_inputs.LateInputs(DelayedSends(transport, seed), seed))


def delay_messages(seed: int) -> None:
    """Let messages between ranks of MegaFBD leave and be taken late."""
    import random

    import late_messages

    from megatronapp_trainer.fbd.channels.channel import Channel

    draw = random.Random(seed)
    send, receive = Channel.send, Channel.receive

    def pause() -> None:
        if draw.random() < 0.2:
            time.sleep(PAUSE_S * draw.random())

    def delayed_send(*arguments: Any) -> None:  # noqa: ANN401 - of the channel
        pause()
        send(*arguments)

    def delayed_receive(*arguments: Any) -> Any:  # noqa: ANN401 - of the channel
        tensor = receive(*arguments)
        pause()
        return tensor

    late_messages.install(seed)
    Channel.send, Channel.receive = delayed_send, delayed_receive  # type: ignore[method-assign, assignment]


def train_delayed(flags: str) -> Record | None:
    """Train as `train` does, with delays that the rank draws."""
    seed = SEED + int(os.environ["RANK"])
    (delay_messages if SWITCH in flags else delay_tasks)(seed)
    return train(flags)


class Comparison:
    """Runs layouts, and remembers what plain training gave."""

    def __init__(self, server: Any, steps: int, directory: str) -> None:  # noqa: ANN401 - a ForkServer
        self._server = server
        self._steps = steps
        self._directory = directory
        self._known: dict[tuple[int, str], Record] = {}
        self._runs = 0
        self.rows: list[dict[str, Any]] = []
        self.wrong: list[str] = []

    def table(self, title: str, cases: dict[str, LayoutCase], columns: list[Column]) -> None:
        """Print a row for each layout as soon as it is known."""
        names = [column.name for column in columns]
        print(f"\n| {title} | ranks | {' | '.join(names)} | plain, to one process |")
        print("|" + "---|" * (3 + len(columns)), flush=True)
        for name, case in cases.items():
            plain = self._plain(case.ranks, f"{case.model} {case.layout}")
            cells = {column.name: self._cell(name, case, column, plain) for column in columns}
            distance = self._distance(name, case, plain)
            print(f"| {name} | {self._ranks(case, columns)} | {' | '.join(cells.values())} | {distance} |", flush=True)
            self.rows.append({"table": title, "layout": name, **cells, "to one process": distance})

    def _ranks(self, case: LayoutCase, columns: list[Column]) -> int:
        return self._world(case, columns[0].flags)

    def _world(self, case: LayoutCase, flags: str) -> int:
        return (case.fbd_ranks or 2 * case.ranks) if SWITCH in flags else case.ranks

    def _cell(self, name: str, case: LayoutCase, column: Column, plain: Record) -> str:
        """Return "equal", or how much losses and norms of a variant differ from those of plain training."""
        chunks = 3 if "rank 3" in case.layout else 2 if "virtual" in case.layout else 1
        is_zero_bubble = "zero-bubble" in column.flags
        if not column.runs(case):
            return "-"
        flags = f"{case.model} {case.layout} {case.own if SWITCH in column.flags else ''} {column.flags}"
        try:
            record = self._run(self._world(case, column.flags), flags, delayed=column.delayed)
        except Exception as error:
            print(f"{name}, {column.name}: {error}", file=sys.stderr, flush=True)
            self.wrong.append(f"{name}, {column.name}")
            return "failed"
        if record == plain:
            return "equal"
        difference = max(largest_difference(*pair) for pair in zip(record, plain, strict=True))
        if (case.exact and not (is_zero_bubble and chunks == 2)) or not difference <= TOLERANCE:
            self.wrong.append(f"{name}, {column.name}")
        return f"{difference:.1e}"

    def _distance(self, name: str, case: LayoutCase, plain: Record) -> str:
        if not case.comparable:
            return "-"
        anchor = self._plain(1, case.model)
        difference = max(largest_difference(*pair) for pair in zip(plain, anchor, strict=True))
        if not difference <= TOLERANCE:
            self.wrong.append(f"{name}, to one process")
        return f"{difference:.1e}" if difference else "equal"

    def _plain(self, world: int, flags: str) -> Record:
        if (world, flags) not in self._known:
            self._known[world, flags] = self._run(world, flags, delayed=False)
        return self._known[world, flags]

    def _run(self, world: int, flags: str, *, delayed: bool) -> Record:
        self._runs += 1
        environment = {"MEGATRONAPP_SHM_DIR": self._directory, "MEGATRONAPP_JOB_UID": f"bench-{self._runs}"}
        function = train_delayed if delayed else train
        line = f"{MODEL} --train-iters {self._steps} {flags}"
        record = record_of(self._server, world, line, function=function, environment=environment)
        if len(record[0]) != self._steps or not all(record[1]):
            raise ValueError(f"{line}: {len(record[0])} losses and norms {record[1]}")
        return record


def columns_of_dpp() -> list[Column]:
    columns = [Column(name, f"--use-dpp --dpp-schedule {name}") for name in SCHEDULES]
    return columns + [Column(f"{name}, delayed", f"--use-dpp --dpp-schedule {name}", delayed=True) for name in DELAYED]


def columns_of_fbd(ships: list[str]) -> list[Column]:
    columns = [Column(ship, f"{SWITCH} --fbd-ship {ship}") for ship in ships]
    columns.append(Column(f"{ships[0]}, delayed", columns[0].flags, delayed=True))
    policy = f"{SWITCH} --fbd-ship {ships[0]} --use-dpp"
    return [*columns, Column("policy auto", policy), Column("policy auto, delayed", policy, delayed=True)]


def chosen(cases: dict[str, LayoutCase], names: list[str]) -> dict[str, LayoutCase]:
    return {name: case for name, case in cases.items() if not names or name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--only", choices=("dpp", "fbd"))
    parser.add_argument("--ship", default="saved,selective,full,auto", help="of MegaFBD, separated by commas")
    parser.add_argument("--layouts", default="", help="names of rows, separated by semicolons; all by default")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    names = [name.strip() for name in options.layouts.split(";") if name]
    known = [*(DPP if options.only != "fbd" else ()), *(FBD if options.only != "dpp" else ())]
    unknown = [name for name in names if name not in known]
    if unknown:
        rows = "; ".join(dict.fromkeys(known))
        parser.error(f"--layouts: there is no row {'; '.join(unknown)}; take some of: {rows}")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        server = fork_server(pathlib.Path(directory))
        comparison = Comparison(server, options.steps, directory)
        try:
            if options.only != "fbd":
                comparison.table("MegaDPP", chosen(DPP, names), columns_of_dpp())
            if options.only != "dpp":
                comparison.table("MegaFBD", chosen(FBD, names), columns_of_fbd(options.ship.split(",")))
        finally:
            server.stop()
            if options.json:
                options.json.write_text(json.dumps(comparison.rows, indent=1) + "\n", encoding="utf-8")
    print("\nall as asked" if not comparison.wrong else f"\nnot as asked: {'; '.join(comparison.wrong)}")
    return 1 if comparison.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
