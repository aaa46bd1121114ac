"""A session with a prefill service as a place: what a prompt needs of it, ever and now."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import Cancelled, InvalidRequest, PeerLost, PromptTooLong
from common.session.messages import GoAway, StartPrefill, TransferMode
from common.telemetry.timeline import Timeline
from decode_service.cache.reservation import Holder
from decode_service.prefill.remote_place import RemotePlace
from tests.support.decode_sessions import REQUEST, SLAB_BYTES, SessionDesk, make_session_desk, streaming
from tests.support.sessions import make_welcome

pytestmark = pytest.mark.usefixtures("leak_check")

LOST = PeerLost("the stream broke")
ROOM = SLAB_BYTES - 4096
"""Bytes that can be leased."""

TOKEN_BYTES = 384
"""Of KV in the session's geometry: two layers, three heads of eight float32, keys and values."""


def make_place(desk: SessionDesk) -> RemotePlace:
    """Return the session as a place."""
    return RemotePlace("10.0.0.3:50052", desk.session)


async def test_a_place_takes_what_its_slab_has_room_for(desk: SessionDesk) -> None:
    """One byte more does not fit."""
    place = make_place(desk)

    assert place.can_take(ROOM)
    assert not place.can_take(ROOM + 1)


async def test_a_place_takes_nothing_before_its_peer_has_welcomed_us(slab_dir: Path) -> None:
    """The peer may not fit."""
    with make_session_desk(slab_dir) as desk:
        desk.session.greet()

        assert not make_place(desk).can_take(64)

        desk.session.close(LOST)


async def test_a_place_takes_nothing_once_its_peer_leaves(desk: SessionDesk) -> None:
    """The session is open still."""
    place = make_place(desk)

    desk.session.receive(GoAway("tired"))

    assert not place.can_take(64)


async def test_a_place_takes_nothing_once_its_session_has_ended(desk: SessionDesk) -> None:
    """Its slab is abandoned."""
    place = make_place(desk)

    desk.session.close(LOST)

    assert not place.can_take(64)


async def test_a_place_takes_as_many_prompts_as_its_peer(desk: SessionDesk) -> None:
    """Three, however small they are."""
    place = make_place(desk)
    slots = [desk.session.slots.lease(64) for _ in range(3)]
    assert (place.num_running, place.can_take(64)) == (3, False)

    desk.session.slots.free(slots[1])

    assert place.can_take(64)
    for slot in (slots[0], slots[2]):
        desk.session.slots.free(slot)


async def test_a_prompt_begins_in_a_slot_of_what_it_needs(desk: SessionDesk) -> None:
    """Pages and slot are held before the peer hears of it."""
    place, (reservation, _) = make_place(desk), desk.reserve()

    prefill = place.begin(REQUEST, reservation, Timeline(desk.clock.now_ns()))

    (start,) = await desk.said()
    assert isinstance(start, StartPrefill)
    assert start.slot_size >= place.slot_bytes(REQUEST.prompt_len, REQUEST.mode) > 0
    assert reservation.holders == {Holder.CLIENT, Holder.PRODUCER}
    assert (place.num_running, place.backlog_tokens) == (1, REQUEST.prompt_len)
    prefill.abort(Cancelled("by the client"))
    reservation.drop(Holder.CLIENT)


async def test_the_backlog_of_a_place_ends_with_its_transfers(desk: SessionDesk) -> None:
    """What is given up counts until it has drained."""
    transfer, place = await streaming(desk), make_place(desk)
    transfer.prefill.abort(Cancelled("by the client"))
    transfer.reservation.drop(Holder.CLIENT)
    assert place.backlog_tokens == REQUEST.prompt_len

    desk.importer.finish()
    desk.cancelled(transfer)

    assert place.backlog_tokens == 0


@pytest.mark.parametrize(
    ("prompt_len", "mode", "refused"),
    [
        (300, TransferMode.STREAM, None),
        (301, TransferMode.STREAM, ("prompt tokens", 301, 300)),
        (160, TransferMode.DEFERRED, None),
        (161, TransferMode.DEFERRED, ("slab bytes", 161 * TOKEN_BYTES, ROOM)),
    ],
    ids=["through a ring", "longer than the peer takes", "as large as the slab", "not without a ring"],
)
async def test_a_place_refuses_what_it_could_never_take(
    slab_dir: Path, prompt_len: int, mode: TransferMode, refused: tuple[str, int, int] | None
) -> None:
    """The longest prompt of the peer, and what the slab holds in that mode, each with both numbers."""
    with make_session_desk(slab_dir) as desk:
        desk.session.greet()
        desk.session.receive(replace(make_welcome(), nonce=desk.slab.nonce, max_prompt_tokens=300))

        refusal = make_place(desk).refusal(prompt_len, mode)

        assert refusal is None or isinstance(refusal, PromptTooLong)
        found = (refusal.limit_name, refusal.needed, refusal.limit) if refusal else None
        assert found == refused
        desk.session.close(LOST)


async def test_a_place_refuses_a_mode_that_its_peer_does_not_speak(slab_dir: Path) -> None:
    """Services fit that have one mode in common; the field and both values are named."""
    with make_session_desk(slab_dir) as desk:
        desk.session.greet()
        modes = TransferMode.WHOLE, TransferMode.DEFERRED
        desk.session.receive(replace(make_welcome(), nonce=desk.slab.nonce, modes=modes))

        refusal = make_place(desk).refusal(3, TransferMode.STREAM)

        assert isinstance(refusal, InvalidRequest)
        assert str(refusal) == "transfer: is stream, the prefill service takes whole, deferred"
        assert make_place(desk).refusal(3, TransferMode.WHOLE) is None
        desk.session.close(LOST)
