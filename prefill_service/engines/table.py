"""The engines that are built in, by name.

Theory of operation: each is imported when it is asked for, so that another one needs no torch.
"""

from __future__ import annotations

from common.engine.prefill import PrefillEngine
from common.engine.registry import ENGINE_GROUP, Kind
from common.engine.setup import EngineSetup


def _torch(setup: EngineSetup) -> PrefillEngine:
    """Compute with transformers' own modules, chunk by chunk."""
    from common.model.prepare import make_engine

    return make_engine(setup)


def _fixed_width(setup: EngineSetup) -> PrefillEngine:
    """Compute in passes that are padded to compiled widths, layers in groups."""
    from prefill_service.engines.fixed_width import make_engine

    return make_engine(setup)


def _replay(setup: EngineSetup) -> PrefillEngine:
    """Make patterned KV of any shape, and compute nothing."""
    from prefill_service.engines.replay import make_engine

    return make_engine(setup)


ENGINES: Kind[EngineSetup, PrefillEngine] = Kind(
    "engine", ENGINE_GROUP, {"torch": _torch, "fixed-width": _fixed_width, "replay": _replay}
)
