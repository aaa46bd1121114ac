"""What a service can be told: settings that carry type, bounds, default and meaning in one place.

Theory of operation: a config is a frozen dataclass whose fields are made by `setting`. Flags, variables of
the environment, validation and help follow from its fields; a new setting is one more field, and a row in the
table of `docs/operations.md`. The types are click's, with what it lacks: finite numbers, sizes, enums by
value, addresses. A type refuses what a field alone can tell, `__post_init__` what concerns several fields, so
that no config breaks a rule between them; `common.preflight` what this host does not allow.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import click

from common.errors import ConfigError
from common.kv.geometry import DType
from common.runtime.address import TCPAddress, parse_address
from common.runtime.silence import SHORTEST_LIMIT_S

EnumT = TypeVar("EnumT", bound=Enum)

LONGEST_S = 7 * 24 * 3600.0
"""A week: no limit of time is longer, so that none overflows as nanoseconds or as a deadline of a call."""

MOST_TOKENS = 1 << 27
MOST_BYTES = 1 << 40
"""More than one host has; sums of them stay far below 64 bits."""

MIN_SLAB_BYTES = 1 << 20
"""Less has no room for one prompt of any real model."""

_SIZE_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_SIZE = re.compile(r"(\d{1,18})\s*([A-Za-z]*)")


class Number(click.FloatRange):
    """A number within bounds; never NaN, which no comparison would refuse."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number in `value`."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return number

    def _describe_range(self) -> str:
        low, high = ("" if bound is None else f"{bound:g}" for bound in (self.min, self.max))
        return f"{low}{'<' if self.min_open else '<='}x" + (f"<={high}" if high else "")


class Size(click.IntRange):
    """A count of bytes within bounds: digits, alone or with KiB, MiB or GiB."""

    name = "size"

    def __init__(self, minimum: int, multiple_of: int = 1) -> None:
        super().__init__(minimum, MOST_BYTES)
        self._multiple_of = multiple_of

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the bytes in `value`."""
        found = _SIZE.fullmatch(str(value).strip())
        unit = None if found is None else _SIZE_UNITS.get(found[2].upper())
        if found is None or unit is None:
            self.fail(f"{value} is not a size such as 4096, 256KiB, 64MiB or 1GiB.", param, ctx)
        num_bytes = int(found[1]) * unit
        if not (self.min or 0) <= num_bytes <= MOST_BYTES:
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        if num_bytes % self._multiple_of:
            self.fail(f"{value} is not a multiple of {size_text(self._multiple_of)}.", param, ctx)
        return num_bytes

    def _describe_range(self) -> str:
        return f"{size_text(self.min or 0)}<=x<={size_text(MOST_BYTES)}"


class ByValue(click.Choice[EnumT]):
    """A member of an enum, by its value."""

    def normalize_choice(self, choice: object, ctx: click.Context | None) -> str:
        """Return how a member is typed."""
        return str(choice.value if isinstance(choice, Enum) else choice)


class Address(click.ParamType[str]):
    """HOST:PORT or unix:PATH; to reach somebody there, a port must be named."""

    name = "address"

    def __init__(self, *, to_listen: bool = False) -> None:
        self._to_listen = to_listen

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return `value` as it is when it is an address."""
        try:
            address = parse_address("address", value)
        except ConfigError as error:
            self.fail(f"{value!r} {error.problem}.", param, ctx)
        if not self._to_listen and isinstance(address, TCPAddress) and address.port == 0:
            self.fail(f"{value!r} must name a port above 0.", param, ctx)
        return str(value)


TARGET = Address()
SECONDS = Number(0, LONGEST_S, min_open=True)
TOKENS = click.IntRange(1, MOST_TOKENS)


KEY_VALUE = click.STRING
"""An option of an engine; the engine itself says what is wrong with it."""


def setting(
    kind: click.ParamType[Any], placeholder: str, text: str, default: Any = dataclasses.MISSING
) -> Any:
    """Return a field of a config: its type with its bounds, unit or form of the value, meaning, default."""
    metadata = {"type": kind, "placeholder": placeholder, "help": text}
    return dataclasses.field(default=default, metadata=metadata)


def size_text(num_bytes: int) -> str:
    """Return bytes in the largest unit that divides them: 268435456 is 256MiB."""
    for name, unit in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes and num_bytes % unit == 0:
            return f"{num_bytes // unit}{name}"
    return str(num_bytes)


def setting_text(field: dataclasses.Field[Any], value: Any) -> str:
    """Return a value as its setting takes it: 256MiB, stream, 2.5."""
    if isinstance(field.metadata["type"], Size):
        return size_text(value)
    if isinstance(value, float):
        return f"{value:.15g}"
    return str(value.value if isinstance(value, Enum) else value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """What both services can be told."""

    # fmt: off
    model: str = setting(click.STRING, "SPEC", "demo, tiny:FAMILY or a local Hugging Face folder")
    listen: str = setting(
        Address(to_listen=True), "ADDR", "where to serve: HOST:PORT (0 picks a port) or unix:PATH")
    dtype: str = setting(
        click.Choice(["auto", *(dtype.value for dtype in DType)]), "NAME",
        "type of weights and cache: auto is bfloat16 where the processor computes in it, else float32",
        "auto")
    slab_dir: str = setting(
        click.STRING, "DIR",
        "directory of the sockets that hand over shared memory, as this process sees it (default: "
        "XDG_RUNTIME_DIR where it can be used, else the directory for temporary files)", "")
    chunk_tokens: int = setting(TOKENS, "TOKENS", "size of one prefill forward; both services alike", 256)
    max_context_tokens: int = setting(
        click.IntRange(0, MOST_TOKENS), "TOKENS",
        "longest prompt with its answer; 0 takes what the model's config says, more than that only where its "
        "positions can be stretched", 0)
    silence_limit_s: float = setting(
        Number(SHORTEST_LIMIT_S, LONGEST_S), "SECONDS",
        "a connected peer that says nothing for longer is lost; pings go every half second", 3.0)
    threads: int = setting(
        click.IntRange(0, 4096), "COUNT", "CPU threads; 0 takes half of the cores, for two services", 0)
    journal: str = setting(
        click.STRING, "PATH", "append a record of pages, slots and spans for kvspan audit (default: none)",
        "")
    grace_s: float = setting(
        Number(0, LONGEST_S), "SECONDS", "how long running work may take after SIGTERM", 10.0)
    log_level: str = setting(
        click.Choice(["debug", "info", "warning", "error"]), "LEVEL", "least level that is logged", "info")
    log_json: bool = setting(click.BOOL, "", "log one JSON object a line, and nothing else on stderr", False)
    # fmt: on

    @property
    def shows_progress(self) -> bool:
        """Whether bars are shown: to somebody who watches; in a file or between JSON they are noise."""
        return sys.stderr.isatty() and not self.log_json

    @property
    def slab_space_bytes(self) -> int:
        """Memory of the slabs that this service makes: decode does."""
        return 0

    @property
    def slab_folder(self) -> Path:
        """The slab directory: the one that was named, or else where this user's sockets belong."""
        if self.slab_dir:
            return Path(self.slab_dir)
        runtime = os.environ.get("XDG_RUNTIME_DIR", "")
        # After `su` it may name the directory of somebody else.
        is_usable = os.path.isdir(runtime) and os.access(runtime, os.R_OK | os.W_OK | os.X_OK)
        return Path(runtime if is_usable else tempfile.gettempdir())

    def require(self, holds: bool, field: str, problem: str) -> None:
        """Raise `ConfigError` that blames `field` unless the rule holds."""
        if not holds:
            value = getattr(self, field)
            raise ConfigError(field, ",".join(value) if isinstance(value, tuple) else value, problem)
