"""What can be seen of an engine or a backend before it computes: its methods, and contradictions.

Theory of operation: looked at once, right after it was made and before anything is listened on. Only what it
says is looked at; what it does is for its tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from common.engine.decode import BackendDescription
from common.engine.identity import EngineIdentity
from common.engine.prefill import EngineDescription
from common.engine.registry import words_of
from common.errors import ConfigError

ENGINE_METHODS = ("identity", "describe", "prefill")
BACKEND_METHODS = ("identity", "describe", "allocate", "write", "step", "prefill_engine")


def check_engine(setting: str, name: str, engine: Any) -> None:
    """Raise `ConfigError` that names an engine and what is wrong with what it says of itself."""
    _require_methods(setting, name, engine, ENGINE_METHODS)
    identity, description = _said(setting, name, engine, EngineDescription)
    _require_none(setting, name, engine_problems(identity, description))


def check_backend(setting: str, name: str, backend: Any) -> None:
    """Raise `ConfigError` that names a backend and what is wrong with what it says of itself."""
    _require_methods(setting, name, backend, BACKEND_METHODS)
    _, description = _said(setting, name, backend, BackendDescription)
    _require_none(setting, name, backend_problems(description))


def engine_problems(identity: EngineIdentity, description: EngineDescription) -> Iterator[str]:
    """Yield what cannot be true of a description."""
    layers = [layer.layer_index for layer in identity.geometry.layers]
    widths, limit = description.widths, description.max_prompt_tokens
    chunk = description.chunk_tokens
    if not description.name:
        yield "its description has no name"
    if not description.numerics or not all(description.numerics):
        yield f"numerics is {description.numerics}, but something decides its bits"
    if limit < 1:
        yield f"max_prompt_tokens is {limit}, a prompt has at least 1"
    if chunk is not None and chunk < 1:
        yield f"chunk_tokens is {chunk}; None says that it delivers by layer"
    if list(widths) != sorted(set(widths)) or min(widths, default=1) < 1:
        yield f"widths are {widths}, they ascend from 1 without repeats"
    # Longer prompts take several passes, which are delivered chunk by chunk.
    if widths and chunk is None and limit > max(widths):
        yield f"max_prompt_tokens is {limit}, its largest width {max(widths)}, and it delivers by layer"
    stops = description.layer_stops
    if list(stops) != sorted(set(stops)) or any(not layers[0] < stop <= layers[-1] for stop in stops):
        yield f"layer_stops are {stops}, its layers {layers[0]} to {layers[-1]}"
    if description.longest_step_ms < 0:
        yield f"longest_step_ms is {description.longest_step_ms}"


def backend_problems(description: BackendDescription) -> Iterator[str]:
    """Yield what cannot be true of a description."""
    if not description.name:
        yield "its description has no name"
    if not description.numerics or not all(description.numerics):
        yield f"numerics is {description.numerics}, but something decides its bits"
    if description.max_lanes < 1:
        yield f"max_lanes is {description.max_lanes}, a step has at least 1"


def _require_none(setting: str, name: str, problems: Iterator[str]) -> None:
    """Raise `ConfigError` for the first problem, and for a value that cannot even be compared."""
    try:
        problem = next(problems, None)
    except (TypeError, ValueError, AttributeError) as error:
        problem = f"has a value of another type in its description: {words_of(error)}"
    if problem is not None:
        raise ConfigError(setting, name, problem)


def _require_methods(setting: str, name: str, made: Any, methods: tuple[str, ...]) -> None:
    missing = [method for method in methods if not callable(getattr(made, method, None))]
    if missing:
        what = f"{type(made).__module__}.{type(made).__qualname__}"
        raise ConfigError(setting, name, f"made a {what}, which lacks {', '.join(missing)}")


def _said(setting: str, name: str, made: Any, kind: type[Any]) -> tuple[EngineIdentity, Any]:
    try:
        identity, description = made.identity(), made.describe()
    except (Exception, SystemExit) as error:
        raise ConfigError(setting, name, f"cannot say what it is: {words_of(error)}") from error
    for value, wanted in ((identity, EngineIdentity), (description, kind)):
        if not isinstance(value, wanted):
            found = type(value).__name__
            raise ConfigError(setting, name, f"says a {found} where it has to say a {wanted.__name__}")
    return identity, description
