"""The command line: one typer app, a module for each group of commands.

Commands are imported when they are called, so that `berth --help` answers at once.
"""

from __future__ import annotations

import typer

from berth.cli import demo_command, process_commands, stack_commands
from berth.cli.application import after_up, application_processes

app = typer.Typer(
    name="berth",
    help="GPU nodes under Kubernetes as one event-sourced system.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

stack_commands.register(app, application_processes, after_up)
process_commands.register(app)
demo_command.register(app)


def main() -> None:
    app()
