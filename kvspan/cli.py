"""The `kvspan` command: finds the command that was named, runs it and turns errors into exit codes.

Exit codes: 0 done, 1 refused or failed, 2 a flag or setting is wrong, 130 interrupted. Results go to stdout,
everything else to stderr, one line per error.

A new command is one more entry of COMMANDS.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from common.errors import ConfigError, KVSpanError
from kvspan.audit.command import AUDIT
from kvspan.bench.command import BENCH
from kvspan.commands.check import CHECK
from kvspan.commands.command import EXIT_FAILED, EXIT_USAGE, Command, CommandFailed
from kvspan.commands.demo import DEMO
from kvspan.commands.flags import shown_error
from kvspan.commands.generate import GENERATE
from kvspan.commands.health import HEALTH
from kvspan.commands.services import DECODE, PREFILL
from kvspan.commands.status import STATUS
from kvspan.commands.up import UP

EXIT_INTERRUPTED = 130
"""What shells give a program that Ctrl-C ended."""

COMMANDS: tuple[Command, ...] = (UP, PREFILL, DECODE, GENERATE, STATUS, CHECK, HEALTH, DEMO, BENCH, AUDIT)
"""Every command, in the order of the help."""


def make_parser(commands: Sequence[Command]) -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="kvspan",
        description="Moves the KV cache of a prompt from a prefill to a decode service while prefill runs.",
        allow_abbrev=False,
    )
    choices = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in commands:
        sub = choices.add_parser(
            command.name, help=command.summary, description=command.summary, allow_abbrev=False
        )
        command.add_arguments(sub)
        sub.set_defaults(command=command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    # The C core of grpc reports every ordinary end of a connection otherwise.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    arguments = make_parser(COMMANDS).parse_args(argv)
    command: Command = arguments.command
    try:
        return command.run(arguments)
    except ConfigError as error:
        _complain(shown_error(error))
        return EXIT_USAGE
    except CommandFailed as error:
        _complain(str(error))
        return error.exit_code
    except KVSpanError as error:
        _complain(f"{error.code}: {error}")
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output is gone; without this the interpreter complains once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _complain(text: str) -> None:
    print(f"kvspan: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
