"""Tests of common/model/loader.py."""

import json
import socket
from pathlib import Path

import pytest
import torch
from transformers import Qwen3NextConfig

from common.errors import ConfigError, InvariantViolation, UnsupportedModel
from common.kv.geometry import DType
from common.model import loader
from common.model.folder.source import TinyFamily
from common.model.loader import load_model, read_text_model, resolve_dtype
from common.model.progress import shown_progress
from common.model.tiny import EOS_ID, make_byte_tokenizer, make_tiny, tiny_config
from tests.support.cases import save_model, uneven_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of the tiny Llama with another seed than the built-in one."""
    with shown_progress(False):
        make_tiny(tiny_config(TinyFamily.LLAMA), 5, torch.float32).save_pretrained(tmp_path)
    make_byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_folder_is_loaded_with_all_that_is_known_about_it(folder: Path) -> None:
    """One call gives weights, tokenizer, geometry, fingerprint and limits of a checkpoint."""
    loaded = load_model(str(folder), "bfloat16", progress=False)

    assert (loaded.name, loaded.dtype, loaded.max_context) == (folder.name, DType.BFLOAT16, 8192)
    assert loaded.eos_ids == (EOS_ID,)
    assert loaded.geometry.groups[0].layer_indices == (0, 1, 2, 3, 4)
    assert not loaded.model.training
    assert {(p.dtype, p.requires_grad) for p in loaded.model.parameters()} == {(torch.bfloat16, False)}


def test_same_content_has_the_same_fingerprint_from_memory_and_folder(tmp_path: Path) -> None:
    """A tiny model and a checkpoint saved from it are one model."""
    tiny = load_model("tiny:gemma3", "float32", progress=False)
    with shown_progress(False):
        tiny.model.save_pretrained(tmp_path)
    make_byte_tokenizer().save_pretrained(tmp_path)

    saved = load_model(str(tmp_path), "float32", progress=False)

    assert saved.fingerprint == tiny.fingerprint
    assert saved.config_fields == tiny.config_fields
    assert saved.geometry == tiny.geometry


def test_heads_of_different_size_are_no_problem(tmp_path: Path) -> None:
    """Such a config raises when it is asked for the one size of all its layers."""
    with shown_progress(False):
        save_model(uneven_config(), tmp_path)

    loaded = load_model(str(tmp_path), "float32", progress=False)

    assert [group.head_dim for group in loaded.geometry.groups] == [16, 24]


def test_several_end_tokens_are_all_known(folder: Path) -> None:
    """The end tokens of the generation config and of the tokenizer both end a sequence."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 4]}))

    loaded = load_model(str(folder), "float32", progress=False)

    assert loaded.eos_ids == (4, 9, EOS_ID)


def test_what_is_not_obeyed_is_noted(folder: Path) -> None:
    """Sampling defaults and end tokens that the folder has and no request gets."""
    declared = {"do_sample": True, "top_k": 20, "eos_token_id": [EOS_ID, 4000]}
    (folder / "generation_config.json").write_text(json.dumps(declared))

    notes = load_model(str(folder), "float32", progress=False).notes

    assert [note.partition(": ")[2] for note in notes] == [
        "the model has 259 rows",
        "do_sample=True, top_k=20",
    ]
    assert load_model("tiny:llama", "float32", progress=False).notes == ()


def test_key_that_nobody_reads_is_named_once(folder: Path) -> None:
    """A typing error changes nothing, and the log says so; positions have keys of their own."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_scalling": {"factor": 4}, "rope_interleaved": False, "is_decoder": True, "_note": 1}
    config |= {"temperature": 0.7, "top_k": 50}
    config["rope_parameters"]["faktor"] = 2.0
    (folder / "config.json").write_text(json.dumps(config))

    loaded = load_model(str(folder), "float32", progress=False)

    assert loaded.notes == ("config.json: nobody reads rope_scalling, temperature, rope_parameters.faktor",)


def test_recurrent_model_is_refused_before_its_weights_are_looked_for(tmp_path: Path) -> None:
    """The config alone is enough to refuse: the folder holds no weights and no tokenizer."""
    Qwen3NextConfig(num_hidden_layers=4).save_pretrained(tmp_path)

    with pytest.raises(UnsupportedModel, match=f"={tmp_path}: model type qwen3_next: .*0:linear_attention"):
        load_model(str(tmp_path), "float32", progress=False)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b'{"model_type": "no-such-type"}'),
        ("config.json", b'{"model_type": "llama", "num_attention_heads": "x"}'),
        ("config.json", b'{"model_type": "llama", "hidden_size": 0}'),
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"[]"),
        ("tokenizer.json", b""),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b'{"version": "1.0", "model": {"type": "BPE"}}'),
        ("tokenizer_config.json", b"[]"),
        ("model.safetensors", b"no tensors"),
        ("model.safetensors", b""),
        ("config.json", b'{"model_type": "llama", "quantization_config": {"x": 1}}'),
        ("generation_config.json", b'{"eos_token_id": "x"}'),
        ("generation_config.json", b"{"),
        ("generation_config.json", b""),
        ("generation_config.json", b'{"pad_token_id": [1]}'),
        ("special_tokens_map.json", b"3"),
    ],
)
def test_broken_file_is_a_config_error_whatever_a_library_raises(
    folder: Path, name: str, content: bytes
) -> None:
    """No traceback: the folder is named, the file where one can be blamed, and what the library said."""
    (folder / name).write_bytes(content)

    with pytest.raises(ConfigError) as caught:
        load_model(str(folder), "float32", progress=False)

    assert caught.value.field == "model"
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("error", [InvariantViolation("ours"), KeyboardInterrupt()])
def test_what_is_no_fault_of_a_folder_is_not_blamed_on_it(
    folder: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug of ours and Ctrl-C stay what they are."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(loader, "describe", fail)

    with pytest.raises(type(error)):
        load_model(str(folder), "float32", progress=False)


def test_nothing_is_asked_from_the_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a folder opens no connection."""

    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)

    assert load_model(str(folder), "float32", progress=False).name == folder.name


def test_progress_setting_of_the_library_is_put_back(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The bar is shown on stderr only when asked for."""
    load_model(str(folder), "float32", progress=False)
    quiet = capfd.readouterr().err
    load_model(str(folder), "float32", progress=True)

    assert "Loading weights" not in quiet
    assert "Loading weights" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fpu avx512_bf16 sse", True), ("fpu amx_bf16", True), ("fpu avx512f avx2", False)],
)
def test_auto_needs_an_instruction_for_bfloat16(tmp_path: Path, flags: str, expected: bool) -> None:
    """A processor computes in bfloat16 when one of its flags says so."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"model name\t: avx512_bf16 lookalike\nflags\t\t: {flags}\n")

    assert loader._cpu_has_bf16(cpuinfo) is expected


def test_dtype_is_the_one_named_or_the_processor_s() -> None:
    """A named dtype is taken as it is, `auto` is one of two, and anything else is refused with the list."""
    assert resolve_dtype("float16") is DType.FLOAT16
    assert resolve_dtype("auto") in (DType.BFLOAT16, DType.FLOAT32)
    with pytest.raises(ConfigError, match="auto, bfloat16, float16, float32"):
        resolve_dtype("int8")


@pytest.mark.parametrize("generation", [None, '{"top_k": 20, "eos_token_id": [9, 258]}'])
def test_what_needs_no_weights_is_read_alike_without_them(tmp_path: Path, generation: str | None) -> None:
    """A backend that loads weights in a way of its own gets the name, ends, limits and notes of any other."""
    load_model("tiny:llama", "float32", progress=False).model.save_pretrained(tmp_path)
    make_byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(generation)

    text, loaded = (
        read_text_model(str(tmp_path), progress=False),
        load_model(str(tmp_path), "float32", progress=False),
    )

    assert (text.name, text.eos_ids, text.vocab_size) == (
        loaded.name,
        loaded.eos_ids,
        loaded.geometry.vocab_size,
    )
    assert (text.max_context, text.max_stretched) == (loaded.max_context, loaded.max_stretched)
    assert text.notes == loaded.notes
    assert text.tokenizer.decode([72, 105]) == loaded.tokenizer.decode([72, 105]) == "Hi"


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_a_tiny_model_is_read_alike_without_its_weights(family: str) -> None:
    """Its ends are those of its config."""
    text, loaded = (
        read_text_model(f"tiny:{family}", progress=False),
        load_model(f"tiny:{family}", "float32", progress=False),
    )

    assert (text.name, text.eos_ids, text.max_context, text.notes) == (
        loaded.name,
        loaded.eos_ids,
        loaded.max_context,
        loaded.notes,
    )
