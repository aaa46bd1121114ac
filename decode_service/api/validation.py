"""Turns a GenerateRequest of the contract into a `Request`, or names everything wrong with it.

Theory of operation: all violations are collected and raised at once. What is wrong with the request itself
is INVALID_ARGUMENT; what this service is too small for is OUT_OF_RANGE, with the numbers. A prompt that can
never fit is refused before anything is made of it. Reading a long request takes time all the same: whoever
reads one (`is_long`) does it beside the event loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.errors import InvalidRequest, PromptTooLong, UnknownModel, Violation
from common.excerpt import excerpt, printable
from common.model.text.stops import special_stop_ids, unreachable_stops
from common.model.text.tokenizer import LONG_TEXT_CHARS
from common.session.messages import TransferMode
from common.wire.enums import MODES
from decode_service.request import Request, Route, SamplingParams, sampling_violations
from kvspan.v1 import decode_pb2 as pb
from kvspan.v1 import geometry_pb2

MAX_STOPS = 16
"""Stop strings of one request; every text delta is searched for each."""

MAX_STOP_CHARS = 1024
"""Of one stop string; as much text may be held back."""

MAX_REQUEST_ID_CHARS = 256

LOGGED_REQUEST_ID_CHARS = 128
"""Of a client's own name for a request, in the log."""

LIFE_CHARS = 8
"""Of the boot id, in the name of a request: a prefill service may serve several lives of several services."""

LONG_TOKENS_BYTES = 64 << 10
"""A larger request takes more than a millisecond to read, whatever it consists of."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What requests are checked against, and what those that say nothing get."""

    model_name: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_context_tokens: int
    """Prompt and answer together: what the model was made for and the cache can hold."""

    max_new_tokens: int
    time_limit_s: float
    default_route: Route
    routes: tuple[Route, ...]
    default_mode: TransferMode


class Encoder(Protocol):
    """Makes token ids; see `Tokenizer`."""

    @property
    def is_quick(self) -> bool:
        """Whether a short text takes a moment."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of the tokens that are no text, by what they are called."""
        ...

    def encode(self, text: str, *, is_literal: bool = False, max_tokens: int | None = None) -> list[int]:
        """Return the ids of a text."""
        ...

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], *, max_tokens: int | None = None
    ) -> list[int]:
        """Return the ids of a chat."""
        ...


class RequestReader:
    """Reads requests."""

    def __init__(self, tokenizer: Encoder, limits: RequestLimits, boot_id: str) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._life = boot_id[:LIFE_CHARS]
        self._numbers = itertools.count(1)

    def is_long(self, request: pb.GenerateRequest) -> bool:
        """Tell whether reading it may hold up the event loop; ids are read faster than text.

        A chat always may: its template is a program.
        """
        prompt = request.WhichOneof("prompt")
        if prompt == "chat":
            return True
        has_ids = prompt == "tokens"
        return request.ByteSize() > (LONG_TOKENS_BYTES if has_ids else LONG_TEXT_CHARS)

    def is_slow(self, request: pb.GenerateRequest) -> bool:
        """Tell whether reading it may hold up the event loop though it is short."""
        return request.WhichOneof("prompt") == "text" and not self._tokenizer.is_quick

    def time_limit_s(self, time_remaining_s: float | None) -> float:
        """Return the seconds that a request with this deadline may live."""
        limit_s = self._limits.time_limit_s
        return limit_s if time_remaining_s is None else min(limit_s, time_remaining_s)

    def read(self, request: pb.GenerateRequest, time_remaining_s: float | None) -> Request:
        """Return the request with every default filled in; on any thread.

        Raises: `InvalidRequest` with all violations, `PromptTooLong`, `UnknownModel`.
        """
        limits = self._limits
        if request.model and request.model != limits.model_name:
            raise UnknownModel(excerpt(request.model), limits.model_name)
        violations = [*self._violations(request), *self._unreachable_stops(request)]
        prompt_ids = self._prompt(request, violations)
        sampling = self._sampling(request.sampling, len(prompt_ids))
        wrong = sampling_violations(sampling)
        violations += [Violation(f"sampling.{one.field}", one.problem) for one in wrong]
        if violations:
            raise InvalidRequest(violations)
        self._check_fits("context tokens", len(prompt_ids) + sampling.max_new_tokens)
        eos_ids = () if request.sampling.ignore_eos else limits.eos_ids
        return Request(
            request_id=f"{self._life}-{next(self._numbers):06d}",
            client_request_id=printable(request.request_id, LOGGED_REQUEST_ID_CHARS),
            prompt_ids=prompt_ids,
            sampling=sampling,
            stop=tuple(request.sampling.stop),
            stop_ids=frozenset((*eos_ids, *request.sampling.stop_token_ids)) | self._special_stops(request),
            route=self._route(request),
            mode=self._mode(request),
            time_limit_s=self.time_limit_s(time_remaining_s),
        )

    def _prompt(self, request: pb.GenerateRequest, violations: list[Violation]) -> tuple[int, ...]:
        max_tokens = self._limits.max_context_tokens
        match request.WhichOneof("prompt"):
            case "text" | "chat":
                try:
                    token_ids = self._encoded(request)
                except InvalidRequest as refusal:
                    violations += refusal.violations
                    return ()
            case "tokens":
                prompt_len = len(request.tokens.token_ids)
                if prompt_len > max_tokens:
                    self._check_fits("context tokens", prompt_len + request.sampling.max_new_tokens)
                token_ids = list(request.tokens.token_ids)
            case _:
                violations.append(Violation("prompt", "one of text, chat and tokens must be set"))
                return ()
        if not token_ids:
            violations.append(Violation("prompt", "has no tokens, must have at least 1"))
        elif max(token_ids) >= self._limits.vocab_size:
            violations.append(self._beyond(request, max(token_ids)))
        return tuple(token_ids)

    def _encoded(self, request: pb.GenerateRequest) -> list[int]:
        max_tokens = self._limits.max_context_tokens
        if request.WhichOneof("prompt") == "text":
            is_literal = request.literal_text
            return self._tokenizer.encode(request.text, is_literal=is_literal, max_tokens=max_tokens)
        self._check_fits("chat messages", len(request.chat.messages))
        turns = [{"role": turn.role, "content": turn.content} for turn in request.chat.messages]
        return self._tokenizer.encode_chat(turns, max_tokens=max_tokens) if turns else []

    def _beyond(self, request: pb.GenerateRequest, token_id: int) -> Violation:
        """Return what is wrong with a prompt that has this id; of a text the client never saw one."""
        vocab_size, prompt = self._limits.vocab_size, request.WhichOneof("prompt")
        if prompt == "tokens":
            return Violation("tokens.token_ids", f"has {token_id}, the vocabulary ends at {vocab_size}")
        problem = f"has a token of this tokenizer ({token_id}) for which the model has no row ({vocab_size})"
        return Violation(str(prompt), problem)

    def _check_fits(self, name: str, needed: int) -> None:
        if needed > self._limits.max_context_tokens:
            raise PromptTooLong(name, needed, self._limits.max_context_tokens)

    def _sampling(self, params: pb.SamplingParams, prompt_len: int) -> SamplingParams:
        room = max(1, self._limits.max_context_tokens - prompt_len)
        given = params.HasField
        return SamplingParams(
            max_new_tokens=params.max_new_tokens
            if given("max_new_tokens")
            else min(self._limits.max_new_tokens, room),
            temperature=params.temperature if given("temperature") else 0.0,
            top_k=params.top_k,
            top_p=params.top_p if given("top_p") else 1.0,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty if given("repetition_penalty") else 1.0,
            seed=params.seed if given("seed") else None,
            logprobs=params.logprobs if given("logprobs") else None,
        )

    def _violations(self, request: pb.GenerateRequest) -> list[Violation]:
        """Return what is wrong beside the prompt and the sampling numbers."""
        params, vocab_size = request.sampling, self._limits.vocab_size
        unserved = "is not served"
        has_no_peer = request.route == pb.ROUTE_REMOTE and not self._has_remote
        has_no_engine = request.route == pb.ROUTE_LOCAL and Route.LOCAL not in self._limits.routes
        checks = (
            ("sampling.n", params.HasField("n") and params.n != 1, f"is {params.n}, only 1 is served"),
            ("sampling.prompt_logprobs", params.HasField("prompt_logprobs"), unserved),
            ("sampling.grammar", bool(params.grammar), unserved),
            ("sampling.stop", "" in params.stop, "has an empty string"),
            ("sampling.stop", len(params.stop) > MAX_STOPS, f"has {len(params.stop)}, at most {MAX_STOPS}"),
            (
                "sampling.stop",
                any(len(stop) > MAX_STOP_CHARS for stop in params.stop),
                f"has a string of more than {MAX_STOP_CHARS} characters",
            ),
            (
                "sampling.stop_token_ids",
                any(token >= vocab_size for token in params.stop_token_ids),
                f"has {max(params.stop_token_ids, default=0)}, the vocabulary ends at {vocab_size}",
            ),
            (
                "request_id",
                len(request.request_id) > MAX_REQUEST_ID_CHARS,
                f"has {len(request.request_id)} characters, at most {MAX_REQUEST_ID_CHARS}",
            ),
            ("literal_text", request.literal_text and not request.HasField("text"), "is for text only"),
            ("route", request.route not in pb.Route.values(), f"is {request.route}, not a known route"),
            ("route", has_no_peer, "no prefill service is configured here"),
            ("route", has_no_engine, "is local, and this service computes no prompts"),
            (
                "transfer",
                request.transfer not in geometry_pb2.TransferMode.values(),
                f"is {request.transfer}, not a known mode",
            ),
        )
        return [Violation(field, problem) for field, is_wrong, problem in checks if is_wrong]

    def _special_stops(self, request: pb.GenerateRequest) -> frozenset[int]:
        return special_stop_ids(request.sampling.stop, self._tokenizer.special_tokens)

    def _unreachable_stops(self, request: pb.GenerateRequest) -> Iterator[Violation]:
        # More and longer ones are refused anyway.
        stops = [stop[:MAX_STOP_CHARS] for stop in request.sampling.stop[:MAX_STOPS]]
        for stop, special in unreachable_stops(stops, self._tokenizer.special_tokens)[:1]:
            # Refusals are logged, which the text of a client never is.
            problem = (
                f"has {special!r} within number {stops.index(stop) + 1}: a special token, which no text has;"
            )
            yield Violation("sampling.stop", f"{problem} make it a stop string of its own")

    def _route(self, request: pb.GenerateRequest) -> Route:
        """Return the route; a request that names a transfer mode and leaves the route open means remote."""
        asked = {pb.ROUTE_REMOTE: Route.REMOTE, pb.ROUTE_LOCAL: Route.LOCAL, pb.ROUTE_AUTO: Route.AUTO}
        route = asked.get(request.route, self._limits.default_route)
        names_mode = request.transfer != geometry_pb2.TRANSFER_MODE_UNSPECIFIED
        return Route.REMOTE if route is Route.AUTO and names_mode and self._has_remote else route

    @property
    def _has_remote(self) -> bool:
        return Route.REMOTE in self._limits.routes

    def _mode(self, request: pb.GenerateRequest) -> TransferMode:
        if request.transfer == geometry_pb2.TRANSFER_MODE_UNSPECIFIED:
            return self._limits.default_mode
        return MODES.native("transfer", request.transfer)
