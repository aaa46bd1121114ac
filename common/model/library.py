"""What a library raises over a file of a model, as an error that says which file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import ConfigError, InvariantViolation, KVSpanError, UnsupportedModel
from common.excerpt import excerpt

SHOWN_CHARS = 400
"""Of what a library says about a file that it cannot load."""


@contextmanager
def blamed(spec: str, path: Path) -> Iterator[None]:
    """Turn whatever a library raises over a file into `ConfigError` that names it; our own errors pass.

    Libraries promise no types, and a panic of native code is not even an Exception. A model that is refused
    by its type is named as it was given.
    """
    try:
        yield
    except UnsupportedModel as error:
        error.problem = f"model type {error.value}: {error.problem}"
        error.value = spec
        raise
    except (KVSpanError, InvariantViolation, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        said = excerpt(" ".join(f"{type(error).__name__}: {error}".split()), SHOWN_CHARS)
        raise ConfigError("model", spec, f"cannot load {path}: {said}") from error
