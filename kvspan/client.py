"""Ask a decode service for completions from Python, blocking or with asyncio.

    with kvspan.Client("127.0.0.1:50061") as client:
        for response in client.generate("The sea is", max_new_tokens=8, seed=7):
            print(response.text, end="")

    async with kvspan.AsyncClient("unix:/run/kvspan/decode.sock") as client:
        completion = await client.complete(messages=[{"role": "user", "content": "Hello"}])

Theory of operation: both clients have the same methods and build the same request. `generate` yields the
messages of the service as they come; the last one carries finish_reason, usage and timings. Leaving the
loop early, or closing the iterator, cancels the request at the service.

A call that does not end with OK raises `RemoteFailure` with `code` (grpc.StatusCode), `reason`, `metadata`,
`violations` and `retry_after_s`. A request that cannot be sent raises `InvalidRequest`, an address that is
none `ConfigError`.
"""

from __future__ import annotations

import operator
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypedDict, TypeVar, Unpack

from common.errors import InvalidRequest, RemoteProtocolError, Violation
from common.settings import LONGEST_S
from common.wire.channel import make_channel, make_sync_channel
from common.wire.decoding import require_readable
from common.wire.failure import remote_failures
from kvspan.v1 import decode_pb2 as pb
from kvspan.v1 import geometry_pb2
from kvspan.v1.decode_pb2_grpc import DecodeServiceStub

CALL_TIME_LIMIT_S = 10.0
"""Of calls that only ask; they need no model."""

ROUTES = {"auto": pb.ROUTE_AUTO, "remote": pb.ROUTE_REMOTE, "local": pb.ROUTE_LOCAL}

TRANSFERS = {
    "stream": geometry_pb2.TRANSFER_MODE_STREAM,
    "deferred": geometry_pb2.TRANSFER_MODE_DEFERRED,
    "whole": geometry_pb2.TRANSFER_MODE_WHOLE,
}

Parameters = TypeVar("Parameters", pb.GenerateRequest, pb.SamplingParams)

FINISH_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


class Options(TypedDict, total=False):
    """Everything of a request but a prompt that is text; what is absent or None is the service's choice."""

    messages: Iterable[Mapping[str, str]] | None
    """A conversation, `role` and `content` each."""

    token_ids: Iterable[int] | None

    literal_text: bool | None
    """Special tokens that are written out in the prompt are ordinary text; for a prompt that is text."""

    max_new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    logprobs: int | None
    route: Literal["auto", "remote", "local"] | None
    transfer: Literal["stream", "deferred", "whole"] | None
    request_id: str | None
    model: str | None
    time_limit_s: float | None
    """Above 0 and at most a week; also the deadline of the call."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    """`stop` or `length`."""

    usage: pb.Usage
    timings: pb.Timings
    logprobs: tuple[pb.PositionLogprobs, ...]
    """One entry per token when asked for."""

    request_id: str
    """Name of the request in the logs of both services."""

    prefill_engine: pb.PrefillEngine
    """What computed the prompt."""


class Client:
    """A decode service, called from ordinary code. Closed by `close` or as a context manager."""

    def __init__(self, target: str) -> None:
        self._channel = make_sync_channel(target)
        self._stub: Any = DecodeServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End running requests and the connection."""
        self._channel.close()

    def generate(
        self, prompt: str | None = None, **options: Unpack[Options]
    ) -> Generator[pb.GenerateResponse, None, None]:
        """Yield the answer to a text, a conversation or token ids, piece by piece.

        Raises: `InvalidRequest` at once, `RemoteFailure` while iterating.
        """
        request = make_request(prompt, options)
        return self._responses(request, options.get("time_limit_s"))

    def complete(self, prompt: str | None = None, **options: Unpack[Options]) -> Completion:
        """Return the whole answer. Raises as `generate` does."""
        return make_completion(list(self.generate(prompt, **options)))

    def capabilities(self) -> pb.DecodeServiceGetCapabilitiesResponse:
        """Return what the service is and can."""
        request = pb.DecodeServiceGetCapabilitiesRequest()
        answer: pb.DecodeServiceGetCapabilitiesResponse = self._ask(self._stub.GetCapabilities, request)
        return answer

    def status(self) -> pb.GetStatusResponse:
        """Return what the service is doing now."""
        answer: pb.GetStatusResponse = self._ask(self._stub.GetStatus, pb.GetStatusRequest())
        return answer

    def _responses(
        self, request: pb.GenerateRequest, time_limit_s: float | None
    ) -> Generator[pb.GenerateResponse, None, None]:
        call = self._stub.Generate(request, timeout=time_limit_s)
        try:
            with remote_failures():
                yield from call
        finally:
            call.cancel()

    def _ask(self, method: Any, request: object) -> Any:
        with remote_failures():
            return method(request, timeout=CALL_TIME_LIMIT_S)


class AsyncClient:
    """A decode service, called from a coroutine. Belongs to one event loop."""

    def __init__(self, target: str) -> None:
        self._channel = make_channel(target)
        self._stub: Any = DecodeServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End running requests and the connection."""
        await self._channel.close()

    def generate(
        self, prompt: str | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Yield the answer to a text, a conversation or token ids, piece by piece.

        Raises: `InvalidRequest` at once, `RemoteFailure` while iterating.
        """
        request = make_request(prompt, options)
        return self._responses(request, options.get("time_limit_s"))

    async def complete(self, prompt: str | None = None, **options: Unpack[Options]) -> Completion:
        """Return the whole answer. Raises as `generate` does."""
        return make_completion([response async for response in self.generate(prompt, **options)])

    async def capabilities(self) -> pb.DecodeServiceGetCapabilitiesResponse:
        """Return what the service is and can."""
        request = pb.DecodeServiceGetCapabilitiesRequest()
        answer: pb.DecodeServiceGetCapabilitiesResponse = await self._ask(self._stub.GetCapabilities, request)
        return answer

    async def status(self) -> pb.GetStatusResponse:
        """Return what the service is doing now."""
        answer: pb.GetStatusResponse = await self._ask(self._stub.GetStatus, pb.GetStatusRequest())
        return answer

    async def _responses(
        self, request: pb.GenerateRequest, time_limit_s: float | None
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        call = self._stub.Generate(request, timeout=time_limit_s)
        try:
            with remote_failures():
                async for response in call:
                    yield require_readable(response)
        finally:
            call.cancel()

    async def _ask(self, method: Any, request: object) -> Any:
        with remote_failures():
            return require_readable(await method(request, timeout=CALL_TIME_LIMIT_S))


def make_request(prompt: str | None, options: Options) -> pb.GenerateRequest:
    """Return the request for exactly one prompt.

    Raises: `InvalidRequest` that lists every argument that cannot be sent.
    """
    violations: list[Violation] = []
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    _check_time_limit(given.pop("time_limit_s", None), violations)
    messages, token_ids = given.pop("messages", None), given.pop("token_ids", None)
    if sum(source is not None for source in (prompt, messages, token_ids)) != 1:
        violations.append(Violation("prompt", "give exactly one of prompt, messages and token_ids"))
    fields: dict[str, Any] = {
        "route": _choice("route", given.pop("route", None), ROUTES, violations),
        "transfer": _choice("transfer", given.pop("transfer", None), TRANSFERS, violations),
        "request_id": given.pop("request_id", ""),
        "model": given.pop("model", ""),
        "literal_text": given.pop("literal_text", False),
        "sampling": _sampling(given, violations),
    }
    if prompt is not None:
        fields["text"] = prompt
    if messages is not None:
        fields["chat"] = {"messages": _each("chat", dict, messages, violations)}
    if token_ids is not None:
        fields["tokens"] = {"token_ids": _each("tokens", operator.index, token_ids, violations)}
    request = pb.GenerateRequest()
    for name, value in fields.items():
        _merge(request, name, value, violations)
    if violations:
        raise InvalidRequest(violations)
    return request


def make_completion(responses: Sequence[pb.GenerateResponse]) -> Completion:
    """Return the answer that the responses of one call make up.

    Raises: `RemoteProtocolError` when the last one does not say why the answer ended.
    """
    if not responses or responses[-1].finish_reason not in FINISH_REASONS:
        raise RemoteProtocolError("an answer must end with a finish reason")
    first, last = responses[0], responses[-1]
    return Completion(
        text="".join(response.text for response in responses),
        token_ids=tuple(token for response in responses for token in response.token_ids),
        finish_reason=FINISH_REASONS[last.finish_reason],
        usage=last.usage,
        timings=last.timings,
        logprobs=tuple(entry for response in responses for entry in response.logprobs),
        request_id=first.request_id,
        prefill_engine=last.prefill_engine,
    )


def _check_time_limit(limit_s: Any, violations: list[Violation]) -> None:
    # A longer one overflows in the library, which then gives up at once.
    if limit_s is not None and not (isinstance(limit_s, int | float) and 0 < limit_s <= LONGEST_S):
        problem = f"is {limit_s!r}, must be a number above 0 and at most {LONGEST_S:g}"
        violations.append(Violation("time_limit_s", problem))


def _each(
    name: str, make: Callable[[Any], Any], values: Iterable[Any], violations: list[Violation]
) -> list[Any]:
    """Return what `make` makes of each value, or note why one cannot be sent."""
    try:
        return [make(value) for value in values]
    except (TypeError, ValueError) as error:
        violations.append(Violation(name, str(error)))
        return []


def _choice(name: str, value: object, choices: Mapping[str, int], violations: list[Violation]) -> int:
    if value is None:
        return 0
    if str(value) not in choices:
        violations.append(Violation(name, f"is {value!r}, must be one of {', '.join(choices)}"))
    return choices.get(str(value), 0)


def _sampling(given: dict[str, Any], violations: list[Violation]) -> pb.SamplingParams:
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    sampling = pb.SamplingParams()
    for name, value in given.items():
        _merge(sampling, name, value, violations)
    return sampling


def _merge(message: Parameters, name: str, value: Any, violations: list[Violation]) -> None:
    """Set one field, or note why its value cannot be sent."""
    try:
        message.MergeFrom(type(message)(**{name: value}))
    except (TypeError, ValueError) as error:
        known = name in message.DESCRIPTOR.fields_by_name
        violations.append(Violation(name, str(error) if known else "no such option"))
