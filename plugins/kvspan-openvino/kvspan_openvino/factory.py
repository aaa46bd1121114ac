"""Make the engine: choose, find or convert the model, compile it, and see how long a part takes.

Theory of operation: everything that can be refused without loading a weight is refused first. A model that
was converted before is compiled without torch being imported.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from common.engine.identity import EngineIdentity
from common.engine.manifest import read_manifest
from common.engine.prefill import EngineDescription
from common.engine.setup import EngineSetup
from common.errors import ConfigError
from common.model.folder.cache import cache_folder
from kvspan_openvino import runtime
from kvspan_openvino.artefact import FORMAT, MANIFEST_FILE, Facts, Kept, Recipe, kept, part_file
from kvspan_openvino.bar import shown
from kvspan_openvino.checkpoint import checkpoint_of
from kvspan_openvino.choices import Choices, read_choices, share_out
from kvspan_openvino.engine import OpenVinoEngine, Pass, compile_pass, rows_of

logger = logging.getLogger(__name__)

STRETCH_MARGIN = 4
"""What is said of the longest part, over what was measured: beside a busy neighbour it takes longer."""

_CONVERTERS = ("torch", "transformers", "kvspan", "kvspan-openvino")
"""Packages of which another version may convert the same checkpoint otherwise, or describe it otherwise."""


def create_engine(setup: EngineSetup) -> OpenVinoEngine:
    """Return the engine `openvino`.

    Raises: `ConfigError` or `UnsupportedModel`, by name, before anything is served.
    """
    choices = read_choices(setup.options)
    device = runtime.Device(choices.device, choices.precision, setup.threads)
    if device.emulates:
        logger.warning("openvino.precision_emulated device=%s precision=%s", device.name, device.precision)
    cache = cache_folder(os.environ)
    recipe = recipe_of(setup, choices, cache)
    folder, facts = kept(cache, recipe, lambda scratch: _convert(setup, choices, recipe, scratch))
    limit = longest_prompt(setup, choices, facts)
    passes = _compile(choices, device, (folder, facts), setup.show_progress)
    identity = read_manifest(folder / MANIFEST_FILE)
    description = EngineDescription(
        name="openvino",
        numerics=numerics_of(choices),
        max_prompt_tokens=limit,
        widths=choices.widths,
        layer_stops=tuple(part.start for part in share_out(facts.num_layers, choices.parts)[1:]),
        longest_step_ms=longest_step_ms(passes),
        kernels=kernels_of(passes, identity),
    )
    return OpenVinoEngine(passes, identity, description)


def recipe_of(setup: EngineSetup, choices: Choices, cache: Path) -> Recipe:
    """Return what decides a converted model; widths do not, they are set when it is compiled."""
    return {
        "checkpoint": checkpoint_of(setup.model, cache, setup.show_progress),
        "parts": str(choices.parts),
        "openvino": runtime.version(),
        "format": FORMAT,
        **{name: version(name) for name in _CONVERTERS},
    }


def numerics_of(choices: Choices) -> tuple[str, ...]:
    """Name everything that decides the bits of the KV, beside weights and tokens."""
    return (
        f"openvino {runtime.version()}",
        f"device {choices.device}",
        f"precision {choices.precision}",
        f"widths {','.join(map(str, choices.widths))}",
        f"parts {choices.parts}",
    )


def longest_prompt(setup: EngineSetup, choices: Choices, facts: Facts) -> int:
    """Return the tokens of the longest prompt: it fits the largest width and the positions of the model.

    Raises: `ConfigError` when widths or context reach further than the positions.
    """
    says = f"max_position_embeddings is {facts.max_context}"
    problem = f"{says}, and the positions of this model reach {facts.max_stretched} at most"
    if setup.max_context_tokens > facts.max_stretched:
        raise ConfigError("max_context_tokens", setup.max_context_tokens, problem)
    if choices.widths[-1] > facts.max_stretched:
        raise ConfigError(runtime.FIELD, f"widths={','.join(map(str, choices.widths))}", problem)
    context = setup.max_context_tokens or facts.max_context
    return min(setup.max_prompt_tokens, context, choices.widths[-1])


def longest_step_ms(passes: Sequence[Pass]) -> int:
    """Return how long a part may take at most, in whole milliseconds; runs the largest width."""
    passes[-1].part_times()  # The first run of a request makes kernels and memory.
    return math.ceil(STRETCH_MARGIN * 1e3 * max(passes[-1].part_times()))


def kernels_of(passes: Sequence[Pass], identity: EngineIdentity) -> str:
    """Say whether the rows of a prompt have the same bits at every width, as a trial shows."""
    trial = [(11 + 7919 * index) % identity.geometry.vocab_size for index in range(min(passes[0].width, 64))]
    first, logits = rows_of(passes[0], trial)
    for one in passes[1:]:
        rows, others = rows_of(one, trial)
        same = all(np.array_equal(ours, theirs) for ours, theirs in zip(first, rows, strict=True))
        if not same or not np.array_equal(logits, others):
            return f"rows differ between widths {passes[0].width} and {one.width}"
    return "rows are alike at every width" if len(passes) > 1 else "one width"


def _convert(setup: EngineSetup, choices: Choices, recipe: Recipe, folder: Path) -> None:
    # Here, since a model that is kept needs neither torch nor transformers.
    from kvspan_openvino.convert import Order, convert

    convert(Order(setup.model, choices.parts, recipe, setup.show_progress), folder)


def _compile(choices: Choices, device: runtime.Device, model: Kept, show_progress: bool) -> tuple[Pass, ...]:
    folder, facts = model
    layers = share_out(facts.num_layers, choices.parts)
    models = [device.read(folder / part_file(part)) for part in range(len(layers))]
    bar = shown("compiling for OpenVINO", choices.widths, show_progress)
    return tuple(compile_pass(device, models, layers, width, facts.hidden_size) for width in bar)
