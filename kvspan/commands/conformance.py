"""The command `conformance`: whether an engine or a backend keeps the rules; exit code 0 when it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvspan.commands.command import EXIT_FAILED, EXIT_OK, tell

if TYPE_CHECKING:
    from common.engine.decode import DecodeBackend
    from common.engine.setup import BackendSetup, EngineSetup
    from kvspan.conformance.checks import Check
    from kvspan.conformance.subject import Reference

S = TypeVar("S")
F = TypeVar("F", bound=Callable[..., Any])


@click.group("conformance")
def conformance() -> None:
    """Check an engine or a backend against the rules that both services rely on."""


def _settings(kind: str) -> Callable[[F], F]:
    """Give a command what an engine or a backend is made of."""
    tokens = click.IntRange(1)
    options = (
        click.option(
            "--model",
            default="tiny:llama",
            show_default=True,
            metavar="SPEC",
            help="demo, tiny:FAMILY or a local Hugging Face folder",
        ),
        click.option(
            "--dtype", default="float32", show_default=True, metavar="NAME", help="type of weights and KV"
        ),
        click.option(
            "--chunk-tokens",
            type=tokens,
            default=64,
            show_default=True,
            metavar="TOKENS",
            help="grid of prefill",
        ),
        click.option(
            "--max-prompt-tokens",
            type=tokens,
            default=300,
            show_default=True,
            metavar="TOKENS",
            help="longest prompt",
        ),
        click.option(
            "--lanes",
            type=click.IntRange(1),
            default=4 if kind == "backend" else 1,
            show_default=True,
            metavar="COUNT",
            help="rows of a batch",
        ),
        click.option(
            f"--{kind}-option",
            "options",
            multiple=True,
            metavar="KEY=VALUE",
            help="an option of it; may be repeated (default: none)",
        ),
        click.option(
            f"--{kind}-factory",
            "factory",
            default="",
            metavar="MODULE:CALLABLE",
            help="make it by this callable, which runs the code of that module (default: none)",
        ),
    )

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


@conformance.command("engine")
@click.argument("name", default="torch")
@_settings("engine")
def engine(name: str, factory: str, **given: Any) -> int:
    """Check the prefill engine NAME."""
    from common.engine.checks import check_engine
    from common.engine.registry import make
    from kvspan.conformance import ENGINE_CHECKS, EngineSubject
    from prefill_service.engines.table import ENGINES

    setup: EngineSetup = _setup("engine_option", given)
    made = make(ENGINES, name, factory, setup)
    check_engine(*ENGINES.asked(name, factory), made)
    reference = _reference(setup, made.identity().fingerprint.rounded_weights)
    return report(ENGINE_CHECKS, EngineSubject(made, reference))


@conformance.command("backend")
@click.argument("name", default="torch")
@_settings("backend")
def backend(name: str, factory: str, **given: Any) -> int:
    """Check the decode backend NAME."""
    from common.engine.checks import check_backend
    from common.engine.registry import make
    from decode_service.generate.backends.table import BACKENDS
    from kvspan.conformance import BACKEND_CHECKS, BackendSubject

    def fresh() -> DecodeBackend:
        made = make(BACKENDS, name, factory, _setup("backend_option", given))
        check_backend(*BACKENDS.asked(name, factory), made)
        return made

    # What is no backend at all is a wrong setting, and not ten failures.
    fresh()
    return report(BACKEND_CHECKS, BackendSubject(fresh))


def report(checks: Sequence[Check[S]], subject: S) -> int:
    """Run the checks, tell each, and return the exit code."""
    from kvspan.conformance.checks import outcome_of

    num_failed = 0
    for check in checks:
        verdict, lines = outcome_of(check, subject)
        num_failed += verdict == "FAILS"
        tell("\n".join([f"{verdict:5}  {check.name}: {check.rule}", *(f"       {line}" for line in lines)]))
    tell(f"{len(checks)} checks, {num_failed} fail")
    return EXIT_FAILED if num_failed else EXIT_OK


def _setup(setting: str, given: Any) -> BackendSetup:
    from common.engine.options import Options
    from common.engine.setup import BackendSetup
    from common.runtime.threads import resolve_threads

    return BackendSetup(
        model=given["model"],
        dtype=given["dtype"],
        threads=resolve_threads(0),
        chunk_tokens=given["chunk_tokens"],
        max_prompt_tokens=given["max_prompt_tokens"],
        max_context_tokens=0,
        options=Options(setting, given["options"]),
        show_progress=False,
        max_lanes=given["lanes"],
    )


def _reference(setup: EngineSetup, weights: str) -> Reference | None:
    """Return the model of the setup, if it is the checkpoint that the engine says it computes with."""
    from common.errors import KVSpanError
    from common.model.kv_reference import KVReference

    try:
        reference = KVReference(setup.model)
    except KVSpanError:
        return None
    return reference if reference.rounded_weights == weights else None
