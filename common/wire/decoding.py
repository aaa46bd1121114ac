"""Bytes that are no message end a call with a reason, instead of the library's UNKNOWN without one.

Theory of operation: grpc parses a request before it calls the handler, and ends the call itself when that
raises. So a deserializer for one request returns `Undecodable` in its place, which the interceptor raises
as the handler's error. A stream is read inside its handler, where the error can be raised at once. To a
client grpc hands None in place of a response that it could not parse: `require_readable` refuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from google.protobuf.message import DecodeError

from common.errors import InvalidRequest, RemoteProtocolError, Violation

Deserializer = Callable[[bytes], Any]
Response = TypeVar("Response")


@dataclass(frozen=True, slots=True)
class Undecodable:
    """Stands for a request that could not be parsed."""

    error: InvalidRequest


def of_request(parse: Deserializer | None) -> Deserializer | None:
    """Return a parser of the one request of a call: it returns `Undecodable` for bytes that are none."""

    def refused(data: bytes, error: ValueError | DecodeError) -> Undecodable:
        return Undecodable(InvalidRequest([Violation("request", f"{len(data)} bytes: {error}")]))

    return _guarded(parse, refused)


def of_stream(parse: Deserializer | None) -> Deserializer | None:
    """Return a parser of the requests of a stream: it raises `RemoteProtocolError` for other bytes."""

    def refused(data: bytes, error: ValueError | DecodeError) -> NoReturn:
        raise RemoteProtocolError(f"a message of {len(data)} bytes cannot be read: {error}") from error

    return _guarded(parse, refused)


def require_readable(response: Response | None) -> Response:
    """Return a response that grpc could parse; raises `RemoteProtocolError` for what it could not."""
    if response is None:
        raise RemoteProtocolError("a message of the peer cannot be read")
    return response


def _guarded(
    parse: Deserializer | None, refused: Callable[[bytes, ValueError | DecodeError], object]
) -> Deserializer | None:
    """Return the parser with `refused` in the place of what it raises; a method may have none."""
    if parse is None:
        return None

    def parsed(data: bytes) -> Any:
        try:
            return parse(data)
        except (DecodeError, UnicodeDecodeError) as error:
            return refused(data, error)

    return parsed
