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
from kvspan.commands.flags import flag_name, option
from kvspan.commands.remote import told_failures
from kvspan.commands.streams import note
from kvspan.commands.timings import timings_line
from kvspan.commands.values import Integers

if TYPE_CHECKING:
    from kvspan.v1.decode_pb2 import GenerateResponse

DEFAULT_TARGET = "127.0.0.1:50051"

COUNT = click.IntRange(0, 2**31 - 1)

SHARE, ABOVE_0, SEED = Number(0, 1), Number(0, min_open=True), click.IntRange(0, 2**64 - 1)
ROUTE = click.Choice(["auto", "remote", "local"])
MODE = click.Choice([mode.value for mode in TransferMode])

THEIRS = "(default: the service's)"
BESIDE = "beside the model's own; may be repeated"
ALTERNATIVES = "this many alternatives, up to 20, with --json"

RENAMED = {"stop_token_id": "stop_token_ids", "timeout_s": "time_limit_s"}
"""Flags whose option of the request has another name."""


@click.command("generate")
@click.argument("prompt", required=False)
@option("target", TARGET, "ADDR", "decode service", default=DEFAULT_TARGET, show_default=True)
@click.option("--chat", is_flag=True, help="the prompt is a user's turn in a conversation")
@click.option("--literal-text", is_flag=True, help="special tokens that PROMPT has are ordinary text")
@option("token_ids", Integers(0), "IDS", "the prompt as token ids: 1,2,3 (default: PROMPT)")
@option("max_new_tokens", TOKENS, "TOKENS", f"longest answer {THEIRS}")
@option("temperature", Number(0), "NUMBER", "0 takes the most probable token (default: 0)")
@option("top_k", COUNT, "COUNT", "keep this many most probable tokens; 0 keeps all (default: 0)")
@option("top_p", SHARE, "SHARE", "keep tokens up to this sum of probability (default: 1)")
@option("min_p", SHARE, "SHARE", "drop tokens below this share of the best one (default: 0)")
@option("repetition_penalty", ABOVE_0, "NUMBER", "above 1 makes repetition less likely (default: 1)")
@option("seed", SEED, "NUMBER", "same seed, same request, same tokens; below 2^63 (default: random)")
@option(
    "stop", click.STRING, "TEXT", "text that ends the answer; may be repeated (default: none)", multiple=True
)
@option("stop_token_id", COUNT, "ID", f"token that ends the answer, {BESIDE} (default: none)", multiple=True)
@click.option("--ignore-eos", is_flag=True, help="go on after an end-of-sequence token")
@option("logprobs", COUNT, "COUNT", f"report log-probabilities and {ALTERNATIVES} (default: none)")
@option("route", ROUTE, "ROUTE", f"where the prompt is computed: auto, remote or local {THEIRS}")
@option("transfer", MODE, "MODE", f"when spans are written and sealed: stream, deferred or whole {THEIRS}")
@option(
    "request_id", click.STRING, "NAME", "logged beside the name that the service gives it (default: none)"
)
@option("model", click.STRING, "NAME", "refuse unless this model is served (default: not checked)")
@option("timeout_s", SECONDS, "SECONDS", f"give the request up after this time {THEIRS}")
@click.option("--json", "as_json", is_flag=True, help="print each message as one line of JSON")
@click.option("--timings", is_flag=True, help="print how long each stage took, on stderr")
def generate(target: str, as_json: bool, timings: bool, **given: Any) -> int:
    """Ask for one completion of the text PROMPT and print it as it comes; - or a pipe gives it by stdin."""
    prompt, options = make_prompt(given, sys.stdin), make_options(given)
    from kvspan.client import Client

    with told_failures(target), Client(target) as client:
        last = _print_responses(client.generate(**prompt, **options), as_json)
    if timings and last is not None:
        note(timings_line(last))
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
    text = _read(stdin) if text == "-" else _checked("PROMPT", text)
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
    except OSError as error:
        raise ConfigError("PROMPT", "-", f"stdin cannot be read: {error.strerror}") from error
    if not text:
        raise ConfigError("PROMPT", "-", "stdin is empty")
    return text


def _checked(name: str, text: str) -> str:
    """Return what was typed; bytes that are no text come through as halves of characters."""
    try:
        text.encode()
    except UnicodeError as error:
        raise ConfigError(name, text, "is no text in the encoding of this terminal") from error
    return text


def make_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the request that were given; all else is the choice of the service."""
    for name in ("stop", "request_id", "model"):
        value = given[name] or ()
        for text in (value,) if isinstance(value, str) else value:
            _checked(flag_name(name), text)
    return {
        RENAMED.get(name, name): list(value) if isinstance(value, tuple) else value
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
