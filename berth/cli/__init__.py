"""The command line: one typer app, a module for each group of commands.

Commands are imported when they are called, so that `berth --help` answers at once.
"""

from __future__ import annotations

import sys

import typer

from berth.cli import process_commands


def command_line(*, processes_only: bool = False) -> typer.Typer:
    """The command line. `processes_only`: without what starts stacks, whose imports cost a process 10 MB for good."""
    app = typer.Typer(
        name="berth",
        help="GPU nodes under Kubernetes as one event-sourced system.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    if not processes_only:
        from berth.cli import (
            cache_commands,
            demo_command,
            devices_commands,
            explain_command,
            recommend_command,
            simulate_command,
            stack_commands,
        )
        from berth.cli.application import after_up, application_processes

        stack_commands.register(app, application_processes, after_up)
        demo_command.register(app)
        app.command()(devices_commands.devices)
        explain_command.register(app)
        cache_commands.register(app)
        recommend_command.register(app)
        simulate_command.register(app)
    process_commands.register(app)
    return app


def main() -> None:
    command_line(processes_only=sys.argv[1:2] in (["controller"], ["worker"], ["node"]))()
