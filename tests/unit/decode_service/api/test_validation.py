"""What a client may ask for, and what becomes of what it leaves out."""

from dataclasses import replace

import pytest

from common.errors import InvalidRequest, PromptTooLong, UnknownModel
from common.excerpt import SHOWN_CHARS
from common.model.text.tokenizer import Tokenizer
from common.model.tiny import BOS_ID, EOS_ID, VOCAB_SIZE, make_byte_tokenizer
from common.session.messages import TransferMode
from decode_service.api.validation import RequestLimits, RequestReader
from decode_service.request import Request, Route, SamplingParams
from kvspan.v1 import decode_pb2 as pb
from kvspan.v1 import geometry_pb2
from tests.support.decoding import TOKENIZER

BOOT_ID = "5e3a90b1c2d4f607"

LIMITS = RequestLimits(
    model_name="tiny",
    vocab_size=VOCAB_SIZE,
    eos_ids=(EOS_ID,),
    max_context_tokens=100,
    max_new_tokens=31,
    time_limit_s=60.0,
    default_route=Route.REMOTE,
    routes=(Route.REMOTE, Route.LOCAL),
    default_mode=TransferMode.DEFERRED,
)
TOKENS = pb.TokenPrompt(token_ids=[7, 8, 9])


def read(
    request: pb.GenerateRequest, *, limits: RequestLimits = LIMITS, time_remaining_s: float | None = None
) -> Request:
    """Read one request."""
    return RequestReader(TOKENIZER, limits, BOOT_ID).read(request, time_remaining_s)


def ask(**fields: object) -> pb.GenerateRequest:
    """Return a request of three tokens with these sampling fields."""
    return pb.GenerateRequest(tokens=TOKENS, sampling=pb.SamplingParams(**fields))  # type: ignore[arg-type]


def fields_of(request: pb.GenerateRequest, limits: RequestLimits = LIMITS) -> list[str]:
    """Return the fields that are named as wrong."""
    with pytest.raises(InvalidRequest) as refusal:
        read(request, limits=limits)
    return [violation.field for violation in refusal.value.violations]


def test_defaults_fill_what_is_left_out() -> None:
    """Greedy, as long as the service says, where and how the service says."""
    request = read(pb.GenerateRequest(tokens=TOKENS))

    assert request.sampling == SamplingParams(max_new_tokens=31)
    assert (request.prompt_ids, request.stop) == ((7, 8, 9), ())
    assert request.stop_ids == {EOS_ID}
    assert (request.route, request.mode) == (Route.REMOTE, TransferMode.DEFERRED)
    assert (request.sampling.logprobs, request.time_limit_s) == (None, 60.0)


def test_the_default_length_ends_with_the_context() -> None:
    """A client that names no length is not refused for the default's sake."""
    request = read(pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=[5] * 90)))

    assert request.sampling.max_new_tokens == 10


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_string_that_is_a_special_token_ends_by_its_id(ignore_eos: bool) -> None:
    """Such a token has no text that could be found (Y15); who names it does not mean to ignore it."""
    request = read(ask(stop=["<eos>", "<bos>", "a"], ignore_eos=ignore_eos))

    assert request.stop_ids == {EOS_ID, BOS_ID}
    assert request.stop == ("<eos>", "<bos>", "a")


def test_a_stop_string_with_a_special_token_among_other_text_is_refused() -> None:
    """It would never be found. Refusals are logged, so its other text is not told."""
    with pytest.raises(InvalidRequest) as refusal:
        read(ask(stop=["a", "private<eos>"]))

    (violation,) = refusal.value.violations
    assert violation.field == "sampling.stop"
    assert violation.problem.startswith("has '<eos>' within number 2: a special token")
    assert "private" not in violation.problem


def test_every_sampling_field_is_taken() -> None:
    """As the client set it."""
    request = read(
        ask(
            max_new_tokens=3,
            temperature=0.5,
            top_k=4,
            top_p=0.25,
            min_p=0.125,
            repetition_penalty=1.5,
            seed=6,
            logprobs=2,
            stop=["a", "b"],
            stop_token_ids=[1, 2],
            ignore_eos=True,
            n=1,
        )
    )

    assert request.sampling == SamplingParams(3, 0.5, 4, 0.25, 0.125, 1.5, 6, 2)
    assert request.sampling.logprobs is not None
    assert request.stop == ("a", "b")
    assert request.stop_ids == {1, 2}


def test_log_probabilities_without_alternatives_can_be_asked_for() -> None:
    """Zero is not absent."""
    assert read(ask(logprobs=0)).sampling.logprobs == 0


def test_text_and_chat_become_tokens() -> None:
    """With the special tokens and the template of the model."""
    text = read(pb.GenerateRequest(text="hi"))
    chat = read(pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])))

    assert text.prompt_ids == (BOS_ID, *b"hi")
    assert chat.prompt_ids == (BOS_ID, *b"user: hi\nassistant: ")


def test_special_tokens_of_a_text_are_such_and_those_of_a_chat_or_literal_text_are_not() -> None:
    """Row Y16: a text is a whole prompt, the others may be somebody else's words."""
    turn = pb.ChatMessage(role="user", content="<eos>")

    assert read(pb.GenerateRequest(text="<eos>")).prompt_ids == (BOS_ID, EOS_ID)
    assert read(pb.GenerateRequest(text="<eos>", literal_text=True)).prompt_ids == (BOS_ID, *b"<eos>")
    chat = read(pb.GenerateRequest(chat=pb.ChatPrompt(messages=[turn])))
    assert chat.prompt_ids == (BOS_ID, *b"user: <eos>\nassistant: ")


def test_only_a_text_can_be_literal() -> None:
    """Chats always are, and ids have no spelling."""
    assert fields_of(pb.GenerateRequest(tokens=TOKENS, literal_text=True)) == ["literal_text"]


def test_token_without_a_row_is_blamed_on_the_model() -> None:
    """Row Y9: whoever sent a text never saw an id."""
    limits = replace(LIMITS, vocab_size=EOS_ID)

    assert fields_of(pb.GenerateRequest(text="a<eos>"), limits) == ["text"]
    assert fields_of(pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=[EOS_ID])), limits) == [
        "tokens.token_ids"
    ]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(), "prompt"),
        (pb.GenerateRequest(tokens=pb.TokenPrompt()), "prompt"),
        (pb.GenerateRequest(chat=pb.ChatPrompt()), "prompt"),
        (pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=[1, VOCAB_SIZE])), "tokens.token_ids"),
        (ask(n=2), "sampling.n"),
        (ask(n=0), "sampling.n"),
        (ask(prompt_logprobs=0), "sampling.prompt_logprobs"),
        (ask(grammar="{}"), "sampling.grammar"),
        (ask(max_new_tokens=0), "sampling.max_new_tokens"),
        (ask(temperature=-0.5), "sampling.temperature"),
        (ask(temperature=float("nan")), "sampling.temperature"),
        (ask(top_p=0.0), "sampling.top_p"),
        (ask(top_p=1.5), "sampling.top_p"),
        (ask(min_p=-0.25), "sampling.min_p"),
        (ask(repetition_penalty=0.0), "sampling.repetition_penalty"),
        (ask(logprobs=101), "sampling.logprobs"),
        (ask(stop=["a", ""]), "sampling.stop"),
        (ask(stop=["a"] * 17), "sampling.stop"),
        (ask(stop=["a" * 1025]), "sampling.stop"),
        (ask(stop_token_ids=[1, VOCAB_SIZE]), "sampling.stop_token_ids"),
        (pb.GenerateRequest(tokens=TOKENS, request_id="x" * 257), "request_id"),
        (pb.GenerateRequest(tokens=TOKENS, route=77), "route"),  # type: ignore[arg-type]
        (pb.GenerateRequest(tokens=TOKENS, transfer=78), "transfer"),  # type: ignore[arg-type]
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_named(request_: pb.GenerateRequest, field: str) -> None:
    """F6, F8, I5: Exactly the field that is wrong."""
    assert fields_of(request_) == [field]


def test_everything_wrong_is_named_at_once() -> None:
    """A client corrects all of it in one go."""
    request = pb.GenerateRequest(
        tokens=pb.TokenPrompt(token_ids=[VOCAB_SIZE]),
        sampling=pb.SamplingParams(n=2, top_p=2.0, stop=[""], max_new_tokens=0),
        route=77,  # type: ignore[arg-type]
    )

    assert sorted(fields_of(request)) == [
        "route",
        "sampling.max_new_tokens",
        "sampling.n",
        "sampling.stop",
        "sampling.top_p",
        "tokens.token_ids",
    ]


def test_a_chat_that_the_template_refuses_hides_nothing_else() -> None:
    """The template's refusal is one violation among the others."""
    turn = pb.ChatMessage(role="user", content="hi")
    request = pb.GenerateRequest(chat=pb.ChatPrompt(messages=[turn]), sampling=pb.SamplingParams(n=2))
    pretrained = make_byte_tokenizer()
    pretrained.chat_template = None
    reader = RequestReader(Tokenizer(pretrained), LIMITS, BOOT_ID)

    with pytest.raises(InvalidRequest) as refusal:
        reader.read(request, None)

    assert [violation.field for violation in refusal.value.violations] == ["sampling.n", "chat"]


@pytest.mark.parametrize("num_tokens", [70, 100, 101])
def test_what_can_never_fit_is_refused_with_the_numbers(num_tokens: int) -> None:
    """Prompt and answer together, before anything is held (C9)."""
    request = pb.GenerateRequest(
        tokens=pb.TokenPrompt(token_ids=[5] * num_tokens), sampling=pb.SamplingParams(max_new_tokens=31)
    )

    with pytest.raises(PromptTooLong) as refusal:
        read(request)

    assert (refusal.value.needed, refusal.value.limit) == (num_tokens + 31, 100)


@pytest.mark.parametrize(
    ("request_", "numbers"),
    [
        (pb.GenerateRequest(text="x" * 501), ("prompt bytes", 501, 500)),
        (
            pb.GenerateRequest(
                chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x" * 251)] * 2)
            ),
            ("prompt bytes", 502, 500),
        ),
        (
            pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage()] * 101)),
            ("chat messages", 101, 100),
        ),
        (pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=[5] * 101)), ("context tokens", 101, 100)),
    ],
    ids=["text", "chat", "messages", "tokens"],
)
def test_a_prompt_that_can_never_fit_is_refused_as_it_came(
    request_: pb.GenerateRequest, numbers: tuple[str, int, int]
) -> None:
    """Before it is tokenized, rendered or copied; five characters are the longest token here."""
    with pytest.raises(PromptTooLong) as refusal:
        read(request_)

    assert (refusal.value.limit_name, refusal.value.needed, refusal.value.limit) == numbers


@pytest.mark.parametrize(
    ("request_", "is_long"),
    [
        (pb.GenerateRequest(text="x" * 3900), False),
        (pb.GenerateRequest(text="x" * 4001), True),
        (pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(content="x")])), True),
        (pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=[1000] * 8192)), False),
        (pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=[1000] * 40_000)), True),
        (ask(stop=["x"] * 40_000), True),
    ],
    ids=["text", "long text", "chat", "tokens", "many tokens", "many stops"],
)
def test_a_request_that_takes_long_to_read_is_told_without_reading_it(
    request_: pb.GenerateRequest, is_long: bool
) -> None:
    """So that whoever reads it does not do so on the event loop."""
    assert RequestReader(TOKENIZER, LIMITS, BOOT_ID).is_long(request_) is is_long


def test_what_fits_exactly_is_taken() -> None:
    """The limit itself is allowed."""
    request = pb.GenerateRequest(
        tokens=pb.TokenPrompt(token_ids=[5] * 69), sampling=pb.SamplingParams(max_new_tokens=31)
    )

    assert read(request).prompt_len == 69


def test_another_model_is_refused_by_name() -> None:
    """No name is any name."""
    with pytest.raises(UnknownModel, match="other"):
        read(pb.GenerateRequest(tokens=TOKENS, model="other"))

    assert read(pb.GenerateRequest(tokens=TOKENS, model="tiny")).prompt_len == 3


def test_the_name_of_another_model_is_quoted_in_part() -> None:
    """Megabytes of it would be a line of the log."""
    with pytest.raises(UnknownModel) as refusal:
        read(pb.GenerateRequest(tokens=TOKENS, model="x" * 3_000_000))

    assert len(refusal.value.requested) == SHOWN_CHARS


def test_equal_names_of_a_client_are_different_requests() -> None:
    """The client's name is for logs and never a key (I1, I5); ours is unique over lives, too."""
    reader = RequestReader(TOKENIZER, LIMITS, BOOT_ID)
    request = pb.GenerateRequest(tokens=TOKENS, request_id="mine")

    first, second = reader.read(request, None), reader.read(request, None)

    assert (first.request_id, second.request_id) == ("5e3a90b1-000001", "5e3a90b1-000002")
    assert first.client_request_id == second.client_request_id == "mine"


def test_the_name_that_a_client_gave_is_fit_to_be_logged() -> None:
    """Control characters would steer the terminal of whoever reads the log; length is bounded."""
    name = "a\x1b[2J\nb\u202e" + "c" * 240

    logged = read(pb.GenerateRequest(tokens=TOKENS, request_id=name)).client_request_id

    assert logged == "a[2Jb" + "c" * 122 + "…"


@pytest.mark.parametrize(
    ("route", "expected"),
    [
        (pb.ROUTE_UNSPECIFIED, Route.LOCAL),
        (pb.ROUTE_AUTO, Route.AUTO),
        (pb.ROUTE_REMOTE, Route.REMOTE),
        (pb.ROUTE_LOCAL, Route.LOCAL),
    ],
)
def test_a_route_can_be_asked_for(route: pb.Route, expected: Route) -> None:
    """The service's own default holds only for clients that say nothing."""
    limits = replace(LIMITS, default_route=Route.LOCAL)

    assert read(pb.GenerateRequest(tokens=TOKENS, route=route), limits=limits).route is expected


def test_the_remote_route_is_refused_when_there_is_no_prefill_service() -> None:
    """Never served in silence by another route."""
    limits = replace(LIMITS, default_route=Route.LOCAL, routes=(Route.LOCAL,))

    assert fields_of(pb.GenerateRequest(tokens=TOKENS, route=pb.ROUTE_REMOTE), limits) == ["route"]


def test_a_named_mode_means_remote_when_the_route_is_open() -> None:
    """Modes say how a remote prompt crosses; who names one does not want it computed elsewhere."""
    limits = replace(LIMITS, default_route=Route.AUTO)
    whole = geometry_pb2.TRANSFER_MODE_WHOLE

    assert read(pb.GenerateRequest(tokens=TOKENS), limits=limits).route is Route.AUTO
    assert read(pb.GenerateRequest(tokens=TOKENS, transfer=whole), limits=limits).route is Route.REMOTE
    local = pb.GenerateRequest(tokens=TOKENS, transfer=whole, route=pb.ROUTE_LOCAL)
    assert read(local, limits=limits).route is Route.LOCAL


@pytest.mark.parametrize(
    ("transfer", "mode"),
    [
        (geometry_pb2.TRANSFER_MODE_WHOLE, TransferMode.WHOLE),
        (geometry_pb2.TRANSFER_MODE_STREAM, TransferMode.STREAM),
        (geometry_pb2.TRANSFER_MODE_DEFERRED, TransferMode.DEFERRED),
    ],
)
def test_a_mode_can_be_asked_for(transfer: geometry_pb2.TransferMode, mode: TransferMode) -> None:
    """Per request."""
    limits = replace(LIMITS, default_mode=TransferMode.STREAM)

    assert read(pb.GenerateRequest(tokens=TOKENS, transfer=transfer), limits=limits).mode is mode


@pytest.mark.parametrize(
    ("remaining_s", "limit_s"), [(None, 60.0), (7.5, 7.5), (300.0, 60.0), (0.0, 0.0), (-2.0, -2.0)]
)
def test_the_time_limit_is_the_shorter_of_deadline_and_limit(
    remaining_s: float | None, limit_s: float
) -> None:
    """A deadline that has passed is not no deadline."""
    request = read(pb.GenerateRequest(tokens=TOKENS), time_remaining_s=remaining_s)

    assert request.time_limit_s == limit_s
