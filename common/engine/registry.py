"""Engines and backends by name: those that are built in, those of installed packages, and one's own.

Theory of operation: a factory is a callable that takes a setup and returns an engine or a backend. It is
found under its name in the table of the service, else among the entry points of installed packages; or as
`module:callable`, which runs whatever that module does when it is imported. All of it happens before anything
is listened on, and whatever goes wrong is a `ConfigError` that names what was asked for.

Not here: whether what was made keeps its promises (`checks.py` for what can be seen at once).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from common.engine.setup import EngineSetup
from common.errors import ConfigError, KVSpanError
from common.excerpt import printable

S = TypeVar("S", bound=EngineSetup)
T = TypeVar("T")

ENGINE_GROUP = "kvspan.prefill_engines"
BACKEND_GROUP = "kvspan.decode_backends"


@dataclass(frozen=True, slots=True)
class Kind(Generic[S, T]):
    """What is looked for, and what a refusal blames."""

    setting: str
    """Name of the setting that holds the name: `engine` or `backend`."""

    group: str
    """Of entry points."""

    built_in: Mapping[str, Callable[[S], T]]

    @property
    def factory_setting(self) -> str:
        """Name of the setting that holds `module:callable`."""
        return f"{self.setting}_factory"

    def asked(self, name: str, factory: str) -> tuple[str, str]:
        """Return the setting that decides, which a refusal blames, and its value."""
        return (self.factory_setting, factory) if factory else (self.setting, name)


def find(
    kind: Kind[S, T], name: str, factory: str = "", installed: Iterable[EntryPoint] | None = None
) -> Callable[[S], T]:
    """Return the factory of that name, or the one at `factory`, a `module:callable`, when that is given.

    `installed` are the entry points of the group; those of this environment when it is None.

    Raises: `ConfigError`: no such name, one that two packages have, a module that cannot be imported, or
    something that cannot be called.
    """
    if factory:
        return _own(kind.factory_setting, factory)
    if name in kind.built_in:
        return kind.built_in[name]
    points = list(entry_points(group=kind.group) if installed is None else installed)
    found = [point for point in points if point.name == name]
    if not found:
        known = ", ".join([*kind.built_in, *sorted({point.name for point in points} - set(kind.built_in))])
        raise ConfigError(kind.setting, name, f"there is none of that name; known: {known}")
    if len({point.value for point in found}) > 1:
        places = " and ".join(sorted({point.value for point in found}))
        raise ConfigError(kind.setting, name, f"two packages have one of that name: {places}")
    return _called(kind.setting, name, _loaded(kind.setting, name, found[0].load))


def words_of(error: BaseException) -> str:
    """Return what a plug-in raised in one line, in its own words: whoever started the service reads them."""
    words = printable(" ".join(str(error).split()))
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def make(kind: Kind[S, T], name: str, factory: str, setup: S) -> T:
    """Find a factory and call it.

    Raises: what `find` raises, and what the factory raises that is an error of kvspan; `ConfigError` that
    names it for anything else.
    """
    found = find(kind, name, factory)
    setting, asked = kind.asked(name, factory)
    try:
        return found(setup)
    except KVSpanError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(setting, asked, f"cannot be made: {words_of(error)}") from error


def _own(setting: str, path: str) -> Callable[[Any], Any]:
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise ConfigError(setting, path, "is not module:callable")

    def load() -> Any:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
        return found

    return _called(setting, path, _loaded(setting, path, load))


def _loaded(setting: str, name: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except (Exception, SystemExit) as error:
        raise ConfigError(setting, name, f"cannot be imported: {words_of(error)}") from error


def _called(setting: str, name: str, found: Any) -> Callable[[Any], Any]:
    if not callable(found):
        raise ConfigError(setting, name, f"is a {type(found).__name__}, which cannot be called")
    return found  # type: ignore[no-any-return]
