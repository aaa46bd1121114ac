"""The command `generate`: one prompt, the answer as it comes."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

import click

from common.errors import ConfigError
from common.session.messages import TransferMode
from common.settings import SECONDS, TARGET, TOKENS, Number
from kvspan.commands.command import EXIT_OK
from kvspan.commands.remote import told_failures
from kvspan.commands.timings import timings_line
from kvspan.commands.values import Integers

if TYPE_CHECKING:
    from kvspan.v1.decode_pb2 import GenerateResponse

DEFAULT_TARGET = "127.0.0.1:50051"

COUNT = click.IntRange(0, 2**31 - 1)

THEIRS = "(default: the service's)"


@click.command("generate")
@click.argument("prompt", required=False)
@click.option(
    "--target", type=TARGET, default=DEFAULT_TARGET, metavar="ADDR", show_default=True, help="decode service"
)
@click.option("--chat", is_flag=True, help="the prompt is a user's turn in a conversation")
@click.option(
    "--token-ids", type=Integers(0), metavar="IDS", help="the prompt as token ids: 1,2,3 (default: PROMPT)"
)
@click.option("--max-new-tokens", type=TOKENS, metavar="TOKENS", help=f"longest answer {THEIRS}")
@click.option(
    "--temperature", type=Number(0), metavar="NUMBER", help="0 takes the most probable token (default: 0)"
)
@click.option(
    "--top-k",
    type=COUNT,
    metavar="COUNT",
    help="keep this many most probable tokens; 0 keeps all (default: 0)",
)
@click.option(
    "--top-p",
    type=Number(0, 1),
    metavar="SHARE",
    help="keep tokens up to this sum of probability (default: 1)",
)
@click.option(
    "--min-p",
    type=Number(0, 1),
    metavar="SHARE",
    help="drop tokens below this share of the best (default: 0)",
)
@click.option(
    "--repetition-penalty",
    type=Number(0, min_open=True),
    metavar="NUMBER",
    help="above 1 makes repetition less likely (default: 1)",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**64 - 1),
    metavar="NUMBER",
    help="same seed, same request, same tokens; below 2^63 (default: random)",
)
@click.option(
    "--stop", multiple=True, metavar="TEXT", help="text that ends the answer; may be repeated (default: none)"
)
@click.option(
    "--stop-token-id",
    "stop_token_ids",
    multiple=True,
    type=COUNT,
    metavar="ID",
    help="token that ends the answer, beside the model's own; may be repeated (default: none)",
)
@click.option("--ignore-eos", is_flag=True, help="go on after an end-of-sequence token")
@click.option(
    "--logprobs",
    type=COUNT,
    metavar="COUNT",
    help="report log-probabilities and this many alternatives, up to 20, with --json (default: none)",
)
@click.option(
    "--route",
    type=click.Choice(["auto", "remote", "local"]),
    metavar="ROUTE",
    help=f"where the prompt is computed: auto, remote or local {THEIRS}",
)
@click.option(
    "--transfer",
    type=click.Choice([mode.value for mode in TransferMode]),
    metavar="MODE",
    help=f"when spans are written and sealed: stream, deferred or whole {THEIRS}",
)
@click.option(
    "--request-id",
    metavar="NAME",
    help="logged beside the name that the service gives it (default: none)",
)
@click.option("--model", metavar="NAME", help="refuse unless this model is served (default: not checked)")
@click.option(
    "--timeout-s",
    "time_limit_s",
    type=SECONDS,
    metavar="SECONDS",
    help=f"give the request up after this time {THEIRS}",
)
@click.option("--json", "as_json", is_flag=True, help="print each message as one line of JSON")
@click.option("--timings", is_flag=True, help="print how long each stage took, on stderr")
def generate(target: str, as_json: bool, timings: bool, **given: Any) -> int:
    """Ask for one completion of the text PROMPT and print it as it comes; - or a pipe gives it by stdin."""
    prompt, options = make_prompt(given, sys.stdin), make_options(given)
    from kvspan.client import Client

    with told_failures(target), Client(target) as client:
        last = _print_responses(client.generate(**prompt, **options), as_json)
    if timings and last is not None:
        print(timings_line(last), file=sys.stderr)
    return EXIT_OK


def make_prompt(given: dict[str, Any], stdin: TextIO | None) -> dict[str, Any]:
    """Take the one prompt out of `given`, as an argument of `Client.generate`; raise ConfigError for two."""
    text, token_ids, is_chat = given.pop("prompt"), given.pop("token_ids"), given.pop("chat")
    if text is None and token_ids is None and _is_fed(stdin):
        text = "-"
    if (text is None) == (token_ids is None):
        raise ConfigError("PROMPT", text or "", "give one prompt: a text, - for stdin, or --token-ids")
    if text is None:
        if is_chat:
            raise ConfigError("--chat", "true", "needs a text, not --token-ids")
        return {"token_ids": token_ids}
    text = _read(stdin) if text == "-" else text
    return {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}


def _is_fed(stdin: TextIO | None) -> bool:
    """Tell whether a file or another program gives stdin, rather than a terminal or nobody."""
    try:
        mode = os.fstat(stdin.fileno()).st_mode if stdin is not None else 0
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _read(stdin: TextIO | None) -> str:
    try:
        text = stdin.read() if stdin is not None else ""
        # Bytes that are no text may come through as halves of characters, which no request can carry.
        text.encode()
    except UnicodeError as error:
        raise ConfigError("PROMPT", "-", f"stdin is no text: {error}") from error
    if not text:
        raise ConfigError("PROMPT", "-", "stdin is empty")
    return text


def make_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the request that were given; all else is the choice of the service."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in given.items()
        if value is not None and value is not False and value != ()
    }


def _print_responses(responses: Iterable[GenerateResponse], as_json: bool) -> GenerateResponse | None:
    """Print each message as it comes and return the last one; an answer that breaks off ends its line too."""
    from google.protobuf.json_format import MessageToJson

    last = None
    try:
        for last in responses:
            if as_json:
                print(MessageToJson(last, preserving_proto_field_name=True, indent=None), flush=True)
            else:
                print(last.text, end="", flush=True)
    finally:
        if last is not None and not as_json:
            print(flush=True)
    return last
