"""The command `megatronapp transport bench`: its parser imports little, ranks are started when it runs."""

import argparse
from typing import Any

_DESCRIPTION = """\
Measure the native transport between ranks of this machine.

Starts N ranks, lets each pair in turn send messages through shared memory, and prints latency (half of a round trip of
4 KiB) and bandwidth of each pair: forth (lower to higher rank), back, and both at once with the bytes of both counted.
memcpy copies within a rank, for comparison. A received message is released unread; gloo copies it into a tensor.
"""
_EPILOG = """\
examples:
  megatronapp transport bench
  megatronapp transport bench --ranks 4 --gloo --json
"""
MOST_RANKS = 64


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `transport` and its subcommands."""
    transport = subparsers.add_parser(
        "transport", help="measure transfers between ranks", description="Measure transfers between ranks."
    )
    commands = transport.add_subparsers(dest="transport_command", metavar="COMMAND", required=True)
    bench = commands.add_parser(
        "bench",
        help="bandwidth and latency of each pair of ranks of this machine",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = bench.add_argument
    add("--ranks", type=_bounded(2, MOST_RANKS), default=2, metavar="N", help=f"2 to {MOST_RANKS} (default: 2)")
    add("--sizes", type=_sizes, default=(1, 64), metavar="MIB", help="message sizes in MiB (default: 1,64)")
    add("--rounds", type=_bounded(1, 1000), default=3, metavar="N", help="measurements of each, for medians")
    add("--gloo", action="store_true", help="measure gloo as well (needs torch)")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    bench.set_defaults(func=run_bench)


def run_bench(values: argparse.Namespace) -> int:
    """Measure and print. Returns the exit code."""
    import json

    from megatronapp_trainer.pipeline.transport.bench.results import measure, tables

    result = measure(
        ranks=values.ranks, sizes=tuple(size << 20 for size in values.sizes), rounds=values.rounds, gloo=values.gloo
    )
    print(json.dumps(result) if values.json else "\n".join(tables(result)))
    return 0


def _bounded(least: int, most: int) -> Any:  # noqa: ANN401 - what argparse takes as a type
    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not between {least} and {most}")
        return value

    return number


def _sizes(text: str) -> tuple[int, ...]:
    read = _bounded(1, 1024)
    return tuple(read(part) for part in text.split(","))
