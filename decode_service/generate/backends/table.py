"""The backends that are built in, by name.

Theory of operation: each is imported when it is asked for, so that another one needs no torch.
"""

from __future__ import annotations

from common.engine.decode import DecodeBackend
from common.engine.registry import BACKEND_GROUP, Kind
from common.engine.setup import BackendSetup


def _torch(setup: BackendSetup) -> DecodeBackend:
    """Compute with transformers' own modules over pages, many lanes at a time."""
    from decode_service.generate.backends.torch_backend import make_backend

    return make_backend(setup)


def _single_lane(setup: BackendSetup) -> DecodeBackend:
    """Compute one sequence in one contiguous cache."""
    from decode_service.generate.backends.single_lane import make_backend

    return make_backend(setup)


def _replay(setup: BackendSetup) -> DecodeBackend:
    """Check the pattern of the engine `replay`, and compute nothing."""
    from decode_service.generate.backends.replay import make_backend

    return make_backend(setup)


BACKENDS: Kind[BackendSetup, DecodeBackend] = Kind(
    "backend", BACKEND_GROUP, {"torch": _torch, "single-lane": _single_lane, "replay": _replay}
)
