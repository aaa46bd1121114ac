"""Settings of the services as flags and variables of the environment, made from the config dataclasses.

Theory of operation: `settings_of` gives a command one option per field. The flag of `slab_bytes` is
`--slab-bytes`, its variable `KVSPAN_SLAB_BYTES`; a flag wins over its variable, a variable over the default.
Values are parsed and bounded by their types, rules between fields stand in the configs. `up` hands a whole
config on to another process, so that no variable changes there what was decided here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from common.errors import ConfigError
from common.settings import ServiceConfig, setting_text
from decode_service.config import DecodeConfig
from prefill_service.config import PrefillConfig

C = TypeVar("C", bound=ServiceConfig)
F = TypeVar("F", bound=Callable[..., Any])

SETTINGS: dict[str, dataclasses.Field[Any]] = {
    field.name: field for kind in (DecodeConfig, PrefillConfig) for field in dataclasses.fields(kind)
}
"""Every setting of both services, by name."""


def flag_name(field: str) -> str:
    """Return the flag that sets a field: slab_bytes is --slab-bytes."""
    return "--" + field.replace("_", "-")


def settings_of(
    *kinds: type[ServiceConfig], without: tuple[str, ...] = (), defaults: Mapping[str, Any] | None = None
) -> Callable[[F], F]:
    """Give a command the options of all fields of `kinds`, once each, except those in `without`.

    A field without a default in its config is required, unless `defaults` has one for it.
    """
    fields = {field.name: field for kind in kinds for field in dataclasses.fields(kind)}
    options = [
        _option(field, (defaults or {}).get(name, field.default))
        for name, field in fields.items()
        if name not in without
    ]

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def make_config(kind: type[C], given: Mapping[str, Any]) -> C:
    """Return the config that the given values make; those of other services are passed over.

    Raises ConfigError for a broken rule between them.
    """
    return kind(
        **{field.name: given[field.name] for field in dataclasses.fields(kind) if field.name in given}
    )


def arguments_of(config: ServiceConfig) -> list[str]:
    """Return the command line that gives another process the same config."""
    line = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, bool):
            line += [flag_name(field.name)] if value else []
        else:
            parts = value if isinstance(value, tuple) else (value,)
            line += [f"{flag_name(field.name)}={setting_text(field, part)}" for part in parts]
    return line


def refusal_text(error: ConfigError) -> str:
    """Return a refused setting by the name of its flag."""
    name = flag_name(error.field) if error.field in SETTINGS else error.field
    return f"{name}={error.value}: {error.problem}"


def option(
    name: str, kind: click.ParamType[Any], placeholder: str | None, text: str, **attributes: Any
) -> Callable[[F], F]:
    """Return the option that gives a command the value of `name`."""
    return click.option(flag_name(name), name, type=kind, metavar=placeholder, help=text, **attributes)


def _option(field: dataclasses.Field[Any], default: Any) -> Callable[[F], F]:
    placeholder, attributes = field.metadata["placeholder"], dict[str, Any](default=default)
    if default is dataclasses.MISSING:
        attributes = {"required": True}
    elif isinstance(default, bool):
        placeholder, attributes = None, {"is_flag": True, "default": default}
    elif isinstance(default, tuple):
        attributes["multiple"] = True
    else:
        attributes = {"default": setting_text(field, default), "show_default": default != ""}
    attributes["envvar"] = f"KVSPAN_{field.name.upper()}"
    return option(field.name, field.metadata["type"], placeholder, field.metadata["help"], **attributes)
