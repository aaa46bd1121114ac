"""The flags of the services: one table from flag to config field, used by `up`, `prefill` and `decode`.

Theory of operation: `FLAGS` names every field of both configs once, with its parser and its meaning.
Defaults stand in the configs alone. argparse only collects texts; `build_config` parses them, so that a bad
value is refused the same way everywhere: by flag, with the text given and the rule. `RULES` holds what
concerns several fields. All of it runs before a model, a socket or a process is touched.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from enum import Enum
from typing import Any, TypeVar

from common.errors import ConfigError
from common.kv.digest import DigestKind
from common.kv.geometry import DType
from common.kv.spans import PART_ALIGNMENT
from common.runtime.silence import SHORTEST_LIMIT_S
from common.session.messages import TransferMode
from decode_service.config import DecodeConfig
from kvspan.commands import values
from prefill_service.config import PrefillConfig

ServiceConfig = PrefillConfig | DecodeConfig
T = TypeVar("T")
C = TypeVar("C", bound=ServiceConfig)

MEMORY_PAGE_BYTES = 4096
MIN_SLAB_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag, and the config field that it sets."""

    field: str
    parse: Callable[[str], object]
    """Text to value; raises ValueError with the rule."""

    placeholder: str
    """Unit or form of the value, for the help."""

    help: str
    is_repeated: bool = False
    """Whether it may be given several times; the field is then a tuple."""

    @property
    def name(self) -> str:
        """Return the flag as it is typed."""
        return flag_name(self.field)


def flag_name(field: str) -> str:
    """Return the flag that sets a field: slab_bytes is --slab-bytes."""
    return "--" + field.replace("_", "-")


def _model(text: str) -> str:
    from common.model.source import parse_source

    try:
        return parse_source(text).spec
    except ConfigError as error:
        raise ValueError(error.problem) from error


FLAGS: tuple[Flag, ...] = (
    Flag("model", _model, "SPEC", "demo, tiny:FAMILY or a local Hugging Face folder"),
    Flag("listen", values.listen_address, "ADDR", "where to serve: HOST:PORT (0 picks a port) or unix:PATH"),
    Flag(
        "prefill", values.target_address, "ADDR",
        "a prefill service; may be repeated (default: none; prompts are computed in this process)",
        is_repeated=True,
    ),
    Flag(
        "dtype", values.choice((name, name) for name in ("auto", *(dtype.value for dtype in DType))), "NAME",
        "type of weights and cache: auto is bfloat16 where the processor computes in it, else float32",
    ),
    Flag("slab_dir", values.directory, "DIR", "directory of the shared memory, as this process sees it"),
    Flag(
        "slab_bytes", values.size(MIN_SLAB_BYTES, MEMORY_PAGE_BYTES), "SIZE", "shared memory of one session"
    ),
    Flag("page_tokens", values.integer(1), "TOKENS", "size of a cache page; both services alike"),
    Flag(
        "chunk_tokens", values.integer(1), "TOKENS",
        "size of one prefill forward, a multiple of --page-tokens; both services alike",
    ),
    Flag("min_span_bytes", values.size(1), "SIZE", "layers are merged until a span has this size"),
    Flag(
        "max_span_bytes",
        values.size(PART_ALIGNMENT),
        "SIZE",
        "no span is larger, unless one token of one layer is",
    ),
    Flag("max_prompt_tokens", values.integer(1), "TOKENS", "longest prompt"),
    Flag("max_concurrency", values.integer(1), "COUNT", "transfers of one session that may be open"),
    Flag("cache_tokens", values.integer(1), "TOKENS", "size of the paged cache over all requests"),
    Flag("lanes", values.integer(1), "COUNT", "requests that decode at the same time"),
    Flag("queue_limit", values.integer(1), "COUNT", "requests that may wait; more are refused"),
    Flag(
        "transfer", values.choice((mode.value, mode) for mode in TransferMode), "MODE",
        "stream, deferred or whole, for requests that name none",
    ),
    Flag(
        "route", values.choice((name, name) for name in ("auto", "remote", "local")), "ROUTE",
        "auto, remote or local, for requests that name none",
    ),
    Flag(
        "on_prefill_loss", values.choice((name, name) for name in ("fail", "retry", "local")), "POLICY",
        "fail, retry or local: what becomes of a request whose prefill service is lost too early",
    ),
    Flag(
        "digest", values.choice((kind.value, kind) for kind in DigestKind), "KIND",
        f"protection of the bytes: {', '.join(kind.value for kind in DigestKind)}",
    ),
    Flag("max_new_tokens", values.integer(1), "TOKENS", "length of answers to requests that name none"),
    Flag("time_limit_s", values.positive, "SECONDS", "longest life of a request; a client may ask for less"),
    Flag(
        "silence_limit_s",
        values.number(SHORTEST_LIMIT_S),
        "SECONDS",
        f"a peer that is silent for longer is lost, at least {SHORTEST_LIMIT_S}",
    ),
    Flag(
        "credit_wait_s", values.positive, "SECONDS",
        "how long a prompt larger than its share of the slab waits for room before it fails",
    ),
    Flag("threads", values.integer(0), "COUNT", "CPU threads; 0 takes half of the cores, for two services"),
    Flag(
        "journal", values.new_file, "PATH",
        "append a record of pages, slots and spans for kvspan audit (default: none)",
    ),
    Flag("grace_s", values.number(0), "SECONDS", "how long running work may take after SIGTERM"),
)  # fmt: skip
"""Every flag of both services; one entry per config field."""

_BY_FIELD = {flag.field: flag for flag in FLAGS}


def add_flags(
    parser: argparse.ArgumentParser,
    *configs: type[ServiceConfig],
    without: tuple[str, ...] = (),
    defaults: Mapping[str, str] | None = None,
) -> None:
    """Add the flags of all fields of `configs`, once each, except those in `without`.

    A field without a default in its config is required, unless `defaults` has a text for it.
    """
    texts = defaults or {}
    fields = {field.name: field for config in configs for field in dataclasses.fields(config)}
    for name, field in fields.items():
        if name not in without:
            flag = _BY_FIELD[name]
            parser.add_argument(
                flag.name,
                dest=name,
                metavar=flag.placeholder,
                help=flag.help + _default_text(field, texts.get(name)),
                action="append" if flag.is_repeated else "store",
                required=field.default is MISSING and name not in texts,
                default=texts.get(name, argparse.SUPPRESS),
            )


def given_texts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the texts of the flags that were given or have a default text, by field."""
    return {name: text for name, text in vars(arguments).items() if name in _BY_FIELD}


def build_config(kind: type[C], texts: Mapping[str, Any]) -> C:
    """Return the config that the given texts make; fields that `kind` does not have are passed over.

    Raises ConfigError, by flag, for a bad value or a broken rule.
    """
    names = {field.name for field in dataclasses.fields(kind)}
    parsed: dict[str, Any] = {
        name: _parse(_BY_FIELD[name], text) for name, text in texts.items() if name in names
    }
    config = kind(**parsed)
    check_rules(config)
    return config


def arguments_of(kind: type[ServiceConfig], texts: Mapping[str, Any]) -> list[str]:
    """Return the command line that hands the texts of the fields of `kind` on to another process."""
    names = {field.name for field in dataclasses.fields(kind)}
    line = []
    for name, text in texts.items():
        if name in names:
            line += [f"{flag_name(name)}={part}" for part in (text if isinstance(text, list) else [text])]
    return line


@dataclass(frozen=True, slots=True)
class Rule:
    """What must hold between fields; skipped for a config without one of them."""

    field: str
    """The field that is blamed."""

    other: str
    holds: Callable[[Any, Any], object]
    """Takes both values; true when they fit."""

    problem: str
    """What must be; `{other}` is the other flag with its value."""


RULES: tuple[Rule, ...] = (
    Rule("chunk_tokens", "page_tokens", lambda size, page: not size % page, "must be a multiple of {other}"),
    Rule("min_span_bytes", "max_span_bytes", lambda low, high: low <= high, "must not exceed {other}"),
    Rule("cache_tokens", "chunk_tokens", lambda cache, chunk: cache >= chunk, "must be at least {other}"),
    Rule("route", "prefill", lambda route, peers: route != "remote" or peers, "needs a service, has {other}"),
    Rule("prefill", "listen", lambda peers, listen: listen not in peers, "must differ from {other}"),
    Rule("prefill", "prefill", lambda peers, _: len(set(peers)) == len(peers), "must name each service once"),
)  # fmt: skip
"""Rules between fields of one service."""


def check_rules(config: ServiceConfig) -> None:
    """Raise ConfigError for the first rule between fields that `config` breaks."""
    for rule in RULES:
        if not hasattr(config, rule.field) or not hasattr(config, rule.other):
            continue
        value, other = getattr(config, rule.field), getattr(config, rule.other)
        if not rule.holds(value, other):
            other_text = f"{flag_name(rule.other)}={_text(other)}"
            raise ConfigError(flag_name(rule.field), _text(value), rule.problem.format(other=other_text))


def parse_flag(name: str, parse: Callable[[str], T], text: str) -> T:
    """Return the value of one text; raise ConfigError by `name`, with the text and the rule."""
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(name, text, str(error)) from error


def shown_error(error: ConfigError) -> str:
    """Return a refusal as the command line says it: a field of a service goes by the name of its flag."""
    name = flag_name(error.field) if error.field in _BY_FIELD else error.field
    return f"{name}={error.value}: {error.problem}"


def _parse(flag: Flag, text: str | list[str]) -> object:
    if isinstance(text, list):
        return tuple(parse_flag(flag.name, flag.parse, part) for part in text)
    return parse_flag(flag.name, flag.parse, text)


def _default_text(field: dataclasses.Field[Any], text: str | None) -> str:
    default: Any = field.default if text is None else text
    if default is MISSING or default in ((), ""):
        return ""
    is_size = text is None and field.name.endswith("_bytes")
    return f" (default: {values.size_text(default) if is_size else _text(default)})"


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value.value) if isinstance(value, Enum) else str(value)
