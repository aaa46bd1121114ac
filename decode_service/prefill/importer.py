"""Copies spans from the slab into reserved pages, on a thread of its own.

Theory of operation: for each span the digest of the slab's bytes is checked first, then each layer's keys
and values are copied run by run (a run is a stretch of adjacent rows, so a copy is one memory copy and the
GIL is free meanwhile). The thread sleeps on a queue; nothing polls.

Ownership: one per service. A job's pages are held by `Holder.PRODUCER` and its bytes by the session's slab
until `done` has been called, so neither can be reused under a copy (rule 4).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from common.engine.decode import KVPlace, KVStore
from common.errors import ChecksumMismatch, EngineFailed, InvariantViolation, KVSpanError, told
from common.kv.digest import DigestKind, digest
from common.kv.geometry import KVGeometry
from common.kv.spans import Span, key_range, value_range
from common.kv.tables import PageTable
from common.runtime.clock import Clock
from common.runtime.invariants import raise_break, raise_on
from common.runtime.tracebacks import drop_tracebacks
from common.telemetry.logging import log_fields
from common.telemetry.timeline import SpanRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ImportJob:
    """One span to copy."""

    span: Span
    source: memoryview
    """The span's bytes in the slab; released when the copy has ended."""

    table: PageTable
    """Of the span's group."""

    digest: DigestKind
    done: Callable[[SpanRecord | KVSpanError], None]
    """Called on the event loop, exactly once."""

    request_id: str = ""
    """For the log."""


class Importer:
    """The importing thread."""

    def __init__(self, geometry: KVGeometry, store: KVStore, clock: Clock) -> None:
        self._groups = geometry.groups
        self._store = store
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[ImportJob | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="importer", daemon=True)
        self._thread.start()

    def submit(self, job: ImportJob) -> None:
        """Queue a span; spans are copied in order."""
        self._jobs.put(job)

    def stop(self) -> None:
        """End the thread after the queued jobs; blocks until then."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                outcome = self._import(job)
                job.source.release()
                self._loop.call_soon_threadsafe(job.done, outcome)
                del job, outcome  # this thread may sleep now for long: nothing of a request may stay with it
        except BaseException as error:  # noqa: BLE001 - nobody else sees how a thread ends
            raise_break(self._loop, "importer", error)

    def _import(self, job: ImportJob) -> SpanRecord | KVSpanError:
        span, start_ns = job.span, self._clock.now_ns()
        try:
            actual = digest(job.digest, job.source)
            if actual != span.digest:
                return ChecksumMismatch(span.sequence, span.digest.hex(), actual.hex())
            self._copy(job)
        except KVSpanError as error:
            # What a backend has against rows says so itself. Its frames hold views of the slab.
            drop_tracebacks(error)
            return error
        except InvariantViolation as error:
            raise_on(self._loop, error)
            return EngineFailed(f"import of span {span.sequence}: {told(error)}")
        except BaseException as error:
            # A copy that breaks fails its transfer, never the thread.
            fields = log_fields(request_id=job.request_id, sequence=span.sequence)
            logger.exception("import.failed", extra=fields)
            return EngineFailed(f"import of span {span.sequence}: {told(error)}")
        return SpanRecord(
            span.sequence, span.length, span.written_ns, span.sealed_ns, start_ns, self._clock.now_ns()
        )

    def _copy(self, job: ImportJob) -> None:
        span, group = job.span, self._groups[job.span.group_index]
        num_tokens = len(span.tokens)
        place = KVPlace(span.group_index, job.table, span.tokens)
        source = np.frombuffer(job.source, dtype=np.uint8)
        for position, layer in enumerate(span.layers):
            keys, values = (
                source[within.start : within.stop].reshape(num_tokens, group.row_bytes)
                for within in (
                    key_range(group, num_tokens, position),
                    value_range(group, num_tokens, position),
                )
            )
            self._store.write(place, layer, keys, values)
