"""The KV cache of a prompt, handed from a prefill service to a decode service while the prefill still runs.

Theory of operation: names are imported when they are first used, so that importing the stubs in
`kvspan.v1` loads neither grpc nor a client.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.errors import ConfigError, InvalidRequest, KVSpanError
    from common.wire.failure import RemoteFailure
    from kvspan.client import AsyncClient, Client, Completion

__all__ = [
    "AsyncClient",
    "Client",
    "Completion",
    "ConfigError",
    "InvalidRequest",
    "KVSpanError",
    "RemoteFailure",
]

_HOMES = {
    "AsyncClient": "kvspan.client",
    "Client": "kvspan.client",
    "Completion": "kvspan.client",
    "ConfigError": "common.errors",
    "InvalidRequest": "common.errors",
    "KVSpanError": "common.errors",
    "RemoteFailure": "common.wire.failure",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _refuse_another_common()
    return vars(import_module(_HOMES[name]))[name]


def _refuse_another_common() -> None:
    """Raise ImportError when a package of somebody else has the name of ours and comes first on the path."""
    found = import_module("common").__file__
    ours = os.path.join(os.path.dirname(__file__), os.pardir, "common", "__init__.py")
    if found is None or not os.path.samefile(found, ours):
        raise ImportError(f"{found} hides the package common of kvspan; rename it, or run python -P")
