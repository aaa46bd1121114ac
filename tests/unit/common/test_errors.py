"""Every error kvspan raises on purpose: what it carries and what its caller can do."""

import inspect
import re

import pytest

from common import errors
from common.errors import Blame, Difference, KVSpanError, Violation

EXAMPLES: tuple[tuple[KVSpanError, dict[str, str]], ...] = (
    (
        errors.ConfigError("page_tokens", 5, "must divide 16"),
        {"field": "page_tokens", "value": "5", "problem": "must divide 16"},
    ),
    (
        errors.UnsupportedModel("tiny", ["1 (linear attention)", "3 (ssm)"], "recurrent layers"),
        {"layers": "1 (linear attention); 3 (ssm)", "value": "tiny"},
    ),
    (
        errors.VersionMismatch([Difference("versions", "1-2", "3-4")]),
        {"differences": "versions: decode 1-2, prefill 3-4"},
    ),
    (
        errors.ModelMismatch([Difference("weights", "ab", "cd")]),
        {"differences": "weights: decode ab, prefill cd"},
    ),
    (
        errors.GeometryMismatch([Difference("dtype", "f16", "f32"), Difference("window", "6", "7")]),
        {"differences": "dtype: decode f16, prefill f32; window: decode 6, prefill 7"},
    ),
    (
        errors.LayoutMismatch([Difference("digest", "off", "xxh3-64")]),
        {"differences": "digest: decode off, prefill xxh3-64"},
    ),
    (
        errors.SlabNotShared([Difference("nonce", "01", "02")]),
        {"differences": "nonce: decode 01, prefill 02"},
    ),
    (
        errors.LocalProtocolError("no span after the end", state="done", event="KVSpan"),
        {"rule": "no span after the end", "state": "done", "event": "KVSpan"},
    ),
    (errors.RemoteProtocolError("Hello comes first"), {"rule": "Hello comes first"}),
    (errors.SlabExhausted(700, 300), {"requested": "700", "free": "300", "unit": "slab bytes"}),
    (
        errors.PagesExhausted(2, 7, 3),
        {"group_index": "2", "requested": "7", "free": "3", "unit": "pages of group 2"},
    ),
    (errors.QueueFull(9), {"unit": "places in the queue of 9"}),
    (errors.CallsExhausted(1, 0, "of 7 open calls"), {"requested": "1", "free": "0"}),
    (errors.StaleGeneration("generation", 4, 3), {"field": "generation", "expected": "4", "actual": "3"}),
    (
        errors.SpanOutOfRange("offset", -64, "[0, 9)"),
        {"field": "offset", "actual": "-64", "allowed": "[0, 9)"},
    ),
    (
        errors.SpanOverlap(1, 5, "[2, 4)", "[3, 6)"),
        {"group_index": "1", "layer_index": "5", "tokens": "[2, 4)", "placed": "[3, 6)"},
    ),
    (errors.ChecksumMismatch(7, "aa", "bb"), {"sequence": "7", "expected": "aa", "actual": "bb"}),
    (errors.CoverageIncomplete(["group 0", "group 1"]), {"missing": "group 0; group 1"}),
    (errors.TotalsMismatch("num_spans", 5, 4), {"field": "num_spans", "told": "5", "received": "4"}),
    (errors.LogitsInvalid("12 values, need 11"), {"problem": "12 values, need 11"}),
    (errors.PrefillFailed("ENGINE_FAILED", "no memory"), {"reason": "ENGINE_FAILED", "message": "no memory"}),
    (errors.PeerLost("stream ended"), {"problem": "stream ended"}),
    (errors.PeerUnavailable("no session"), {"problem": "no session"}),
    (
        errors.PeerUnavailable(
            "SLAB_NOT_SHARED: slab.socket: decode a, prefill b",
            cause="SLAB_NOT_SHARED",
            differences=[errors.Difference("slab.socket", "a", "b")],
        ),
        {
            "problem": "SLAB_NOT_SHARED: slab.socket: decode a, prefill b",
            "cause": "SLAB_NOT_SHARED",
            "differences": "slab.socket: decode a, prefill b",
        },
    ),
    (errors.PrefillEngineFailed("no memory"), {"problem": "no memory"}),
    (errors.LeaseExpired("after 3 s"), {"problem": "after 3 s"}),
    (errors.ShuttingDown("shutting down"), {"problem": "shutting down"}),
    (
        errors.InvalidRequest([Violation("top_p", "above 1"), Violation("seed", "negative")]),
        {"violations": "top_p: above 1; seed: negative"},
    ),
    (errors.PromptTooLong("pages", 70, 64), {"limit_name": "pages", "needed": "70", "limit": "64"}),
    (errors.UnknownModel("large", "tiny"), {"requested": "large", "served": "tiny"}),
    (errors.Cancelled("client went away"), {"cause": "client went away"}),
    (errors.DeadlineExceeded(0.0375), {"limit_s": "0.0375"}),
    (errors.EngineFailed("no memory"), {"problem": "no memory"}),
)

CLASSES = [
    value
    for _, value in inspect.getmembers(errors, inspect.isclass)
    if issubclass(value, KVSpanError) and value is not KVSpanError
]
LEAVES = [kind for kind in CLASSES if not kind.__subclasses__()] + [errors.ConfigError]


def _name(value: object) -> str:
    return type(value).__name__


def test_every_leaf_has_an_example() -> None:
    """A new error cannot be added without saying here what it carries."""
    assert {type(error) for error, _ in EXAMPLES} == set(LEAVES)


@pytest.mark.parametrize(("error", "facts"), EXAMPLES, ids=map(_name, [error for error, _ in EXAMPLES]))
def test_an_error_gives_its_facts_as_metadata(error: KVSpanError, facts: dict[str, str]) -> None:
    """A status detail carries the same facts as the attributes, as text."""
    metadata = error.metadata()

    assert facts.items() <= metadata.items()
    assert all(isinstance(value, str) for value in metadata.values())


@pytest.mark.parametrize(("error", "facts"), EXAMPLES, ids=map(_name, [error for error, _ in EXAMPLES]))
def test_the_message_of_an_error_has_its_facts(error: KVSpanError, facts: dict[str, str]) -> None:
    """Whoever only sees the text can act on it: each word of each fact is in it."""
    words = {word.rstrip(";") for fact in facts.values() for word in fact.split()}

    assert all(word in str(error) for word in words)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_codes_are_unique_and_stable_names(kind: type[KVSpanError]) -> None:
    """A code is UPPER_SNAKE, at most 63 characters, and means one class."""
    assert re.fullmatch(r"[A-Z][A-Z0-9_]{0,62}", kind.code)
    assert [other for other in CLASSES if other.code == kind.code] == [kind]


@pytest.mark.parametrize(
    ("kind", "retryable", "blame"),
    [
        (errors.ConfigError, False, Blame.LOCAL),
        (errors.SlabNotShared, False, Blame.REMOTE),
        (errors.LocalProtocolError, False, Blame.LOCAL),
        (errors.RemoteProtocolError, False, Blame.REMOTE),
        (errors.PagesExhausted, True, Blame.LOCAL),
        (errors.ChecksumMismatch, False, Blame.REMOTE),
        (errors.PeerLost, True, Blame.REMOTE),
        (errors.ShuttingDown, True, Blame.LOCAL),
        (errors.PromptTooLong, False, Blame.REMOTE),
        (errors.EngineFailed, False, Blame.LOCAL),
    ],
)
def test_an_error_says_who_is_to_blame_and_whether_to_try_again(
    kind: type[KVSpanError], retryable: bool, blame: Blame
) -> None:
    """Each family has one answer to both questions."""
    assert (kind.retryable, kind.blame) == (retryable, blame)


def test_a_mismatch_lists_every_difference() -> None:
    """The operator mends all fields in one go."""
    text = str(errors.GeometryMismatch([Difference("dtype", "f16", "f32"), Difference("window", "6", "7")]))

    assert "dtype: decode f16, prefill f32" in text
    assert "window: decode 6, prefill 7" in text


def test_a_mismatch_of_many_fields_shows_some_and_counts_the_others() -> None:
    """A peer that differs everywhere makes no text that nobody can read or send."""
    error = errors.GeometryMismatch([Difference(f"layers[{index}]", "6", "7") for index in range(1000)])

    assert str(error).count("decode 6, prefill 7") == errors.NegotiationError.max_shown
    assert str(error).endswith(f"; and {1000 - errors.NegotiationError.max_shown} more")
    assert len(error.metadata()["differences"]) < len(str(error))
    assert len(error.differences) == 1000


def test_a_mismatch_shows_the_start_of_long_values() -> None:
    """Name and values of a field are the peer's, and so is their length."""
    error = errors.ModelMismatch([Difference("n" * 4_000_000, "d" * 4_000_000, "p" * 4_000_000)])

    assert len(str(error)) < 700
    assert len(error.metadata()["differences"]) < 700
    assert all(start in str(error) for start in ("nnn", "decode ddd", "prefill ppp"))


def test_an_invariant_violation_is_not_caught_with_request_errors() -> None:
    """Our own bug stops the service and is never one request's failure."""
    assert not issubclass(errors.InvariantViolation, KVSpanError)


def test_the_docstring_names_every_class() -> None:
    """The tree at the top of the module is complete."""
    assert errors.__doc__ is not None
    documented = set(re.findall(r"\b[A-Z]\w+\b", errors.__doc__))

    assert {kind.__name__ for kind in CLASSES} | {"InvariantViolation"} <= documented


def test_of_a_foreign_exception_only_the_type_is_told() -> None:
    """Its text may name files and processes of the host, or hold a prompt; ours do not."""
    assert errors.told(OSError("/run/private.sock is gone")) == "OSError"
    assert errors.told(errors.LogitsInvalid("a value is not finite")) == "logits: a value is not finite"
