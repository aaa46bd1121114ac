"""P11: the size of a page is decode's own business, and the prefill service never hears of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from decode_service import app as decode_app
from kvspan.client import AsyncClient
from tests.support.cases import prompt_of
from tests.support.pair import (
    load_pair,
    make_configs,
    open_session,
    running_decode,
    running_pair,
)


async def test_p11_two_decode_services_with_other_pages_share_a_prefill_service(tmp_path: Path) -> None:
    """P11: pages of 16 and of 4 tokens pair with one producer and answer alike, windows included."""
    prefill, decode = make_configs(tmp_path, "tiny:gemma3", lanes=2)
    small = replace(decode, page_tokens=4, listen=f"unix:{tmp_path}/small.sock")
    prompts = [prompt_of(length) for length in (1, 17, 33, 150)]
    async with (
        running_pair(prefill, decode, load_pair(prefill, decode)) as pair,
        running_decode(replace(small, prefill=(pair.prefill_address,)), decode_app.load(small)) as (
            other,
            address,
        ),
        AsyncClient(address) as client,
    ):
        await open_session(other)
        options: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True, "route": "remote"}
        theirs = [await client.complete(token_ids=prompt, **options) for prompt in prompts]
        ours = [await pair.ask(prompt, 6, route="remote") for prompt in prompts]
        sizes = [group.page_bytes for group in (await client.status()).groups]

        assert [one.token_ids for one in theirs] == [one.token_ids for one in ours]
        assert [4 * size for size in sizes] == [
            group.page_bytes for group in (await pair.client.status()).groups
        ]
