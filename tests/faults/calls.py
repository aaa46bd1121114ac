"""Requests of the driver: prompts by seed, what they must answer, and how far an answer has come."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvspan import InvalidRequest, RemoteFailure
from kvspan.client import AsyncClient
from tests.faults.processes import LIMIT_S, Nursery

MODELS = ("tiny:llama", "tiny:gemma3")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids and how many tokens are asked for."""

    token_ids: tuple[int, ...]
    num_tokens: int


def make_prompt(length: int, num_tokens: int, seed: int) -> Prompt:
    """Return a prompt of random bytes."""
    return Prompt(tuple(random.Random(seed).choices(range(256), k=length)), num_tokens)


SURVIVOR = make_prompt(90, 96, seed=1)
"""Long, and decoding when the fault strikes."""

VICTIMS = tuple(make_prompt(150, 24, seed=10 + number) for number in range(4))
"""Three chunks; taken in turns, so that what one left behind cannot pass for the next."""

ORDINARY = tuple(make_prompt(37, 6, seed=20 + number) for number in range(4))
FILLER = make_prompt(20, 800, seed=30)
"""Takes so many pages that a victim has to wait; never read to its end."""

SWARM = tuple(make_prompt(17 + 5 * (number % 8), 3, seed=100 + number) for number in range(48))
"""Many small ones, all different."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended at its client: `OK` or the name of a status."""

    code: str
    reason: str = ""
    text: str = ""
    token_ids: tuple[int, ...] = ()

    def __str__(self) -> str:
        return " ".join(part for part in (self.code, self.reason) if part)


class Request:
    """A running request."""

    def __init__(self, client: AsyncClient, prompt: Prompt, **options: Any) -> None:
        self.prompt = prompt
        self._token_ids: list[int] = []
        self._grown = asyncio.Event()
        self._task = asyncio.create_task(self._run(client, options))

    @property
    def num_tokens(self) -> int:
        """Tokens that have come."""
        return len(self._token_ids)

    @property
    def has_ended(self) -> bool:
        """Whether the call is over."""
        return self._task.done()

    def cancel(self) -> None:
        """Give it up as a client does."""
        self._task.cancel()

    async def reached(self, num_tokens: int) -> None:
        """Wait until so many tokens have come; fails when the call ends before."""
        async with asyncio.timeout(LIMIT_S):
            while self.num_tokens < num_tokens:
                assert not self.has_ended, f"ended before token {num_tokens}: {self._task.result()}"
                self._grown.clear()
                await self._grown.wait()

    async def outcome(self, limit_s: float = LIMIT_S) -> Outcome:
        """Wait for the end of the call."""
        async with asyncio.timeout(limit_s):
            return await asyncio.shield(self._task)

    async def _run(self, client: AsyncClient, options: dict[str, Any]) -> Outcome:
        given = {
            "ignore_eos": True,
            "max_new_tokens": self.prompt.num_tokens,
            "time_limit_s": 60.0,
            **options,
        }
        try:
            async for response in client.generate(token_ids=self.prompt.token_ids, **given):
                self._token_ids += response.token_ids
                self._grown.set()
        except RemoteFailure as failure:
            return Outcome(failure.code.name, failure.reason, failure.message)
        except InvalidRequest as error:
            return Outcome("NOT_SENT", text=str(error))
        except asyncio.CancelledError:
            return Outcome("CANCELLED", text="by this client")
        finally:
            self._grown.set()
        return Outcome("OK", token_ids=tuple(self._token_ids))


class Oracle:
    """What transformers' own `generate` answers; computed once for each model and prompt."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, Prompt], tuple[int, ...]] = {}

    async def learn(self, nursery: Nursery, model: str, prompts: Sequence[Prompt]) -> None:
        """Compute the answers to prompts."""
        asked = [(prompt.token_ids, prompt.num_tokens) for prompt in prompts]
        name = f"oracle-{model.removeprefix('tiny:')}-{len(self._answers)}"
        process = await nursery.fork("oracle", name, model=model, prompts=asked)
        answers = (await process.next_sealed("answers"))["answers"]
        await process.wait()
        for prompt, answer in zip(prompts, answers, strict=True):
            self._answers[model, prompt] = tuple(answer)

    def answer(self, model: str, prompt: Prompt) -> tuple[int, ...]:
        """Return the tokens that must come."""
        return self._answers[model, prompt]
