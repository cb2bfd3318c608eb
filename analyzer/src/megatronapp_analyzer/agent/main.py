"""Command line of the agent: serve one worker, with settings from the environment (names.Env)."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from megatronapp_analyzer.agent.rings import native_library
from megatronapp_analyzer.agent.settings import load_settings
from megatronapp_analyzer.agent.worker_life import AgentLife
from megatronapp_analyzer.errors import AnalyzerError
from megatronapp_analyzer.process import die_with_parent
from megatronapp_common.names import ExitCode


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
        asyncio.run(AgentLife(settings, native_library()).run())
    except AnalyzerError as error:
        print(f"agent: {error}", file=sys.stderr)
        return int(ExitCode.USAGE)
    return int(ExitCode.OK)
