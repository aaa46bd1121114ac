"""The seam between an engine and whatever takes its KV."""

import numpy as np

from common.kv.ranges import Range
from common.kv.writer import KVWriter, Rows


class _RecordingWriter:
    def __init__(self) -> None:
        self.written: list[tuple[int, Range, bytes]] = []

    def write(self, layer_index: int, tokens: Range, keys: Rows, values: Rows) -> None:
        self.written.append((layer_index, tokens, keys.tobytes() + values.tobytes()))


def test_rows_of_any_item_size_pass_the_seam() -> None:
    """Keys and values are raw bytes to the writer, whatever the element type of the model."""
    recording = _RecordingWriter()
    writer: KVWriter = recording
    keys = np.arange(6, dtype=np.uint16).reshape(2, 3, 1)
    values = np.arange(6, 12, dtype=np.uint16).reshape(2, 3, 1)

    writer.write(4, Range(5, 7), keys, values)

    assert recording.written == [(4, Range(5, 7), np.arange(12, dtype=np.uint16).tobytes())]
