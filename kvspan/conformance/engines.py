"""The rules of a prefill engine.

Theory of operation: one engine serves all checks, one prompt after the other, as in a service: what an
earlier prompt left behind is part of what is tested. Bits are compared, except with a reference, for which
the tolerance says why.

Not here: what can be seen without computing (`common/engine/checks.py`), of which the first check makes use.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise, zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.engine.checks import engine_problems
from common.errors import Cancelled, PromptTooLong
from common.kv.geometry import DType
from common.kv.ranges import Range
from kvspan.conformance.checks import CheckFailed, Skipped, fail, of_table, require
from kvspan.conformance.subject import EngineSubject, Outcome, Recorder

TOLERANCE = {DType.FLOAT32: 2e-3, DType.BFLOAT16: 0.15, DType.FLOAT16: 0.02}
"""Largest difference of a key or value from the reference, relative to the largest value of its layer.

A product of n terms in another order differs by about sqrt(n) roundings: some 1e-6 for a thousand terms of
float32, and the error grows from layer to layer; a thousandfold margin still tells a wrong mask, rotation or
weight, which is of order one. Types of two bytes round each product at 2**-8 and 2**-11.
"""

PATIENCE_S = 20.0
"""Longest wait for something that takes milliseconds."""

MOST_GROWTH_BYTES = 32 << 20
"""Of memory over all prompts of the check of memory: caches of allocators settle below it."""


class _Full(Exception):
    """Raised by a writer that has no room."""


def describes_itself(subject: EngineSubject) -> None:
    """Check the description against itself, and that it stays what it was."""
    for problem in engine_problems(subject.identity, subject.description):
        fail(problem)
    subject.run(subject.prompt(1))
    same = subject.engine.identity() == subject.identity and subject.engine.describe() == subject.description
    require(same, "identity or description changed after a prompt")


def delivers_everything_once(subject: EngineSubject) -> None:
    """Check that each wanted position of each layer comes once, in the declared order."""
    for length in subject.lengths:
        outcome = subject.run(subject.prompt(length))
        found = [(one.layer_index, one.tokens) for one in outcome.written.writes]
        expected = list(_owed(subject, length))
        if found != expected:
            at = next(i for i, pair in enumerate(zip_longest(found, expected)) if pair[0] != pair[1])
            one, other = ([*some, None][at] for some in (found, expected))
            fail(f"prompt of {length}: write {at} is {_shown(one)}, expected {_shown(other)}")


def _owed(subject: EngineSubject, length: int) -> Iterator[tuple[int, Range]]:
    step = subject.description.chunk_tokens or length
    for start in range(0, length, step):
        for layer in subject.identity.geometry.layers:
            yield layer.layer_index, Range(start, min(start + step, length))


def _shown(write: tuple[int, Range] | None) -> str:
    return "none" if write is None else f"layer {write[0]} of tokens {write[1]}"


def writes_rows_of_its_geometry(subject: EngineSubject) -> None:
    """Check the bytes of each write."""
    row_bytes = {layer: group.row_bytes for layer, (group, _) in subject.identity.geometry.by_layer.items()}
    outcome = subject.run(subject.prompt(subject.lengths[-1]))
    for one in outcome.written.writes:
        expected = len(one.tokens) * row_bytes[one.layer_index]
        for name, rows in (("keys", one.keys), ("values", one.values)):
            told = (
                f"{name} of layer {one.layer_index}, tokens {one.tokens}: {len(rows)} bytes, not {expected}"
            )
            require(len(rows) == expected, told)
    logits = len(outcome.logits) // 4
    vocab_size = subject.identity.geometry.vocab_size
    require(logits == vocab_size, f"{logits} logits, the vocabulary has {vocab_size}")


def exports_suffixes(subject: EngineSubject) -> None:
    """Check that half a prompt, or none of it, can be wanted, and is what it is in the whole."""
    length = subject.lengths[-1]
    prompt = subject.prompt(length)
    whole = subject.run(prompt)
    for first in {length // 2, length - 1, length}:
        part = subject.run(prompt, subject.wanted(length, first))
        require(part.logits == whole.logits, f"suffix from {first}: other logits than the whole prompt")
        for layer in subject.identity.geometry.layers:
            wanted = Range(first, length)
            same = part.written.rows(layer.layer_index, wanted) == whole.written.rows(
                layer.layer_index, wanted
            )
            require(
                same,
                f"suffix from {first} of {length}: layer {layer.layer_index} has other bits, or is missing",
            )


def wants_differ_by_layer(subject: EngineSubject) -> None:
    """Check that a layer of which nothing is wanted may be left out, and hides no other."""
    length, prompt = subject.lengths[-1], subject.prompt(subject.lengths[-1])
    layers = [layer.layer_index for layer in subject.identity.geometry.layers]
    whole = subject.run(prompt)
    wanted = {
        layer: Range(length if number % 2 else length // 3, length) for number, layer in enumerate(layers)
    }
    part = subject.run(prompt, wanted)
    for layer, tokens in wanted.items():
        same = part.written.rows(layer, tokens) == whole.written.rows(layer, tokens)
        require(same, f"layer {layer}, wanted {tokens}: other bits than in the whole prompt, or missing")


def refuses_what_is_too_long(subject: EngineSubject) -> None:
    """Check the longest prompt, and one more."""
    limit = subject.description.max_prompt_tokens
    if limit > 4096:
        raise Skipped(f"its longest prompt has {limit} tokens, which takes too long here")
    subject.run(subject.prompt(limit), subject.wanted(limit, limit))
    writer = Recorder()
    try:
        subject.engine.prefill(subject.prompt(limit + 1), subject.wanted(limit + 1), writer, lambda: False)
    except PromptTooLong as error:
        both = str(limit) in str(error) and str(limit + 1) in str(error)
        require(both, f"the refusal of {limit + 1} tokens does not name both numbers: {error}")
        require(
            not writer.writes, f"a prompt of {limit + 1} tokens was written in part before it was refused"
        )
        return
    fail(f"a prompt of {limit + 1} tokens was taken, the longest is said to be {limit}")


def equals_the_reference(subject: EngineSubject) -> None:
    """Check keys, values and logits against the same checkpoint computed by somebody else."""
    if subject.reference is None:
        raise Skipped("there is no reference of this checkpoint")
    for length in subject.lengths:
        prompt = subject.prompt(length)
        outcome, (expected, logits) = subject.run(prompt), subject.reference.prefill(prompt)
        for layer in subject.identity.geometry.layers:
            kept = expected[layer.layer_index].shape[1]
            rows = outcome.written.rows(layer.layer_index, Range(length - kept, length))
            shape = (kept, layer.num_kv_heads, layer.head_dim)
            found = np.stack([_as_float32(part, layer.dtype).reshape(shape) for part in rows])
            what = f"prompt of {length}: layer {layer.layer_index}"
            _require_close(what, found, expected[layer.layer_index], TOLERANCE[layer.dtype])
        tolerance = max(TOLERANCE[layer.dtype] for layer in subject.identity.geometry.layers)
        found_logits = np.frombuffer(outcome.logits, np.float32)
        _require_close(f"prompt of {length}: logits", found_logits, logits, tolerance)


def repeats_exactly(subject: EngineSubject) -> None:
    """Check that a prompt gives equal bits again: after others, a failure and a cancel."""
    length = subject.lengths[-1]
    prompt = subject.prompt(length)
    first = subject.run(prompt)
    _require_same("the same prompt at once", subject.run(prompt), first)
    subject.run(subject.prompt(max(1, length - 3), seed=5))
    _require_same("the same prompt after another", subject.run(prompt), first)
    _run_into_full_writer(subject, prompt, len(first.written.writes) - 1)
    _require_same("the same prompt after a writer failed", subject.run(prompt), first)
    _expect(Cancelled, lambda: subject.run(prompt, is_cancelled=lambda: True))
    _require_same("the same prompt after a cancel", subject.run(prompt), first)


def answers_a_cancel(subject: EngineSubject) -> None:
    """Check that it asks often enough, stops when told, and writes nothing after it."""
    prompt = subject.prompt(subject.lengths[-1])
    asked_ns: list[int] = [time.monotonic_ns()]

    def ask() -> bool:
        asked_ns.append(time.monotonic_ns())
        return False

    subject.run(prompt, is_cancelled=ask)
    asked_ns.append(time.monotonic_ns())
    num_asked, limit_ms = len(asked_ns) - 2, subject.description.longest_step_ms
    layers = len(subject.identity.geometry.layers)
    if not limit_ms:
        require(
            num_asked >= layers, f"asked {num_asked} times in {layers} layers, said it asks at every layer"
        )
    else:
        longest_ms = max(after - before for before, after in pairwise(asked_ns)) / 1e6
        # A host that is busy with something else may take any time: a second is no fault of the engine.
        told = f"{longest_ms:.0f} ms without asking, said at most {limit_ms}"
        require(longest_ms <= limit_ms + 1000, told)
    require(num_asked > 0, "never asked whether to stop")
    for call in sorted({1, (num_asked + 1) // 2, num_asked}):
        _require_stop(subject, prompt, call)


def _require_stop(subject: EngineSubject, prompt: list[int], call: int) -> None:
    numbers, writer = iter(range(1, 1 << 30)), Recorder()
    was_told: list[int] = []

    def is_cancelled() -> bool:
        if next(numbers) >= call:
            was_told.append(len(writer.writes))
        return bool(was_told)

    told = f"told to stop at ask {call}"
    try:
        subject.engine.prefill(list(prompt), subject.wanted(len(prompt)), writer, is_cancelled)
    except Cancelled:
        more = len(writer.writes) - was_told[0]
        require(not more, f"{told}: {more} writes came after it")
        return
    fail(f"{told}: it went on to the end")


def passes_on_what_the_writer_raises(subject: EngineSubject) -> None:
    """Check that an error of the writer ends the prompt, unchanged, and nothing is written after it."""
    prompt = subject.prompt(subject.lengths[-1])
    num_writes = len(subject.run(prompt).written.writes)
    for number in sorted({0, num_writes // 2, num_writes - 1}):
        writer = _run_into_full_writer(subject, prompt, number)
        told = f"write {number} of {num_writes} failed, and {len(writer.writes)} were taken"
        require(len(writer.writes) == number, told)


def waits_for_the_writer(subject: EngineSubject) -> None:
    """Check that a writer may take its time: it is no fault, and changes nothing."""
    prompt = subject.prompt(subject.lengths[-1])
    expected, gate, arrived = subject.run(prompt), threading.Event(), threading.Event()
    outcome: list[Outcome | BaseException] = []

    def hold(number: int) -> None:
        if number == 0:
            arrived.set()
            gate.wait(PATIENCE_S)

    def work() -> None:
        writer = Recorder(on_write=hold)
        try:
            logits = subject.engine.prefill(list(prompt), subject.wanted(len(prompt)), writer, lambda: False)
            outcome.append(Outcome(writer, np.ascontiguousarray(logits, np.float32).tobytes()))
        except BaseException as error:  # noqa: BLE001 - the check says what ended it
            outcome.append(error)

    thread = threading.Thread(target=work, name="conformance")
    thread.start()
    is_held = arrived.wait(PATIENCE_S)
    gate.set()
    thread.join(PATIENCE_S)
    require(is_held and bool(outcome), "it did not come to the writer, or not back from it")
    if isinstance(outcome[0], BaseException):
        fail(f"a writer that blocks ends it with {type(outcome[0]).__name__}: {outcome[0]}")
    _require_same("behind a writer that blocks", outcome[0], expected)


def leaves_rows_alone(subject: EngineSubject) -> None:
    """Check that what was handed over does not change until the prompt has ended."""
    outcome = subject.run(subject.prompt(subject.lengths[-1]))
    pairs = zip(outcome.written.writes, outcome.written.arrays, strict=True)
    for one, (keys, values) in pairs:
        same = keys.tobytes() == one.keys and values.tobytes() == one.values
        require(
            same, f"rows of layer {one.layer_index}, tokens {one.tokens} changed after they were handed over"
        )


def keeps_its_memory(subject: EngineSubject) -> None:
    """Check that prompts of all lengths, one after the other, do not make the process grow."""
    lengths = [length for length in subject.lengths if length <= 300]
    for number in range(20):
        subject.run(subject.prompt(lengths[number % len(lengths)]))
    before = _resident_bytes()
    for number in range(subject.num_prompts):
        subject.run(subject.prompt(lengths[number % len(lengths)], seed=number))
    growth = _resident_bytes() - before
    told = f"{subject.num_prompts} prompts grew the process by {growth >> 20} MiB"
    require(growth < MOST_GROWTH_BYTES, told)


ENGINE_CHECKS = of_table(
    ("description", "its description is complete, contradicts nothing and stays", describes_itself),
    (
        "delivery",
        "each wanted position of each layer comes once, in the declared order",
        delivers_everything_once,
    ),
    ("rows", "rows and logits have the size that its geometry says", writes_rows_of_its_geometry),
    ("suffix", "a suffix, or nothing, can be wanted, with the bits of the whole", exports_suffixes),
    ("wanted", "each layer may be wanted from a position of its own", wants_differ_by_layer),
    (
        "longest",
        "the longest prompt is taken, one more token is refused with both numbers",
        refuses_what_is_too_long,
    ),
    ("reference", "keys, values and logits are those of the checkpoint", equals_the_reference),
    ("repetition", "a prompt has the same bits again, whatever came between", repeats_exactly),
    ("cancel", "a cancel is answered within the declared stretch", answers_a_cancel),
    ("writer", "an error of the writer ends the prompt and is passed on", passes_on_what_the_writer_raises),
    ("waiting", "a writer may block", waits_for_the_writer),
    ("immutability", "rows do not change after they were handed over", leaves_rows_alone),
    ("memory", "prompts leave nothing behind", keeps_its_memory),
)


def _run_into_full_writer(subject: EngineSubject, prompt: list[int], full_at: int) -> Recorder:
    """Compute a prompt whose writer has no room for the write of that number, and return the writer."""

    def refuse(number: int) -> None:
        # Whatever comes after it finds no room either, and is counted.
        if number >= full_at:
            raise _Full("no room")

    writer = Recorder(on_write=refuse)

    def run() -> None:
        subject.engine.prefill(list(prompt), subject.wanted(len(prompt)), writer, lambda: False)

    _expect(_Full, run)
    return writer


def _expect(kind: type[Exception], run: Callable[[], object]) -> None:
    try:
        run()
    except kind:
        return
    except CheckFailed:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it is not what it should be
        fail(f"raised {type(error).__name__} instead of {kind.__name__.strip('_')}")
    fail(f"went on where {kind.__name__.strip('_')} had to end it")


def _require_same(what: str, found: Outcome, expected: Outcome) -> None:
    require(found.written.writes == expected.written.writes, f"{what}: other keys or values")
    require(found.logits == expected.logits, f"{what}: other logits")


def _require_close(
    what: str, found: NDArray[np.float32], expected: NDArray[np.float32], tolerance: float
) -> None:
    scale = float(np.abs(expected).max()) or 1.0
    worst = float(np.abs(found - expected).max()) / scale
    # Not `worst > tolerance`: every comparison with NaN is false.
    require(worst <= tolerance, f"{what} differs by {worst:.2g} of its largest value, allowed {tolerance:g}")


def _as_float32(rows: bytes, dtype: DType) -> NDArray[np.float32]:
    if dtype is DType.BFLOAT16:
        return (np.frombuffer(rows, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(rows, np.float16 if dtype is DType.FLOAT16 else np.float32).astype(np.float32)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
