"""The command `generate`: one prompt, the answer as it comes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError
from common.session.messages import TransferMode
from kvspan.commands import values
from kvspan.commands.command import EXIT_OK, Command
from kvspan.commands.flags import flag_name, parse_flag
from kvspan.commands.remote import told_failures
from kvspan.commands.timings import timings_line

if TYPE_CHECKING:
    from kvspan.v1.decode_pb2 import GenerateResponse

DEFAULT_TARGET = "127.0.0.1:50051"


@dataclass(frozen=True, slots=True)
class RequestFlag:
    """One flag that becomes one option of the request."""

    option: str
    """Name in `kvspan.client.Options`."""

    parse: Callable[[str], Any]
    placeholder: str
    help: str
    default: str
    """What an option that is not given means, for the help; the service fills it in."""

    is_repeated: bool = False


_MODES = tuple(mode.value for mode in TransferMode)
_ROUTES = ("auto", "remote", "local")
_SERVICE = "the service's"

REQUEST_FLAGS: tuple[RequestFlag, ...] = (
    RequestFlag("max_new_tokens", values.integer(1), "TOKENS", "longest answer", _SERVICE),
    RequestFlag("temperature", values.number(0), "NUMBER", "0 takes the most probable token", "0"),
    RequestFlag("top_k", values.integer(0), "COUNT", "keep this many most probable tokens; 0 keeps all", "0"),
    RequestFlag("top_p", values.number(0, 1), "SHARE", "keep tokens up to this sum of probability", "1"),
    RequestFlag("min_p", values.number(0, 1), "SHARE", "drop tokens below this share of the best one", "0"),
    RequestFlag("repetition_penalty", values.positive, "NUMBER", "above 1 makes repetition less likely", "1"),
    RequestFlag(
        "seed", values.integer(0, 2**64 - 1), "NUMBER",
        "same seed, same request, same tokens; below 2^63", "random",
    ),
    RequestFlag("stop", str, "TEXT", "text that ends the answer; may be repeated", "none", is_repeated=True),
    RequestFlag(
        "stop_token_id", values.integer(0), "ID",
        "token that ends the answer, beside the model's own; may be repeated", "none",
        is_repeated=True,
    ),
    RequestFlag(
        "logprobs", values.integer(0), "COUNT",
        "report log-probabilities and this many alternatives, up to 20, with --json", "none",
    ),
    RequestFlag(
        "route", values.choice((name, name) for name in _ROUTES), "ROUTE",
        "where the prompt is computed: auto, remote or local", _SERVICE,
    ),
    RequestFlag(
        "transfer", values.choice((name, name) for name in _MODES), "MODE",
        "when spans are written and sealed: stream, deferred or whole", _SERVICE,
    ),
    RequestFlag("request_id", str, "NAME", "name of the request in the logs, behind a number", "the number"),
    RequestFlag("model", str, "NAME", "refuse unless this model is served", "not checked"),
)  # fmt: skip
"""Every option of a request that takes a value; what is not given is the service's choice."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="text of the prompt; - reads it from stdin"
    )
    parser.add_argument(
        "--target", default=DEFAULT_TARGET, metavar="ADDR", help="decode service (default: %(default)s)"
    )
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's turn in a conversation")
    parser.add_argument("--token-ids", metavar="IDS", help="the prompt as token ids: 1,2,3 (default: PROMPT)")
    for flag in REQUEST_FLAGS:
        parser.add_argument(
            flag_name(flag.option),
            dest=flag.option,
            metavar=flag.placeholder,
            help=f"{flag.help} (default: {flag.default})",
            action="append" if flag.is_repeated else "store",
        )
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")
    parser.add_argument(
        "--timeout-s", metavar="SECONDS", help=f"give the request up after this time (default: {_SERVICE})"
    )
    parser.add_argument("--json", action="store_true", help="print each message as one line of JSON")
    parser.add_argument("--timings", action="store_true", help="print how long each stage took, on stderr")


def make_prompt(arguments: argparse.Namespace, read_stdin: Callable[[], str]) -> dict[str, Any]:
    """Return the one prompt as an argument of `Client.generate`; raise ConfigError for none or two."""
    text: str | None = arguments.prompt
    if (text is None) == (arguments.token_ids is None):
        raise ConfigError("PROMPT", text or "", "give either a text or --token-ids")
    if text is None:
        if arguments.chat:
            raise ConfigError("--chat", "true", "needs a text, not --token-ids")
        return {"token_ids": parse_flag("--token-ids", values.integers, arguments.token_ids)}
    text = read_stdin() if text == "-" else text
    return {"messages": [{"role": "user", "content": text}]} if arguments.chat else {"prompt": text}


def make_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were given, parsed; raise ConfigError by flag for a bad one."""
    options: dict[str, Any] = {}
    for flag in REQUEST_FLAGS:
        given = getattr(arguments, flag.option)
        if given is None:
            continue
        name = flag_name(flag.option)
        if flag.is_repeated:
            options[flag.option] = [parse_flag(name, flag.parse, part) for part in given]
        else:
            options[flag.option] = parse_flag(name, flag.parse, given)
    if "stop_token_id" in options:
        options["stop_token_ids"] = options.pop("stop_token_id")
    if arguments.ignore_eos:
        options["ignore_eos"] = True
    if arguments.timeout_s is not None:
        options["time_limit_s"] = parse_flag("--timeout-s", values.positive, arguments.timeout_s)
    return options


def _run(arguments: argparse.Namespace) -> int:
    target = parse_flag("--target", values.target_address, arguments.target)
    options = make_options(arguments)
    prompt = make_prompt(arguments, sys.stdin.read)
    from kvspan.client import Client

    with told_failures(), Client(target) as client:
        last = _print_responses(client.generate(**prompt, **options), arguments.json)
    if arguments.timings and last is not None:
        print(timings_line(last), file=sys.stderr)
    return EXIT_OK


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


GENERATE = Command("generate", "ask for one completion and print it as it comes", _add_arguments, _run)
