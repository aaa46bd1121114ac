"""Passes of compiled widths: padding changes nothing, layers leave in groups, long prompts take several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
import torch

from common.engine.checks import check_engine
from common.engine.prefill import wanted_of
from common.errors import Cancelled, ConfigError, PromptTooLong
from common.kv.ranges import Range
from common.kv.writer import Rows
from common.model.loader import load_model
from prefill_service.engines.fixed_width import FixedWidthEngine, make_engine
from tests.support.models import RecordingWriter, dense, make_prompt, never
from tests.support.setups import make_setup

FAMILIES = ("llama", "qwen3", "gemma3")


def make(family: str = "llama", *options: str, max_prompt_tokens: int = 200) -> FixedWidthEngine:
    """Return an engine of widths 16 and 64 in groups of two layers, unless told otherwise."""
    given = options or ("widths=16,64", "layer_group=2")
    return make_engine(make_setup(f"tiny:{family}", given, max_prompt_tokens=max_prompt_tokens))


def run(engine: FixedWidthEngine, prompt: list[int]) -> tuple[RecordingWriter, bytes]:
    """Return all that was written, and the logits."""
    writer = RecordingWriter()
    logits = engine.prefill(prompt, dense(engine.identity().geometry, len(prompt)), writer, never)
    return writer, logits.tobytes()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 80, 81, 130])
def test_keys_and_logits_are_those_of_the_whole_prompt(family: str, length: int) -> None:
    """Around each width and beyond the largest; the tolerance is the order of sums in float32."""
    engine, prompt = make(family), make_prompt(length, length)
    writer = RecordingWriter()

    logits = engine.prefill(prompt, dense(engine.identity().geometry, length), writer, never)

    reference = load_model(f"tiny:{family}", "float32", progress=False).model
    with torch.inference_mode():
        output = reference(input_ids=torch.tensor([prompt]), use_cache=True)
    np.testing.assert_allclose(logits, output.logits[0, -1].numpy(), rtol=0, atol=2e-4)
    for layer in engine.identity().geometry.layers:
        written = b"".join(keys for index, _, keys, _ in writer.writes if index == layer.layer_index)
        keys_THD = np.frombuffer(written, np.float32).reshape(length, layer.num_kv_heads, layer.head_dim)
        # A windowed layer of the library keeps its window only: the last positions are what both have.
        expected_HTD = output.cache.layers[layer.layer_index].keys[0].numpy()
        kept = expected_HTD.shape[1]
        np.testing.assert_allclose(
            keys_THD[length - kept :], expected_HTD.transpose(1, 0, 2), rtol=0, atol=1e-4
        )


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 7, 15, 16, 17, 31])
def test_c5_every_length_in_passes_of_any_width_ends_as_the_whole_prompt_does(width: int) -> None:
    """C5: prompts of up to 70 tokens; as far from float64 as transformers' own float32, times eight.

    Eight, since both are sums of the same numbers in other orders: either error is a draw of the same size.
    """
    engine, prompt = make("gemma3", f"widths={width}"), make_prompt(70)
    reference = load_model("tiny:gemma3", "float32", progress=False).model
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        single = reference(input_ids=ids).logits[0].double().numpy()
        exact = reference.double()(input_ids=ids).logits[0].numpy()
    tolerance = 8 * np.abs(single - exact).max()
    assert tolerance < 1e-3

    # One token a pass is slow: every length of the wider ones, some of that.
    for length in range(1, 71, 1 if width > 1 else 23):
        writer = RecordingWriter()
        logits = engine.prefill(prompt[:length], dense(engine.identity().geometry, length), writer, never)
        np.testing.assert_allclose(logits, exact[length - 1], rtol=0, atol=tolerance)
        passes = [tokens for layer, tokens, *_ in writer.writes if layer == 0]
        assert passes == [Range(start, min(start + width, length)) for start in range(0, length, width)]


@cache
def made(family: str, dtype: str) -> FixedWidthEngine:
    """Return an engine of widths 16 and 64, once."""
    return make_engine(
        make_setup(f"tiny:{family}", ("widths=16,64", "layer_group=2"), max_prompt_tokens=200, dtype=dtype)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("longer", "shorter"),
    [(16, 9), (16, 1), (64, 17), (64 + 16, 64 + 5), (64 + 64, 64 + 17), (128 + 40, 128 + 30)],
)
def test_padding_changes_no_bit_of_what_stands_before_it(
    family: str, dtype: str, longer: int, shorter: int
) -> None:
    """A position depends on the tokens up to it and on the width of its pass: not on how much is padding.

    One prompt is the beginning of the other, and their last passes have one width; in the first, the second
    and the third pass.
    """
    engine, prompt = made(family, dtype), make_prompt(longer)
    more, _ = run(engine, prompt)

    less, _ = run(engine, prompt[:shorter])

    assert len(more.writes) == len(less.writes)
    for (_, tokens, *long), (_, cut, *short) in zip(more.writes, less.writes, strict=True):
        assert tokens.contains(cut)
        for rows, beginning in zip(long, short, strict=True):
            assert rows.startswith(beginning)
            assert len(beginning) * len(tokens) == len(rows) * len(cut)


def test_a_prompt_has_the_same_bits_again() -> None:
    """After others, after a cancel and after a failing writer."""
    engine, prompt = make(), make_prompt(81)
    first = run(engine, prompt)

    run(engine, make_prompt(130, 3))
    with pytest.raises(Cancelled):
        engine.prefill(prompt, dense(engine.identity().geometry, 81), RecordingWriter(), lambda: True)
    with pytest.raises(PromptTooLong):
        engine.prefill(prompt, dense(engine.identity().geometry, 81), Full(), never)

    assert run(engine, prompt) == first


class Full:
    """Has no room."""

    def write(self, layer_index: int, tokens: Range, keys: Rows, values: Rows) -> None:
        """Refuse."""
        raise PromptTooLong("slot bytes", 7, 5)


@dataclass
class Watched:
    """Writes down when layers come and when it is asked whether to stop."""

    events: list[str] = field(default_factory=list)

    def write(self, layer_index: int, tokens: Range, keys: Rows, values: Rows) -> None:
        """A layer has come."""
        self.events.append(f"{layer_index}:{tokens}")

    def is_cancelled(self) -> bool:
        """Go on."""
        self.events.append("stop?")
        return False


def test_layers_leave_in_groups_and_are_stopped_only_between_them() -> None:
    """Six layers, four at a time, in two passes."""
    engine, watched = make("llama", "widths=16,64", "layer_group=4"), Watched()

    engine.prefill(make_prompt(70), dense(engine.identity().geometry, 70), watched, watched.is_cancelled)

    layers = [layer.layer_index for layer in engine.identity().geometry.layers]
    one_pass = ["stop?", *(f"{layer}:{{0}}" for layer in layers[:4])]
    one_pass += ["stop?", *(f"{layer}:{{0}}" for layer in layers[4:])]
    assert watched.events == [event.format(part) for part in ("[0, 64)", "[64, 70)") for event in one_pass]
    description = engine.describe()
    assert (description.layer_stops, description.chunk_tokens, description.widths) == ((4,), 64, (16, 64))
    assert description.longest_step_ms >= 1


def test_nothing_is_kept_back_of_a_group_whose_last_layer_nobody_wants() -> None:
    """A window that is held already leaves a part of a group to hand over."""
    engine, watched = make(), Watched()
    wanted = {layer.layer_index: Range(9, 9) for layer in engine.identity().geometry.layers}
    wanted |= {0: Range(0, 9), 2: Range(4, 9)}

    engine.prefill(make_prompt(9), wanted, watched, never)

    assert watched.events == ["0:[0, 9)", "2:[4, 9)"]


@pytest.mark.parametrize("first", [0, 20, 40])
def test_only_what_is_wanted_is_written(first: int) -> None:
    """C5, S3: of a windowed layer its window, of the others the suffix, and none twice."""
    engine = make("gemma3")
    geometry = engine.identity().geometry
    required = geometry.required(first, 40)
    writer = RecordingWriter()

    engine.prefill(make_prompt(40), wanted_of(geometry, required), writer, never)

    for layer, (group, _) in geometry.by_layer.items():
        written = [tokens for index, tokens, *_ in writer.writes if index == layer]
        assert sum(map(len, written)) == len(required[group.group_index])


def test_a_prompt_above_the_largest_width_is_refused_when_one_pass_is_all() -> None:
    """With both numbers, before anything is computed; such an engine delivers by layer."""
    engine = make("llama", "widths=16,64", "passes=one")
    check_engine("engine", "fixed-width", engine)

    assert (engine.describe().max_prompt_tokens, engine.describe().chunk_tokens) == (64, None)
    with pytest.raises(PromptTooLong, match=r"65.*64"):
        run(engine, make_prompt(65))


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("widths=", "at least one width"),
        ("widths=64,16", "must ascend"),
        ("layer_group=0", "whole number within"),
        ("passes=two", "must be one of many, one"),
        ("width=16", "no such option; there are: widths, layer_group, passes"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(option: str, problem: str) -> None:
    """Before a model is loaded."""
    with pytest.raises(ConfigError, match=problem):
        make_engine(make_setup("no such folder", (option,)))


def test_the_widths_decide_the_bits_and_the_numerics_say_so() -> None:
    """Two services with other widths do not take each other for the same."""
    one, other = make("llama", "widths=16,64"), make("llama", "widths=64")

    assert one.describe().numerics != other.describe().numerics
    check: Callable[[str, str, object], None] = check_engine
    check("engine", "fixed-width", one)
