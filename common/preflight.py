"""What must be right on this host before a model is read: folder, directories, files and the address.

Theory of operation: loading takes long and needs a lot of memory, so what can be found wrong without it is
found first, by the process that was started by hand: `kvspan up` looks before it starts anything. The address
is bound for good only later; whoever takes it in between is found then.
"""

from __future__ import annotations

from pathlib import Path

from common.errors import ConfigError
from common.model.source import parse_source
from common.runtime.address import check_free, parse_address
from common.settings import ServiceConfig


def check_host(config: ServiceConfig) -> None:
    """Raise `ConfigError` for the first setting that this host does not allow."""
    parse_source(config.model)
    if not Path(config.slab_dir).is_dir():
        raise ConfigError("slab_dir", config.slab_dir, "is not a directory")
    if config.journal:
        _check_file("journal", Path(config.journal))
    check_free("listen", parse_address("listen", config.listen))


def _check_file(field: str, path: Path) -> None:
    """Raise `ConfigError` unless `path` is a file or can become one."""
    if path.is_dir():
        raise ConfigError(field, path, "is a directory")
    if not path.parent.is_dir():
        raise ConfigError(field, path, f"lies in {path.parent}, which is not a directory")
