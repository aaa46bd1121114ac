"""What must be right on this host before a model is read: folder, directories, files and the address.

Theory of operation: loading takes long and needs a lot of memory, so what can be found wrong without it is
found first, by the process that was started by hand: `kvspan up` looks before it starts anything. The address
is bound for good only later; whoever takes it in between is found then.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import ConfigError
from common.model.folder.checkpoint import read_checkpoint
from common.model.folder.configuration import read_config
from common.model.folder.files import check_complete
from common.model.folder.source import parse_source
from common.own_file import file_problem
from common.runtime.address import parse_address
from common.runtime.listening import check_free
from common.runtime.memory import require_room
from common.settings import ServiceConfig


def check_host(config: ServiceConfig) -> None:
    """Raise `ConfigError` for the first setting that this host does not allow."""
    _check_working_directory()
    source = parse_source(config.model)
    if source.folder is not None:
        check_complete(config.model, source.folder)
        written = read_config(config.model, source.folder)
        read_checkpoint(config.model, source.folder, written)
    _check_temporary()
    with _told("slab_dir", config.slab_dir):
        _check_slab_dir(config)
    if config.journal:
        _check_file("journal", Path(config.journal))
    check_free("listen", parse_address("listen", config.listen))


def _check_working_directory() -> None:
    """Raise `ConfigError` when it was removed: libraries find their files by it, and end the process."""
    try:
        os.getcwd()
    except OSError as error:
        problem = f"cannot use the working directory: {error.strerror}; change to another one"
        raise ConfigError("PWD", os.environ.get("PWD", ""), problem) from error


def _check_temporary() -> None:
    """Raise `ConfigError` when there is no place for temporary files: torch looks for one at import."""
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise no_temporary(error) from error


def no_temporary(error: OSError) -> ConfigError:
    """Return the refusal of a host without a directory for temporary files."""
    problem = f"{error.strerror}; let it name a directory that can be written, or mount a tmpfs on /tmp"
    return ConfigError("TMPDIR", os.environ.get("TMPDIR", ""), problem)


def _check_slab_dir(config: ServiceConfig) -> None:
    """Raise `ConfigError` unless slabs can be handed over, and there is memory for those that are made."""
    directory, num_bytes = config.slab_folder, config.slab_space_bytes
    if not directory.is_dir():
        raise ConfigError("slab_dir", directory, "is not a directory")
    mode = os.R_OK | os.X_OK | (os.W_OK if num_bytes else 0)
    if not os.access(directory, mode):
        raise ConfigError("slab_dir", directory, f"cannot be used by user {os.geteuid()}: Permission denied")
    require_room("slab_bytes", num_bytes, "the slabs take", num_bytes)


def _check_file(field: str, path: Path) -> None:
    """Raise `ConfigError` unless `path` is a file of this user that can be written, or can become one."""
    directory = path.parent
    with _told(field, path):
        if not directory.is_dir():
            raise ConfigError(field, path, f"lies in {directory}, which is not a directory")
        if problem := file_problem(path):
            raise ConfigError(field, path, problem)
        if not os.access(path if path.exists() else directory, os.W_OK):
            raise ConfigError(field, path, f"cannot be written by user {os.geteuid()}")


@contextmanager
def _told(field: str, value: object) -> Iterator[None]:
    """Turn what the system says of a path that cannot be looked at into the refusal of a setting."""
    try:
        yield
    except OSError as error:
        raise ConfigError(field, value, f"{error.strerror}: {error.filename}") from error
