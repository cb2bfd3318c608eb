"""Commands of traces, MegaScope's sessions and what-if, for the command line that common assembles."""

from megatronapp_analyzer.cli.commands import register

__all__ = ["register"]
