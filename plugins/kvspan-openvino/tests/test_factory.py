"""Tests of kvspan_openvino/factory.py, convert.py and runtime.py: what is made, kept and refused."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kvspan_openvino import artefact, runtime
from kvspan_openvino.convert import Order, check, convert
from kvspan_openvino.engine import OpenVinoEngine
from kvspan_openvino.factory import STRETCH_MARGIN, create_engine, longest_step_ms
from kvspan_openvino.runtime import Device

from common.engine.checks import check_engine
from common.engine.registry import ENGINE_GROUP, Kind, find
from common.engine.setup import EngineSetup
from common.errors import ConfigError, UnsupportedModel
from common.kv.geometry import DType
from common.kv.ranges import Range
from common.model.folder.source import TinyFamily
from common.model.kv_reference import KVReference
from common.model.loader import load_model
from common.model.tiny import make_byte_tokenizer, make_tiny, tiny_config
from common.session.identity import Origin
from kvspan.conformance import ENGINE_CHECKS, EngineSubject

MakeSetup = Callable[..., EngineSetup]
EngineOf = Callable[[str], OpenVinoEngine]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a tiny model as a folder of Hugging Face."""
    loaded = load_model("tiny:llama", "float32", False)
    loaded.model.save_pretrained(tmp_path / "small")
    loaded.tokenizer.pretrained.save_pretrained(tmp_path / "small")
    return tmp_path / "small"


def test_the_entry_point_is_found() -> None:
    """`--engine openvino` is all that it takes."""
    kind: Kind[EngineSetup, object] = Kind("engine", ENGINE_GROUP, {})

    assert find(kind, "openvino") is create_engine


def test_an_engine_says_what_it_imposes(engine_of: EngineOf) -> None:
    """Widths, the layers that leave together, the longest part, and all that decides its bits."""
    engine = engine_of("tiny:llama")
    described = engine.describe()

    check_engine("engine", "openvino", engine)
    assert (described.chunk_tokens, described.widths, described.layer_stops) == (None, (32, 64), (2,))
    assert described.max_prompt_tokens == 64
    assert described.longest_step_ms > 0
    version, *others = described.numerics
    assert version.startswith("openvino 2026.")
    assert others == ["device CPU", "precision f32", "widths 32,64", "parts 2"]


def test_an_identity_is_declared_and_that_of_the_checkpoint(engine_of: EngineOf) -> None:
    """Digests and fields are those that a service has which loaded it; the KV is in float32."""
    loaded, identity = load_model("tiny:gemma3", "bfloat16", False), engine_of("tiny:gemma3").identity()

    assert identity.origin is Origin.DECLARED
    assert identity.fingerprint.rounded_weights == loaded.fingerprint.rounded_weights
    assert identity.fingerprint.config == loaded.fingerprint.config
    assert identity.tokenizer_fields == loaded.tokenizer_fields
    assert {layer.dtype for layer in identity.geometry.layers} == {DType.FLOAT32}
    windows = [layer.window for layer in loaded.geometry.layers]
    assert [layer.window for layer in identity.geometry.layers] == windows


def test_a_precision_that_is_emulated_is_warned_of(
    make_setup: MakeSetup, caplog: pytest.LogCaptureFixture
) -> None:
    """A processor without its instructions computes in bfloat16 all the same, very slowly."""
    with caplog.at_level(logging.WARNING):
        engine = create_engine(make_setup("tiny:llama", "widths=32", "parts=2", "precision=bf16"))

    assert engine.describe().numerics[2] == "precision bf16"
    assert ("precision_emulated" in caplog.text) == Device("CPU", "bf16", 1).emulates


def test_a_device_that_computes_otherwise_than_it_was_told_is_refused(make_setup: MakeSetup) -> None:
    """What the numerics say would not be true; a processor that has float16 takes it."""
    setup = make_setup("tiny:llama", "widths=32", "parts=2", "precision=f16")
    if not Device("CPU", "f16", 1).emulates:
        assert create_engine(setup).describe().numerics[2] == "precision f16"
        return

    with pytest.raises(ConfigError, match="precision=f16: device CPU computes in f32"):
        create_engine(setup)


def test_a_model_that_cannot_be_written_is_an_error_of_the_disk(tmp_path: Path) -> None:
    """OpenVINO says it in words of its own; whoever keeps models blames the cache for it."""
    (tmp_path / "file").touch()
    module = torch.nn.Linear(2, 2)

    with pytest.raises(OSError, match=r"part-0\.xml"):
        runtime.convert(module, (torch.zeros(1, 2),), [[1, 2]], tmp_path / "file" / "part-0.xml")


def test_the_longest_part_is_said_with_room(engine_of: EngineOf) -> None:
    """The slowest of the largest width counts, times a margin, in whole milliseconds upwards."""

    class Timed:
        def part_times(self) -> list[float]:
            return [0.002, 0.0301, 0.004]

    passes: list[Any] = [None, Timed()]

    assert longest_step_ms(passes) == int(STRETCH_MARGIN * 30.1) + 1


def test_a_second_start_loads_neither_torch_nor_transformers(folder: Path, make_setup: MakeSetup) -> None:
    """What was converted from a folder is found by its files alone, in another process too."""
    create_engine(make_setup(str(folder), "widths=32", "parts=2"))
    code = f"""
import sys
from common.engine.options import Options
from common.engine.setup import EngineSetup
from kvspan_openvino.factory import create_engine
options = Options("engine_option", ("widths=16,48", "parts=2"))
engine = create_engine(EngineSetup({str(folder)!r}, "auto", 1, 64, 900, 0, options, False))
loaded = {{name for name, module in sys.modules.items() if module is not None}}
print(engine.describe().widths, loaded & {{"torch", "transformers", "openvino_telemetry"}})
"""

    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert done.stdout == "(16, 48) set()\n"
    assert "converting" not in done.stderr


def test_a_damaged_model_is_converted_again(
    folder: Path, make_setup: MakeSetup, kvspan_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the folder and the file, and the engine is as before."""
    before = {path.name for path in kvspan_cache.iterdir()}
    create_engine(make_setup(str(folder), "widths=32", "parts=1"))
    (made,) = [path for path in kvspan_cache.iterdir() if path.name not in before]
    weights = made / "part-0.bin"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    with caplog.at_level(logging.WARNING):
        create_engine(make_setup(str(folder), "widths=32", "parts=1"))

    assert weights.read_bytes() == content
    assert f"folder={made} problem=part-0.bin is not what was written" in caplog.text


def test_another_checkpoint_is_converted_anew(folder: Path, make_setup: MakeSetup) -> None:
    """One weight more or less is another model, in the same place."""
    first = create_engine(make_setup(str(folder), "widths=32", "parts=1")).identity()
    other = load_model("tiny:llama", "float32", False).model
    other.lm_head.weight[0, 0] += 1
    other.save_pretrained(folder)

    second = create_engine(make_setup(str(folder), "widths=32", "parts=1")).identity()

    assert first.fingerprint.weights != second.fingerprint.weights


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("device=XPU",), r"device=XPU: is no device of this host; there are: .*CPU"),
        (("parts=6",), r"parts=6: the model has 5 layers"),
        (("widths=16384",), r"widths=16384: .* reach 8192 at most"),
        (("speed=9",), r"no such option; there are: widths, parts, device, precision"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    make_setup: MakeSetup, options: tuple[str, ...], words: str
) -> None:
    """Before anything is served, with what there is."""
    with pytest.raises(ConfigError, match=words):
        create_engine(make_setup("tiny:llama", *options))


def test_a_context_beyond_the_positions_is_refused(make_setup: MakeSetup) -> None:
    """As every engine refuses it."""
    with pytest.raises(ConfigError, match=r"max_context_tokens=9000: .* reach 8192 at most"):
        create_engine(make_setup("tiny:llama", "widths=32", "parts=2", max_context=9000))


@pytest.mark.parametrize(("limits", "longest"), [((20, 0), 20), ((900, 24), 24), ((900, 0), 32)])
def test_the_longest_prompt_is_the_least_of_all_limits(
    make_setup: MakeSetup, limits: tuple[int, int], longest: int
) -> None:
    """What the service wants, what the context holds, and the largest width."""
    wanted, context = limits
    setup = make_setup("tiny:llama", "widths=32", "parts=2", max_prompt_tokens=wanted, max_context=context)

    assert create_engine(setup).describe().max_prompt_tokens == longest


def test_a_family_that_is_not_known_is_refused(tmp_path: Path) -> None:
    """Its layers may be called otherwise; those that are known are named."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=259, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    load_model("tiny:llama", "float32", False).tokenizer.pretrained.save_pretrained(tmp_path / "model")
    (tmp_path / "converted").mkdir()

    with pytest.raises(
        UnsupportedModel, match="qwen2: the OpenVINO engine converts llama, qwen3, gemma3_text"
    ):
        convert(Order(str(tmp_path / "model"), 1, {}, False), tmp_path / "converted")


def test_windows_are_those_of_the_geometry(tmp_path: Path, make_setup: MakeSetup) -> None:
    """Other families than Gemma may have windowed layers; the prompts are longer than a window."""
    config = tiny_config(TinyFamily.QWEN3)
    config.layer_types = ["sliding_attention", "full_attention"] * 2
    config.use_sliding_window, config.sliding_window = True, 8
    make_tiny(config, 3, torch.float32).save_pretrained(tmp_path)
    make_byte_tokenizer().save_pretrained(tmp_path)
    subject = EngineSubject(
        create_engine(make_setup(str(tmp_path), "widths=48", "parts=2")), KVReference(str(tmp_path))
    )

    assert [layer.window for layer in subject.identity.geometry.layers] == [8, None, 8, None]
    next(check for check in ENGINE_CHECKS if check.name == "reference").run(subject)


def test_a_conversion_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    """It is compared with transformers before it is kept: here with a model of another weight."""
    convert(Order("tiny:llama", 2, {}, False), tmp_path)
    other = load_model("tiny:llama", "float32", False)
    other.model.model.layers[3].self_attn.k_proj.weight[0] *= 1.01

    with pytest.raises(UnsupportedModel, match=r"converted, layer 3 differs by .*, rounding alone by"):
        check(other, tmp_path, [Range(0, 2), Range(2, 5)], artefact.read(tmp_path, {}))


def test_a_bar_is_shown_to_who_watches_only(
    make_setup: MakeSetup, capsys: pytest.CaptureFixture[str]
) -> None:
    """On stderr; a log stays a log."""
    quiet = make_setup("tiny:llama", "widths=32", "parts=2")
    create_engine(quiet)
    silent = capsys.readouterr()
    create_engine(replace(make_setup("tiny:llama", "widths=32", "parts=2"), show_progress=True))
    shown = capsys.readouterr()

    assert (silent.out, silent.err, shown.out) == ("", "", "")
    assert "compiling for OpenVINO" in shown.err
