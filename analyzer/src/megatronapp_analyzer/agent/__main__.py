"""`python -m megatronapp_analyzer.agent`: serve one worker, with settings from the environment (names.Env)."""

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence

from megatronapp_analyzer.agent.rings import native_library
from megatronapp_analyzer.agent.service import Agent
from megatronapp_analyzer.agent.settings import AgentSettings, load_settings
from megatronapp_analyzer.errors import AnalyzerError
from megatronapp_analyzer.process import die_with_parent
from megatronapp_common.names import ExitCode


async def serve(settings: AgentSettings) -> None:
    """Run the agent until its rings end or a signal is received."""
    agent = Agent(settings, native_library(), monotonic_ns=time.monotonic_ns)
    loop = asyncio.get_running_loop()
    for sent in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sent, agent.stop)
    await agent.run()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    parent = os.getppid()
    parser = argparse.ArgumentParser(prog="python -m megatronapp_analyzer.agent", description=__doc__)
    parser.add_argument("--die-with-parent", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s agent %(levelname)s %(message)s")
    try:
        settings = load_settings(os.environ)
        if arguments.die_with_parent:
            die_with_parent(parent)
        asyncio.run(serve(settings))
    except AnalyzerError as error:
        print(f"agent: {error}", file=sys.stderr)
        return int(ExitCode.USAGE)
    return int(ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main())
