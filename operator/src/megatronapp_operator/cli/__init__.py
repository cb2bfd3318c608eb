"""Subcommands of `megatronapp` for jobs; the command itself is in megatronapp_common."""

from megatronapp_operator.cli.commands import extend, register

__all__ = ["extend", "register"]
