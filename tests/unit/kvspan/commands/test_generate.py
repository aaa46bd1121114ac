"""`kvspan generate` sends what was typed and prints what comes back."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, QueueFull
from common.telemetry.logging import request_of_call
from common.wire.server import Server
from kvspan import cli
from kvspan.commands.command import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from kvspan.commands.generate import generate as command
from kvspan.commands.generate import make_options, make_prompt
from kvspan.commands.remote import PREFILL_SERVICE
from kvspan.v1 import decode_pb2 as pb
from kvspan.v1 import geometry_pb2
from tests.support.command_lines import parse_line
from tests.support.wire import Context, ScriptedDecode, answer_hello, serving


async def generate(servicer: ScriptedDecode, *line: str) -> int:
    """Run the command against a scripted decode service and return its exit code."""
    async with serving(servicer) as (_, address):
        return await asyncio.to_thread(cli.main, ["generate", f"--target={address}", *line])


def parse(*line: str) -> dict[str, Any]:
    """Return what a command line gives to the request."""
    given = parse_line(command, line)
    return {name: value for name, value in given.items() if name not in ("target", "as_json", "timings")}


async def test_answer_is_printed_as_text_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Pieces are joined without anything between them, and the line is ended."""
    code = await generate(ScriptedDecode(answer_hello), "Hi")

    assert code == EXIT_OK
    assert capsys.readouterr().out == "Hello\n"


async def test_json_is_one_message_a_line_in_the_names_of_the_contract(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each response is one line of proto JSON."""
    await generate(ScriptedDecode(answer_hello), "Hi", "--json")

    first, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"token_ids": [4], "text": "Hel", "request_id": "r-1"}
    assert last["finish_reason"] == "FINISH_REASON_STOP"
    assert last["usage"] == {"prompt_tokens": 3}


async def test_timings_are_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """The answer alone is on stdout."""
    await generate(ScriptedDecode(answer_hello), "Hi", "--timings")

    captured = capsys.readouterr()
    assert captured.out == "Hello\n"
    assert captured.err.count("\n") == 1
    assert "3 prompt (0 cached)" in captured.err


async def test_every_flag_reaches_the_service() -> None:
    """What was typed is what the service reads."""
    servicer = ScriptedDecode(answer_hello)

    await generate(
        servicer, "Hi", "--chat", "--literal-text",
        "--max-new-tokens=5", "--temperature=0.5", "--top-k=7", "--top-p=0.75",
        "--min-p=0.125", "--repetition-penalty=1.5", "--seed=11", "--stop=a", "--stop=b",
        "--stop-token-id=13", "--ignore-eos", "--logprobs=2", "--route=local", "--transfer=whole",
        "--request-id=r", "--model=m",
    )  # fmt: skip

    assert servicer.requests == [
        pb.GenerateRequest(
            chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Hi")]),
            sampling=pb.SamplingParams(
                max_new_tokens=5, temperature=0.5, top_k=7, top_p=0.75, min_p=0.125, repetition_penalty=1.5,
                seed=11, stop=["a", "b"], stop_token_ids=[13], ignore_eos=True, logprobs=2,
            ),
            route=pb.ROUTE_LOCAL,
            transfer=geometry_pb2.TRANSFER_MODE_WHOLE,
            request_id="r",
            model="m",
            literal_text=True,
        )
    ]  # fmt: skip


async def test_refusal_is_one_line_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """What came is printed; code, reason and message go to stderr, with the name to search the logs for."""

    async def refuse(request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        request_of_call.set("5e3a90b1-000007")
        yield pb.GenerateResponse(text="Hel")
        raise QueueFull(7)

    code = await generate(ScriptedDecode(refuse), "Hi")

    captured = capsys.readouterr()
    assert code == EXIT_FAILED
    assert captured.out == "Hel\n"
    assert captured.err.startswith("kvspan: RESOURCE_EXHAUSTED: QUEUE_FULL: ")
    assert captured.err.endswith("(request 5e3a90b1-000007) (try again in 1 s)\n")


def test_nobody_at_the_target_is_a_failure_with_a_hint(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """A service that is not there is reported like any other failure, with what to do about it."""
    target = f"unix:{tmp_path_factory.mktemp('s')}/none"

    assert cli.main(["generate", "Hi", f"--target={target}"]) == EXIT_FAILED
    assert capsys.readouterr().err.startswith(
        f"kvspan: nobody answers at {target}; start a pair with kvspan up"
    )


async def test_address_of_the_other_service_is_named_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    """Two services have two addresses, and it is easy to take the wrong one."""
    async with Server([PREFILL_SERVICE]) as server:
        address = server.listen("127.0.0.1:0")
        await server.start()
        code = await asyncio.to_thread(cli.main, ["generate", f"--target={address}", "Hi"])

    assert code == EXIT_FAILED
    assert capsys.readouterr().err.startswith(
        f"kvspan: {address} is a prefill service, which has no such call"
    )


async def test_terminal_that_lacks_characters_gets_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row Y18: an answer is printed on any terminal, without a traceback."""

    async def answer(request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(text="caf\xe9", finish_reason=pb.FINISH_REASON_STOP)

    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))

    assert await generate(ScriptedDecode(answer), "Hi") == EXIT_OK
    assert printed.getvalue() == b"caf\\xe9\n"


def test_prompt_is_text_chat_or_token_ids() -> None:
    """The three forms of a prompt each have their flag; a dash reads stdin."""
    stdin = io.StringIO("from stdin")

    assert make_prompt(parse("Hi"), stdin) == {"prompt": "Hi"}
    assert make_prompt(parse("--token-ids=3,1,2"), stdin) == {"token_ids": (3, 1, 2)}
    assert make_prompt(parse("-", "--chat"), stdin) == {
        "messages": [{"role": "user", "content": "from stdin"}]
    }


def test_a_file_or_a_pipe_gives_the_prompt(tmp_path: Path) -> None:
    """`cat FILE | kvspan generate` and `kvspan generate < FILE` mean what they say."""
    (tmp_path / "prompt").write_text("from a file")
    with (tmp_path / "prompt").open() as file:
        assert make_prompt(parse(), file) == {"prompt": "from a file"}

    reader, writer = os.pipe()
    with open(reader) as piped:
        os.write(writer, b"from a pipe")
        os.close(writer)
        assert make_prompt(parse("--chat"), piped)["messages"][0]["content"] == "from a pipe"


@pytest.mark.parametrize(("content", "said"), [(b"", "stdin is empty"), (b"\xff\xfe", "stdin is no text")])
def test_stdin_must_hold_a_text(tmp_path: Path, content: bytes, said: str) -> None:
    """Nothing, or bytes that are no text, is no prompt."""
    (tmp_path / "prompt").write_bytes(content)

    for errors in ("strict", "surrogateescape"):
        with (tmp_path / "prompt").open(errors=errors) as file, pytest.raises(ConfigError, match=said):
            make_prompt(parse("-"), file)


@pytest.mark.parametrize("line", [["h\udcff"], ["Hi", "--stop=\udcff"], ["Hi", "--model=\udcff"]])
def test_bytes_that_are_no_text_are_refused_by_flag(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """They come through from the command line as halves of characters, which no message can carry."""
    name = line[-1].partition("=")[0] if len(line) > 1 else "PROMPT"

    assert cli.main(["generate", *line]) == EXIT_USAGE
    assert capsys.readouterr().err.startswith(f"kvspan: {name}=")


@pytest.mark.parametrize("line", [[], ["Hi", "--token-ids=1"], ["--token-ids=1", "--chat"]])
def test_request_has_exactly_one_prompt(line: list[str]) -> None:
    """None, two, or a conversation of token ids are refused."""
    with pytest.raises(ConfigError):
        make_prompt(parse(*line), io.StringIO())


def options(*line: str) -> dict[str, Any]:
    """Return the options of a request that a command line makes."""
    given = parse("Hi", *line)
    make_prompt(given, io.StringIO())
    return make_options(given)


def test_options_that_were_not_given_are_left_to_the_service() -> None:
    """An absent flag is an absent field, not a default of the client."""
    assert options() == {}
    assert options("--timeout-s=2.5") == {"time_limit_s": 2.5}
    assert options("--temperature=0", "--logprobs=0") == {"temperature": 0, "logprobs": 0}


@pytest.mark.parametrize(
    ("flag", "refusal"),
    [
        ("--top-p=1.5", "Invalid value for '--top-p': 1.5 is not in the range 0<=x<=1."),
        (
            "--max-new-tokens=0",
            "Invalid value for '--max-new-tokens': 0 is not in the range 1<=x<=134217728.",
        ),
        ("--token-ids=1", "PROMPT=Hi: give one prompt"),
        (
            "--transfer=fast",
            "Invalid value for '--transfer': 'fast' is not one of 'stream', 'deferred', 'whole'.",
        ),
        (
            "--timeout-s=1e12",
            "Invalid value for '--timeout-s': 1000000000000.0 is not in the range 0<x<=604800.",
        ),
    ],
)
def test_bad_option_is_refused_by_flag(flag: str, refusal: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No call is made for a value that the service could only refuse."""
    assert cli.main(["generate", "Hi", flag]) == EXIT_USAGE
    assert capsys.readouterr().err.startswith(f"kvspan: {refusal}")
