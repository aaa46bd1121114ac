"""A client that nobody here wrote, grpcurl, drives both services over TCP and a unix socket by reflection."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.integration.conftest import LoadPair, shared_pair
from tests.support.cases import Oracle, prompt_of
from tests.support.pair import Pair, make_configs

pytestmark = pytest.mark.multiprocess

GRPCURL = Path(sys.executable).parent / "grpcurl"


@dataclass(frozen=True, slots=True)
class Answer:
    """How grpcurl ended."""

    code: int
    output: str
    error: str


async def grpcurl(address: str, *arguments: str, data: object = None) -> Answer:
    """Run grpcurl against an address, with a request as JSON."""
    target, flags = address, ["-plaintext", "-max-time", "20"]
    if address.startswith("unix:"):
        target, flags = address.removeprefix("unix:"), [*flags, "-unix"]
    if data is not None:
        flags += ["-d", json.dumps(data)]
    process = await asyncio.create_subprocess_exec(
        str(GRPCURL),
        *flags,
        target,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, error = await process.communicate()
    return Answer(process.returncode or 0, output.decode(), error.decode())


def messages(text: str) -> list[dict[str, Any]]:
    """Return the JSON messages that grpcurl printed one after another."""
    decoder, found, text = json.JSONDecoder(), [], text.strip()
    while text:
        message, end = decoder.raw_decode(text)
        found.append(message)
        text = text[end:].lstrip()
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["tcp", "unix"])
async def pair(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    checkpoints: dict[str, str],
    load: LoadPair,
) -> AsyncIterator[Pair]:
    """Return a DENSE pair on loopback ports and one on unix sockets."""
    listen = {"listen": "127.0.0.1:0"} if request.param == "tcp" else {}
    prefill, decode = make_configs(tmp_path_factory.mktemp("pair"), checkpoints["DENSE"], **listen)
    if listen:
        decode = replace(decode, prefill=(prefill.listen,))
    async with shared_pair(prefill, decode, load(prefill, decode)) as pair:
        yield pair


@pytest.mark.parametrize("service", ["DecodeService", "PrefillService"])
async def test_list_and_describe_name_the_services(pair: Pair, service: str) -> None:
    """Both services list themselves, health and reflection, and describe every method."""
    address = pair.decode_address if service == "DecodeService" else pair.prefill_address

    listed, described = await asyncio.gather(
        grpcurl(address, "list"), grpcurl(address, "describe", f"kvspan.v1.{service}")
    )

    assert listed.output.split() == sorted(
        [
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
            f"kvspan.v1.{service}",
        ]
    )
    for method in ("GetCapabilities", "Generate" if service == "DecodeService" else "Transfer"):
        assert f"rpc {method} (" in described.output


@pytest.mark.parametrize("service", ["DecodeService", "PrefillService"])
async def test_all_that_is_named_is_described(pair: Pair, service: str) -> None:
    """`describe` without a symbol describes every listed service, as it does each of their messages."""
    address = pair.decode_address if service == "DecodeService" else pair.prefill_address

    listed, described = await asyncio.gather(grpcurl(address, "list"), grpcurl(address, "describe"))
    named = re.findall(r"\( (?:stream )?\.([\w.]+) \)", described.output)
    answers = await asyncio.gather(*(grpcurl(address, "describe", name) for name in named))

    assert (described.code, described.error) == (0, "")
    assert re.findall(r"^(\S+) is a service:", described.output, re.MULTILINE) == listed.output.split()
    assert {answer.code for answer in answers} == {0}


@pytest.mark.parametrize("service", ["DecodeService", "PrefillService"])
async def test_unary_calls_answer_what_they_are(pair: Pair, service: str) -> None:
    """Capabilities and health of each service can be read without any stub."""
    address = pair.decode_address if service == "DecodeService" else pair.prefill_address

    told, health = await asyncio.gather(
        grpcurl(address, f"kvspan.v1.{service}/GetCapabilities"),
        grpcurl(address, "grpc.health.v1.Health/Check", data={"service": f"kvspan.v1.{service}"}),
    )

    (capabilities,) = messages(told.output)
    assert capabilities["versions"] == {"minimum": 3, "maximum": 3}
    assert len(capabilities["identity"]["geometry"]["layers"]) == 4
    assert messages(health.output) == [{"status": "SERVING"}]


async def test_status_shows_the_open_session(pair: Pair) -> None:
    """An operator sees the peer, the groups and the counts of decode."""
    (status,) = messages((await grpcurl(pair.decode_address, "kvspan.v1.DecodeService/GetStatus")).output)

    assert status["peers"][0]["state"] == "SESSION_STATE_OPEN"
    assert status["peers"][0]["target"] == pair.decode.peers[0].target
    assert status["lanes_total"] == 8
    assert len(status["groups"]) == 1


async def test_status_of_prefill_shows_the_session_and_what_it_did(pair: Pair) -> None:
    """An operator sees the decode service, and that the engine is idle."""
    before = await pair.client.status()
    await pair.ask([1, 2, 3], 1, route="remote")

    told = await grpcurl(pair.prefill_address, "kvspan.v1.PrefillService/GetStatus")

    (status,) = messages(told.output)
    (session,) = status["sessions"]
    assert (session["state"], session["peer_boot_id"]) == ("PREFILL_SESSION_STATE_OPEN", before.boot_id)
    assert status["totals"]["done"] == status["totals"]["accepted"]
    assert "running" not in status


async def test_generate_streams_tokens_and_ends_with_usage(
    pair: Pair, oracles: Callable[[str], Oracle]
) -> None:
    """Generate streams the tokens of ORACLE; the last message has reason, usage and timings."""
    prompt = prompt_of(100)
    request = {"tokens": {"token_ids": prompt}, "sampling": {"maxNewTokens": 5, "ignoreEos": True}}

    answer = await grpcurl(pair.decode_address, "kvspan.v1.DecodeService/Generate", data=request)

    streamed = messages(answer.output)
    tokens = tuple(token for message in streamed for token in message.get("token_ids", ()))
    assert tokens == oracles("DENSE").generate(prompt, 5)
    assert streamed[-1]["finish_reason"] == "FINISH_REASON_LENGTH"
    assert streamed[-1]["usage"] == {"prompt_tokens": 100, "generated_tokens": 5}
    assert streamed[-1]["timings"]["route"] == "ROUTE_REMOTE"


async def test_an_error_has_code_and_details(pair: Pair) -> None:
    """A request that is wrong gives a code and details that grpcurl can decode: reason and field."""
    request = {"tokens": {"token_ids": [5000]}, "sampling": {"maxNewTokens": 5}}

    answer = await grpcurl(pair.decode_address, "kvspan.v1.DecodeService/Generate", data=request)

    assert answer.code != 0
    assert "Code: InvalidArgument" in answer.error
    assert "tokens.token_ids" in answer.error
