"""The only door to OpenVINO: convert a module, compile a part for a device, run it.

Theory of operation: a part is compiled for one width. Its request owns the memory of its outputs, which the
next run of it writes again, and reads its inputs from where they are: the hidden rows of a part are the
input of the next one, without a copy. The library is imported when it is first needed, without the package
by which it reports its use to its makers: a service asks nobody outside.

Not here: what the parts of a model are (`convert.py`), the order in which they run (`engine.py`).
"""

from __future__ import annotations

import errno
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError, EngineFailed, told
from common.excerpt import printable

FIELD = "engine_option"
"""The setting that a refusal blames."""


def library() -> Any:
    """Return the module `openvino`."""
    # None makes the import fail, upon which OpenVINO takes a stand-in that sends nothing.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    return openvino


def version() -> str:
    """Return the version with its build, since either may change bits."""
    return str(library().get_version())


def convert(module: Any, example: tuple[Any, ...], shapes: Sequence[Sequence[int]], path: Path) -> None:
    """Write a torch module as a model at `path`, which ends in .xml; -1 is a size that is open.

    Raises: `OSError` when it cannot be written.
    """
    ov = library()
    inputs = [ov.PartialShape(list(shape)) for shape in shapes]
    with warnings.catch_warnings():
        # Of tracing: branches on shapes are taken as the example goes, which is how every width goes.
        warnings.simplefilter("ignore")
        model = ov.convert_model(module, example_input=example, input=inputs)
    try:
        ov.save_model(model, path, compress_to_fp16=False)
    except RuntimeError as error:
        raise OSError(errno.EIO, printable(" ".join(str(error).split())), str(path)) from error


class Device:
    """A device of this host, and how it shall compute."""

    def __init__(self, name: str, precision: str, threads: int) -> None:
        """Raises: `ConfigError` when there is no such device."""
        self._core = library().Core()
        self.name = name
        self.precision = precision
        self._threads = threads
        known = list(self._core.available_devices)
        if name.partition(".")[0] not in {one.partition(".")[0] for one in known}:
            problem = f"is no device of this host; there are: {', '.join(known)}"
            raise ConfigError(FIELD, f"device={name}", problem)

    @property
    def emulates(self) -> bool:
        """Whether it has no instructions for the precision; it may compute in it all the same, at a crawl."""
        wanted = {"f32": "FP32", "bf16": "BF16", "f16": "FP16"}[self.precision]
        return wanted not in self._core.get_property(self.name, "OPTIMIZATION_CAPABILITIES")

    def read(self, path: Path) -> Any:
        """Return a converted model, whose weights stay in the file until it is compiled."""
        return self._core.read_model(path)

    def compile(self, model: Any, shape: Sequence[int]) -> CompiledPart:
        """Compile a model for a first input of this shape.

        Raises: `ConfigError` when the device does not take it, or computes in another precision.
        """
        model = model.clone()
        model.reshape({model.inputs[0]: list(shape)})
        try:
            compiled = self._core.compile_model(model, self.name, self._properties())
            used = str(compiled.get_property("INFERENCE_PRECISION_HINT").to_string())
        except RuntimeError as error:
            problem = f"does not take a part of this model: {printable(' '.join(str(error).split()))}"
            raise ConfigError(FIELD, f"device={self.name}", problem) from error
        if used != self.precision:
            raise ConfigError(FIELD, f"precision={self.precision}", f"device {self.name} computes in {used}")
        return CompiledPart(compiled.create_infer_request(), len(model.outputs))

    def _properties(self) -> dict[str, Any]:
        common = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": self.precision}
        if self.name.partition(".")[0] != "CPU":
            return common
        # Pinned threads would sit on the core that the other service computes on.
        own = {"INFERENCE_NUM_THREADS": self._threads, "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False}
        return {**common, **own}


class CompiledPart:
    """One part of a model at one width; one run at a time."""

    def __init__(self, request: Any, num_outputs: int) -> None:
        self._request = request
        self._outputs = [request.get_output_tensor(index) for index in range(num_outputs)]

    @property
    def outputs(self) -> list[NDArray[np.float32]]:
        """What it computes, as views of memory that the next run writes."""
        return [tensor.data for tensor in self._outputs]

    def feed(self, index: int, values: NDArray[Any]) -> None:
        """Let it read an input from this array, from now on."""
        self._request.set_input_tensor(index, library().Tensor(values, shared_memory=True))

    def feed_from(self, other: CompiledPart) -> None:
        """Let it read its first input from the last output of another part, from now on."""
        self._request.set_input_tensor(0, other._outputs[-1])

    def start(self) -> None:
        """Begin a run; `wait` has to follow."""
        try:
            self._request.start_async()
        except RuntimeError as error:
            raise EngineFailed(f"OpenVINO: {told(error)}") from error

    def wait(self) -> None:
        """Return when the run has ended.

        Raises: `EngineFailed` when it failed; nothing runs then either.
        """
        try:
            self._request.wait()
        except RuntimeError as error:
            raise EngineFailed(f"OpenVINO: {told(error)}") from error
