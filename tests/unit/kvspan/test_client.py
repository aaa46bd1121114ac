"""Both clients ask the same and fail the same."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from math import inf, nan
from typing import Any

import grpc
import pytest

import kvspan
from common import errors
from kvspan.client import make_completion, make_request
from kvspan.v1 import decode_pb2 as pb
from kvspan.v1 import geometry_pb2
from tests.support.wire import Context, ScriptedDecode, answer_hello, serving


async def fail_after_one(request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
    """Yield one message and lose the peer."""
    yield pb.GenerateResponse(token_ids=[4], text="Hel")
    raise errors.PeerLost("the session ended")


async def test_async_client_yields_the_messages_of_the_service() -> None:
    """Pieces arrive in order, the last one with its usage."""
    async with serving(ScriptedDecode(answer_hello)) as (_, address), kvspan.AsyncClient(address) as client:
        responses = [response async for response in client.generate("x", max_new_tokens=3)]

    assert [(list(r.token_ids), r.text) for r in responses] == [([4], "Hel"), ([6, 7], "lo")]
    assert responses[-1].usage.prompt_tokens == 3


async def test_completion_is_the_whole_answer() -> None:
    """Text and tokens of all pieces, and why the answer ended."""

    def ask(target: str) -> kvspan.Completion:
        with kvspan.Client(target) as client:
            return client.complete(token_ids=[5, 9])

    async with serving(ScriptedDecode(answer_hello)) as (_, address), kvspan.AsyncClient(address) as client:
        completion = await client.complete(token_ids=[5, 9])
        blocking = await asyncio.to_thread(ask, address)

    assert (completion.text, completion.token_ids) == ("Hello", (4, 6, 7))
    assert (completion.finish_reason, completion.request_id) == ("stop", "r-1")
    assert blocking == completion


def test_completion_is_refused_when_the_answer_does_not_end() -> None:
    """A stream that ends without a reason is never passed off as a whole answer."""
    with pytest.raises(errors.RemoteProtocolError, match="finish reason"):
        make_completion([pb.GenerateResponse(text="Hel")])


async def test_async_client_raises_the_reason_when_the_service_fails() -> None:
    """A failure in the middle reaches the caller with code, reason and facts; never a short answer."""
    async with serving(ScriptedDecode(fail_after_one)) as (_, address), kvspan.AsyncClient(address) as client:
        with pytest.raises(kvspan.RemoteFailure) as caught:
            await client.complete("x")

    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, "PREFILL_PEER_LOST")
    assert caught.value.metadata == {"problem": "the session ended"}
    assert caught.value.retryable


async def test_request_ends_at_the_service_when_the_caller_leaves_the_loop() -> None:
    """A closed iterator cancels, so that the service frees what the request holds."""
    ended = asyncio.Event()

    async def generate(request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        try:
            yield pb.GenerateResponse(text="x")
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with serving(ScriptedDecode(generate)) as (_, address), kvspan.AsyncClient(address) as client:
        responses = client.generate("x")
        await anext(responses)
        await responses.aclose()
        async with asyncio.timeout(30):
            await ended.wait()


async def test_time_limit_is_a_deadline_of_the_call() -> None:
    """The service sees the limit of the caller and is ended by it."""

    async def generate(request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(text="x")
        await asyncio.Event().wait()

    async with serving(ScriptedDecode(generate)) as (_, address), kvspan.AsyncClient(address) as client:
        with pytest.raises(kvspan.RemoteFailure) as caught:
            await client.complete("x", time_limit_s=0.2)

    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_both_clients_ask_for_capabilities_and_status() -> None:
    """The questions of an operator are methods."""

    def ask(target: str) -> tuple[str, int]:
        with kvspan.Client(target) as client:
            return client.capabilities().boot_id, client.status().num_steps

    async with serving(ScriptedDecode(answer_hello)) as (_, address), kvspan.AsyncClient(address) as client:
        assert (await client.capabilities()).num_lanes == 5
        assert (await client.status()).num_steps == 13
        assert await asyncio.to_thread(ask, address) == ("boot-d", 13)


async def test_question_fails_when_nobody_answers() -> None:
    """A service that is down is a failure with the code of the library and no reason."""
    async with serving(ScriptedDecode(answer_hello)) as (server, address):
        await server.stop(0.0)
        async with kvspan.AsyncClient(address) as client:
            with pytest.raises(kvspan.RemoteFailure) as caught:
                await client.status()

    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, "")


def test_request_carries_every_option() -> None:
    """Options reach the field that has their name."""
    request = make_request(
        None,
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_new_tokens": 3,
            "seed": 2**63,
            "stop": "\n",
            "route": "remote",
            "transfer": "whole",
            "model": "tiny",
        },
    )

    assert [(m.role, m.content) for m in request.chat.messages] == [("user", "Hi")]
    assert request.sampling == pb.SamplingParams(max_new_tokens=3, seed=2**63, stop=["\n"])
    assert (request.route, request.transfer) == (pb.ROUTE_REMOTE, geometry_pb2.TRANSFER_MODE_WHOLE)
    assert request.model == "tiny"


def test_request_leaves_absent_what_is_none() -> None:
    """None means the default of the service, and a zero means zero."""
    request = make_request("x", {"temperature": None, "top_k": 0, "route": None})

    assert not request.sampling.HasField("temperature")
    assert request.sampling.HasField("top_k")
    assert request.route == pb.ROUTE_UNSPECIFIED


@pytest.mark.parametrize(
    ("prompt", "messages", "token_ids"),
    [(None, None, None), ("x", None, [5]), ("x", [{"role": "user", "content": "Hi"}], None)],
)
def test_request_is_refused_when_it_has_not_one_prompt(
    prompt: str | None, messages: Iterable[Mapping[str, str]] | None, token_ids: Iterable[int] | None
) -> None:
    """Two prompts would leave open which one is answered."""
    with pytest.raises(errors.InvalidRequest, match="exactly one"):
        make_request(prompt, {"messages": messages, "token_ids": token_ids})


def test_request_is_refused_with_every_option_that_cannot_be_sent() -> None:
    """All mistakes are told at once, by the name of the option."""
    options = {
        "max_new_tokens": -1,
        "temprature": 0.5,
        "route": "sideways",
        "stop_token_ids": "ab",
        "seed": 4,
    }

    with pytest.raises(errors.InvalidRequest) as caught:
        make_request("x", options)  # type: ignore[arg-type]

    assert {violation.field for violation in caught.value.violations} == {
        "max_new_tokens",
        "temprature",
        "route",
        "stop_token_ids",
    }


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"token_ids": [5, -1]}, "tokens"),
        ({"token_ids": [5.5]}, "tokens"),
        ({"token_ids": 5}, "tokens"),
        ({"messages": [{"role": "user", "text": "Hi"}]}, "chat"),
        ({"messages": [{"role": "user", "content": "\udcff"}]}, "chat"),
        ({"messages": "Hi"}, "chat"),
        ({"messages": [5]}, "chat"),
        ({"token_ids": [5], "route": ["auto"]}, "route"),
        ({"token_ids": [5], "stop": 5}, "stop"),
        *(
            ({"token_ids": [5], "time_limit_s": limit_s}, "time_limit_s")
            for limit_s in (0, -1, "x", 1e9, inf, nan)
        ),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(options: Any, field: str) -> None:
    """Before anything is sent, and never with an error of a library."""
    with pytest.raises(errors.InvalidRequest) as caught:
        make_request(None, options)

    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.multiprocess
def test_import_is_light_until_a_client_is_used() -> None:
    """Importing kvspan loads no grpc, and a client neither torch nor transformers."""
    code = (
        "import sys, kvspan; assert 'grpc' not in sys.modules; kvspan.Client; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )

    subprocess.run([sys.executable, "-c", code], check=True)


def test_package_has_no_other_names() -> None:
    """A misspelt name fails like in any module."""
    assert all(hasattr(kvspan, name) for name in kvspan.__all__)
    with pytest.raises(AttributeError, match="Cleint"):
        kvspan.Cleint  # noqa: B018
