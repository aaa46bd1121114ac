"""transformers' `generate` in a process of its own, so that neither threads nor memory mix with the pair's.

Theory of operation: the child answers one JSON line with one JSON line until its input ends. It also
tokenises, so that the measuring process loads no model library at all. Between orders it sleeps.

    {"do": "tokenise", "text": ...}                  -> {"token_ids": [...]}
    {"do": "generate", "prompts": [[...]], "num_tokens": n} -> {"token_ids": [[...]], "times_ns": [...]}

`times_ns` has one time for each step, the one over the prompts included.

Ownership: `Baseline` owns the child; leaving its context ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from common.runtime.lifecycle import end_with_parent
from kvspan.commands.command import CommandFailed, module_command

if TYPE_CHECKING:
    from common.model.reference import Reference

LINE_LIMIT = 1 << 26
"""Longest line between the two processes."""


@dataclass(frozen=True, slots=True)
class Generated:
    """What the baseline made of a batch."""

    token_ids: tuple[tuple[int, ...], ...]
    """One row a prompt."""

    times_ns: tuple[int, ...]
    """When each step ended (CLOCK_MONOTONIC), the one over the prompts first."""


class Baseline:
    """The child, from its start to its end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, model: str, dtype: str, threads: int) -> Self:
        """Start a child that loads the model; the first answer waits for that."""
        process = await asyncio.create_subprocess_exec(
            *module_command(__name__), model, dtype, str(threads), str(os.getpid()),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=LINE_LIMIT,
            start_new_session=True,
        )  # fmt: skip
        return cls(process)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if error is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()
        # What a child that was killed had not read is nobody's loss.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await self._process.stdin.wait_closed()

    async def tokenise(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, with what the model puts before one."""
        answer = await self._ask({"do": "tokenise", "text": text})
        return tuple(answer["token_ids"])

    async def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Generated:
        """Generate `num_tokens` tokens from each of some prompts of one length."""
        order = {"do": "generate", "prompts": [list(prompt) for prompt in prompts], "num_tokens": num_tokens}
        answer = await self._ask(order)
        return Generated(tuple(map(tuple, answer["token_ids"])), tuple(answer["times_ns"]))

    async def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        await self._process.stdin.drain()
        line = await self._process.stdout.readline()
        if not line:
            raise CommandFailed(f"the process of the baseline ended with {await self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def serve(model: str, dtype: str, threads: int) -> None:
    """Load the model and answer orders until the input ends."""
    from common.model.loader import load_model
    from common.model.reference import Reference
    from common.model.text.tokenizer import Tokenizer

    loaded = load_model(model, dtype, progress=False)
    reference = Reference(loaded, threads)
    tokenizer = Tokenizer(loaded.tokenizer.pretrained, has_chats=False)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "tokenise":
            answer = {"token_ids": tokenizer.encode(order["text"])}
        else:
            answer = _generate(reference, order["prompts"], order["num_tokens"])
        print(json.dumps(answer), flush=True)


def _generate(reference: Reference, prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, Any]:
    times_ns: list[int] = []
    token_ids = reference.generate(prompts, num_tokens, lambda: times_ns.append(time.monotonic_ns()))
    return {"token_ids": token_ids, "times_ns": times_ns}


def main(arguments: Sequence[str]) -> int:
    """Serve as the child of the process whose id is the last argument."""
    model, dtype, threads, parent = arguments
    if not end_with_parent(int(parent)):
        return 1
    serve(model, dtype, int(threads))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
