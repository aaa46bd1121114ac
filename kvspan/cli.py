"""The `kvspan` command: finds the command that was named, runs it and turns errors into exit codes.

Exit codes: 0 done, 1 refused or failed, 2 a flag or setting is wrong, 130 interrupted, 143 and 129 ended by
SIGTERM and SIGHUP. What serves has the code 0 whichever signal ends it, and whenever. Results go to stdout,
everything else to stderr, one line per error.

A new command is one more entry of COMMANDS.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TextIO

import click
from click.core import ParameterSource

from common.errors import ConfigError, KVSpanError
from common.excerpt import visible
from common.telemetry.logging import configure_logging, log_fields
from common.telemetry.stderr import STDERR, json_stderr
from kvspan.audit.command import audit
from kvspan.bench.command import bench
from kvspan.commands.check import check
from kvspan.commands.command import EXIT_FAILED, EXIT_USAGE, CommandFailed
from kvspan.commands.conformance import conformance
from kvspan.commands.demo import demo
from kvspan.commands.flags import refusal_text
from kvspan.commands.generate import generate
from kvspan.commands.health import health
from kvspan.commands.services import decode, prefill
from kvspan.commands.status import status
from kvspan.commands.streams import note, open_closed_streams, print_any_text
from kvspan.commands.up import up
from kvspan.start import EXIT_INTERRUPTED, early_end

logger = logging.getLogger(__name__)

COMMANDS: tuple[click.Command, ...] = (
    up, prefill, decode, generate, status, check, health, demo, bench, audit, conformance,
)  # fmt: skip
"""Every command, in the order of the help."""


class InOrder(click.Group):
    """A group whose help lists the commands in their own order."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return list(self.commands)


def make_parser(commands: Sequence[click.Command]) -> click.Group:
    """Return the command that has all of `commands` below it."""
    text = "Moves the KV cache of a prompt from a prefill to a decode service while prefill runs."
    by_name = {str(command.name): command for command in commands}
    return InOrder("kvspan", by_name, help=text, context_settings={"max_content_width": 110})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; raises SystemExit with it when a signal ends it."""
    line = list(sys.argv[1:] if argv is None else argv)
    with early_end(line):
        # The C core of grpc reports every ordinary end of a connection otherwise.
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        # Torch makes a folder for what it compiles, which is nothing here, as soon as it is imported: below
        # TMPDIR, where it would stay and others can have put something else. This one is there already.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.sep)
        open_closed_streams()
        print_any_text()
        return _run_logging(line)


def _run_logging(line: list[str]) -> int:
    """Run one command line with standard error as it wants it."""
    stream = None
    if name := _json_logger(line):
        leaving = ExitStack()
        # Before any library is loaded, so after what those do and say when the interpreter ends.
        atexit.register(leaving.close)
        stream = leaving.enter_context(json_stderr(name))
        configure_logging(name, json=True, stream=stream)
    if not os.isatty(STDERR):
        # Bars of libraries are for people who watch.
        os.environ.setdefault("TQDM_DISABLE", "1")
    return _run(line, stream)


def _run(line: list[str], stream: TextIO | None) -> int:
    """Run one command line and return its exit code; `stream` is where it logs JSON, if it does."""
    try:
        code = _invoke(line, stream)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read our output is gone and has seen enough.
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (click.ClickException, CommandFailed, KVSpanError) as error:
        code, text = ending_of(error)
        if stream is None:
            note(visible(text))
        else:
            logger.error("command.failed", extra=log_fields(exit_code=code, problem=text))
        return code
    except Exception:
        if stream is None:
            raise
        logger.critical("command.broken", exc_info=True)
        return EXIT_FAILED


def _invoke(line: list[str], stream: TextIO | None) -> int:
    parser = make_parser(COMMANDS)
    try:
        with parser.make_context("kvspan", line, obj=stream) as context:
            return int(parser.invoke(context))
    except click.exceptions.Exit as ended:
        return ended.exit_code


def ending_of(error: click.ClickException | CommandFailed | KVSpanError) -> tuple[int, str]:
    """Return exit code and text of what ended a command: one line, whatever a library wrote into an error."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return EXIT_USAGE, error.format_message()
    if isinstance(error, click.ClickException):
        code, text = EXIT_USAGE, usage_text(error)
    elif isinstance(error, ConfigError):
        code, text = EXIT_USAGE, refusal_text(error)
    elif isinstance(error, CommandFailed):
        code, text = error.exit_code, str(error)
    else:
        code, text = EXIT_FAILED, f"{error.code}: {error}"
    return code, f"kvspan: {' '.join(text.split())}"


def _json_logger(line: Sequence[str]) -> str:
    """Return the command of a line that logs JSON; nothing when it logs none, or has none.

    Known before the line is read: what is wrong with it is told as JSON too.
    """
    command = next((one for one in COMMANDS if one.name in line[:1]), None)
    option = next((one for one in command.params if one.name == "log_json"), None) if command else None
    if command is None or option is None:
        return ""
    is_given = option.opts[0] in line or click.BOOL.str_to_bool(os.environ.get(str(option.envvar), ""))
    return str(command.name) if is_given else ""


def usage_text(error: click.ClickException) -> str:
    """Return what is wrong with a command line, and where a wrong value came from if not from there."""
    text = error.format_message()
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        return text
    if not isinstance(error, click.BadParameter) or isinstance(error, click.MissingParameter):
        return f"{text} See {context.command_path} --help."
    param = error.param
    source = context.get_parameter_source(param.name) if param is not None and param.name else None
    return (
        f"{text} It comes from {param.envvar}." if param and source is ParameterSource.ENVIRONMENT else text
    )


if __name__ == "__main__":
    sys.exit(main())
