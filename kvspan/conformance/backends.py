"""The rules of a decode backend.

Theory of operation: KV is made up, the same numbers each time, so that a rule needs no model to be checked:
whatever the logits mean, they are a function of a sequence's tokens and KV. Bits are compared. Each check has
a fresh cache.

Not here: what can be seen without computing (`common/engine/checks.py`), of which the first check makes use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.engine.checks import backend_problems
from common.engine.decode import DecodeBackend, KVPlace, LaneStep
from common.kv.geometry import DType, GroupGeometry
from common.kv.ranges import Range
from common.kv.tables import PageTable
from kvspan.conformance.checks import Skipped, fail, of_table, require

PAGE_TOKENS = 16
NUM_PAGES = 24
"""Of each group: room for several short sequences."""

PROMPT = 37
"""Tokens of the first sequence: two pages and a part of a third."""

TOKENS = (5, 9, 2, 7)
"""What is fed to it, one step after the other."""


@dataclass(slots=True)
class BackendSubject:
    """A backend under test."""

    make: Callable[[], DecodeBackend]
    """Returns a backend that nobody has used; called once for each check."""


@dataclass(slots=True)
class _Cache:
    """A fresh backend with room, and where its sequences lie."""

    backend: DecodeBackend
    groups: tuple[GroupGeometry, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.groups = self.backend.identity().geometry.groups
        self.backend.allocate(PAGE_TOKENS, [NUM_PAGES] * len(self.groups))

    def tables(self, prompt_len: int, growth: int, pages: Sequence[int]) -> tuple[PageTable, ...]:
        """Return tables for a prompt and its answer, over these pages in this order."""
        tables = []
        for group in self.groups:
            first = group.visible(prompt_len).start // PAGE_TOKENS
            count = -(-(prompt_len + growth) // PAGE_TOKENS) - first
            tables.append(PageTable(PAGE_TOKENS, first, tuple(pages[:count])))
        return tuple(tables)

    def fill(self, tables: Sequence[PageTable], prompt_len: int, seed: int = 3) -> None:
        """Write the KV that a prompt requires."""
        for group, table in zip(self.groups, tables, strict=True):
            wanted = group.visible(prompt_len)
            for layer in range(group.num_layers):
                keys, values = (_rows(group, layer, kind, wanted, seed) for kind in (0, 1))
                if len(wanted):
                    self.backend.write(KVPlace(group.group_index, table, wanted), layer, keys, values)

    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages with what is no number."""
        for group in self.groups:
            table = PageTable(PAGE_TOKENS, 0, tuple(pages))
            shape = (len(table.extent), group.num_kv_heads, group.row_bytes // group.num_kv_heads)
            rows = np.full(shape, 0xFF, np.uint8)
            for layer in range(group.num_layers):
                self.backend.write(KVPlace(group.group_index, table, table.extent), layer, rows, rows)

    def answer(self, tables: Sequence[PageTable], prompt_len: int) -> list[bytes]:
        """Feed TOKENS and return the logits after each."""
        rows = []
        for position, token in enumerate(TOKENS, prompt_len):
            rows.append(self.step([(token, position, tables)])[0])
        return rows

    def step(self, lanes: Sequence[tuple[int, int, Sequence[PageTable]]]) -> list[bytes]:
        """Run a step over lanes of token, position and tables; return a row of logits for each."""
        batch = [LaneStep(token, position, tuple(tables)) for token, position, tables in lanes]
        logits = self.backend.step(batch)
        vocab_size = self.backend.identity().geometry.vocab_size
        shape = (len(batch), vocab_size)
        require(logits.shape == shape, f"logits of shape {logits.shape}, expected {shape}")
        require(logits.dtype == np.float32, f"logits of {logits.dtype}, expected float32")
        return [np.ascontiguousarray(row).tobytes() for row in logits]


def _rows(group: GroupGeometry, layer: int, kind: int, tokens: Range, seed: int) -> NDArray[np.uint8]:
    """Return made-up keys or values [tokens, KV heads, bytes] that are a function of their place."""
    parts = []
    for position in tokens:
        source = np.random.default_rng([seed, group.layer_indices[layer], kind, position])
        parts.append(source.standard_normal(group.num_kv_heads * group.head_dim, np.float32))
    numbers = np.stack(parts) if parts else np.zeros((0, group.num_kv_heads * group.head_dim), np.float32)
    words: NDArray[np.generic] = numbers
    if group.dtype is DType.BFLOAT16:
        words = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    elif group.dtype is DType.FLOAT16:
        words = numbers.astype(np.float16)
    return np.ascontiguousarray(words).view(np.uint8).reshape(len(tokens), group.num_kv_heads, -1)


def _start(
    subject: BackendSubject, pages: Sequence[int] = tuple(range(NUM_PAGES))
) -> tuple[_Cache, tuple[PageTable, ...]]:
    cache = _Cache(subject.make())
    tables = cache.tables(PROMPT, len(TOKENS), pages)
    cache.fill(tables, PROMPT)
    return cache, tables


def _expected(subject: BackendSubject) -> list[bytes]:
    cache, tables = _start(subject)
    return cache.answer(tables, PROMPT)


def describes_itself(subject: BackendSubject) -> None:
    """Check the description against itself, and that it stays what it was."""
    backend = subject.make()
    identity, description = backend.identity(), backend.describe()
    for problem in backend_problems(description):
        fail(problem)
    _Cache(backend)
    same = backend.identity() == identity and backend.describe() == description
    require(same, "identity or description changed when room was made")


def repeats_exactly(subject: BackendSubject) -> None:
    """Check that a sequence has equal bits again, also where another one lay before."""
    cache, tables = _start(subject)
    expected = cache.answer(tables, PROMPT)
    require(_expected(subject) == expected, "two fresh backends differ")
    cache.fill(tables, PROMPT, seed=8)
    cache.answer(tables, PROMPT)
    cache.fill(tables, PROMPT)
    require(
        cache.answer(tables, PROMPT) == expected, "another sequence that lay there before changed the bits"
    )


def sees_its_own_tokens(subject: BackendSubject) -> None:
    """Check that a step writes the KV of its token, which later ones see."""
    cache, tables = _start(subject)
    whole = cache.answer(tables, PROMPT)
    other_cache, other_tables = _start(subject)
    other_cache.step([(TOKENS[0] + 1, PROMPT, other_tables)])
    later = other_cache.step([(TOKENS[1], PROMPT + 1, other_tables)])[0]
    require(
        later != whole[1], "another token before it changed nothing: its KV was not written, or is not read"
    )


def does_not_see_placement(subject: BackendSubject) -> None:
    """Check that bits do not tell where pages lie."""
    for pages in (
        tuple(reversed(range(NUM_PAGES))),
        tuple((7 * page) % NUM_PAGES for page in range(NUM_PAGES)),
    ):
        cache, tables = _start(subject, pages)
        same = cache.answer(tables, PROMPT) == _expected(subject)
        require(same, f"other bits in pages {pages[:4]}… than in adjacent ones")


def does_not_see_neighbours(subject: BackendSubject) -> None:
    """Check that a row is the same alone, beside others, and wherever it stands among them."""
    cache = _Cache(subject.make())
    lanes = min(4, cache.backend.describe().max_lanes)
    if lanes < 2:
        raise Skipped("it has one lane")
    shares = [tuple(range(number * 6, number * 6 + 6)) for number in range(lanes)]
    alone = []
    sequences: list[tuple[int, int, Sequence[PageTable]]] = []
    for number, pages in enumerate(shares):
        prompt_len = PROMPT + 5 * number
        tables = cache.tables(prompt_len, 1, pages)
        cache.fill(tables, prompt_len, seed=number)
        sequences.append((TOKENS[number], prompt_len, tables))
        alone.append(cache.step(sequences[-1:])[0])
    for order in (list(range(lanes)), list(reversed(range(lanes)))):
        rows = cache.step([sequences[number] for number in order])
        for place, number in enumerate(order):
            require(
                rows[place] == alone[number],
                f"lane {number} at place {place} of {lanes}: other bits than alone",
            )


def reads_only_what_was_written(subject: BackendSubject) -> None:
    """Check that rows behind the prompt, in its last page and elsewhere, are never read."""
    cache = _Cache(subject.make())
    tables = cache.tables(PROMPT, len(TOKENS), tuple(range(NUM_PAGES)))
    cache.poison(tuple(range(NUM_PAGES)))
    cache.fill(tables, PROMPT)
    require(cache.answer(tables, PROMPT) == _expected(subject), "rows that nobody wrote were read")


def keeps_to_its_windows(subject: BackendSubject) -> None:
    """Check that a windowed layer sees the positions of its window, all of them and no other."""
    cache = _Cache(subject.make())
    windowed = [group for group in cache.groups if group.window is not None]
    if not windowed:
        raise Skipped("no layer has a window")
    expected = _expected(subject)[0]
    for group in windowed:
        visible = group.visible(PROMPT)
        for position, is_seen in ((visible.start, True), (visible.start - 1, False)):
            if position < group.visible(PROMPT).start // PAGE_TOKENS * PAGE_TOKENS:
                continue
            other, tables = _start(subject)
            place = KVPlace(group.group_index, tables[group.group_index], Range(position, position + 1))
            for layer in range(group.num_layers):
                keys, values = (_rows(group, layer, kind, place.tokens, 99) for kind in (0, 1))
                other.backend.write(place, layer, keys, values)
            changed = other.step([(TOKENS[0], PROMPT, tables)])[0] != expected
            what = (
                "is in its window and changes nothing"
                if is_seen
                else "is outside its window and changes the logits"
            )
            require(changed == is_seen, f"group {group.group_index}: position {position} {what}")


def writes_only_what_is_named(subject: BackendSubject) -> None:
    """Check that an import leaves the rows of another sequence alone."""
    cache, tables = _start(subject)
    if cache.backend.describe().max_lanes < 2:
        raise Skipped("it has one lane, and the next sequence takes its place")
    used = max(len(table.pages) for table in tables)
    other = cache.tables(PROMPT, 1, tuple(range(used, NUM_PAGES)))
    cache.fill(other, PROMPT, seed=6)
    require(
        cache.answer(tables, PROMPT) == _expected(subject), "an import into other pages changed a sequence"
    )


def survives_a_failed_step(subject: BackendSubject) -> None:
    """Check that a step that cannot be run raises, and harms nobody: its own lane can go on, too."""
    cache, tables = _start(subject)
    expected = _expected(subject)
    beyond = cache.backend.identity().geometry.vocab_size + 5
    lanes: list[tuple[int, int, Sequence[PageTable]]] = [(beyond, PROMPT, tables)]
    if cache.backend.describe().max_lanes > 1:
        # A lane beside it that had nothing wrong, in pages behind those of the first.
        used = max(len(table.pages) for table in tables)
        other = cache.tables(PROMPT, len(TOKENS), tuple(range(used, NUM_PAGES)))
        cache.fill(other, PROMPT)
        lanes.append((TOKENS[0], PROMPT, other))
    try:
        cache.step(lanes)
    except Exception:  # noqa: BLE001 - which error it is, its own documentation says
        for number, (*_, held) in enumerate(lanes):
            same = cache.answer(held, PROMPT) == expected
            require(same, f"after a step that failed the bits of lane {number} are others")
        return
    raise Skipped(f"it computes token {beyond}, which is none of its vocabulary, like any other")


def takes_writes_beside_steps(subject: BackendSubject) -> None:
    """Check that an import beside a running step changes nothing, if it says that one may."""
    cache, tables = _start(subject)
    description = cache.backend.describe()
    if not description.writes_while_stepping:
        raise Skipped("it says that nobody may write while it steps")
    used = max(len(table.pages) for table in tables)
    other = cache.tables(PROMPT, 1, tuple(range(used, NUM_PAGES)))
    ended, num_writes, errors = threading.Event(), 0, list[BaseException]()

    def write() -> None:
        nonlocal num_writes
        try:
            while not ended.is_set() or not num_writes:
                cache.fill(other, PROMPT, seed=num_writes)
                num_writes += 1
        except BaseException as error:  # noqa: BLE001 - the check says what ended it
            errors.append(error)

    thread = threading.Thread(target=write, name="conformance")
    thread.start()
    try:
        found = [cache.answer(tables, PROMPT) for _ in range(5)]
    finally:
        ended.set()
        thread.join()
    require(not errors, f"an import beside a step failed: {errors[:1]}")
    expected = _expected(subject)
    require(all(one == expected for one in found), f"{num_writes} imports beside its steps changed the bits")


BACKEND_CHECKS = of_table(
    ("description", "its description is complete, contradicts nothing and stays", describes_itself),
    ("repetition", "a sequence has the same bits again, whoever lay there before", repeats_exactly),
    ("growth", "a step writes the KV of its token, which later steps see", sees_its_own_tokens),
    ("placement", "bits do not depend on where pages lie", does_not_see_placement),
    ("company", "bits do not depend on the other lanes of a step", does_not_see_neighbours),
    ("unwritten", "rows that nobody wrote are never read", reads_only_what_was_written),
    ("window", "a windowed layer sees its window, all of it and nothing else", keeps_to_its_windows),
    ("import", "an import touches the rows that it names and no others", writes_only_what_is_named),
    ("failure", "a step that fails harms nobody", survives_a_failed_step),
    ("beside", "an import may run beside a step where that is said", takes_writes_beside_steps),
)
