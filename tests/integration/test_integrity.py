"""A service that finds its own books wrong stops, when it has nothing to do and so can look."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import InvariantViolation
from kvspan.client import AsyncClient
from prefill_service.app import PrefillService
from tests.integration.conftest import Configs, LoadPair
from tests.support.pair import WAIT_S, open_session, running_decode


async def test_prefill_stops_when_its_books_are_wrong_after_its_last_job(
    dense: Configs, load: LoadPair
) -> None:
    """A transfer that was accepted and never ended holds its slot for ever: the request before is served."""
    copies = load(*dense)
    prefill = PrefillService(dense[0], copies.prefill)
    await prefill.start()
    running = asyncio.create_task(prefill.run_until(asyncio.Event()))
    async with running_decode(dense[1], copies.decode) as (service, address), AsyncClient(address) as client:
        await open_session(service)
        await client.complete(token_ids=[1, 2, 3], max_new_tokens=1, route="remote")
        assert not running.done()

        prefill.servicer.totals.accepted += 1
        answer = await client.complete(token_ids=[1, 2, 3], max_new_tokens=1, route="remote")

        assert len(answer.token_ids) == 1
        with pytest.raises(InvariantViolation, match="3 accepted, 2 ended and 0 live"):
            await asyncio.wait_for(running, WAIT_S)
