"""`kvspan generate` sends what was typed and prints what comes back."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.errors import ConfigError, QueueFull
from kvspan import cli
from kvspan.commands.command import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from kvspan.commands.generate import generate as command
from kvspan.commands.generate import make_options, make_prompt
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
        servicer, "Hi", "--chat", "--max-new-tokens=5", "--temperature=0.5", "--top-k=7", "--top-p=0.75",
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
        )
    ]  # fmt: skip


async def test_refusal_is_one_line_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """A status that is not OK goes to stderr with code, reason and message, after what had come."""

    async def refuse(request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(text="Hel")
        raise QueueFull(7)

    code = await generate(ScriptedDecode(refuse), "Hi")

    captured = capsys.readouterr()
    assert code == EXIT_FAILED
    assert captured.out == "Hel\n"
    assert captured.err.startswith("kvspan: RESOURCE_EXHAUSTED: QUEUE_FULL: ")
    assert "try again in" in captured.err


def test_nobody_at_the_target_is_a_failure(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A service that is not there is reported like any other failure."""
    folder = tmp_path_factory.mktemp("s")

    assert cli.main(["generate", "Hi", f"--target=unix:{folder}/none"]) == EXIT_FAILED


def test_prompt_is_text_chat_or_token_ids() -> None:
    """The three forms of a prompt each have their flag; a dash reads stdin."""
    stdin = io.StringIO("from stdin")

    assert make_prompt(parse("Hi"), stdin.read) == {"prompt": "Hi"}
    assert make_prompt(parse("--token-ids=3,1,2"), stdin.read) == {"token_ids": (3, 1, 2)}
    assert make_prompt(parse("-", "--chat"), stdin.read) == {
        "messages": [{"role": "user", "content": "from stdin"}]
    }


@pytest.mark.parametrize("line", [[], ["Hi", "--token-ids=1"], ["--token-ids=1", "--chat"]])
def test_request_has_exactly_one_prompt(line: list[str]) -> None:
    """None, two, or a conversation of token ids are refused."""
    with pytest.raises(ConfigError):
        make_prompt(parse(*line), io.StringIO().read)


def options(*line: str) -> dict[str, Any]:
    """Return the options of a request that a command line makes."""
    given = parse("Hi", *line)
    make_prompt(given, io.StringIO().read)
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
        ("--token-ids=1", "PROMPT=Hi: give either"),
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
