"""What README and docs say about names, tables and numbers of the code is what the code says."""

from __future__ import annotations

import ast
import logging
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from enum import Enum
from functools import cache
from pathlib import Path

import click
import pytest
import yaml  # type: ignore[import-untyped]

import kvspan
from common import errors
from common.kv.geometry import DType, GroupGeometry
from common.kv.ranges import Range
from common.kv.spans import SPAN_LAYOUT, key_range, span_bytes, value_range
from common.session.decode_side import SESSION_TRANSITIONS
from common.session.prefill_job import JOB_TRANSITIONS
from common.session.prefill_states import PREFILL_SESSION_TRANSITIONS, PrefillState
from common.session.transfer_states import TRANSITIONS, TransferState
from common.settings import setting_text
from common.wire.status import CODES
from decode_service.config import REMOTE_HEALTH, DecodeConfig
from kvspan.cli import COMMANDS, make_parser
from kvspan.commands.flags import SETTINGS, flag_name
from kvspan.v1 import transfer_pb2
from prefill_service.config import PrefillConfig
from tests.support.command_lines import parse_line

ROOT = Path(__file__).resolve().parents[2]
PROTOCOL = "docs/protocol.md"
PAGES = ("README.md", PROTOCOL, "docs/ownership.md", "docs/operations.md")
CODE_FOLDERS = ("common", "decode_service", "kvspan", "prefill_service", "tests")

SOURCE_PATH = re.compile(r"(?:common|decode_service|docs|kvspan|prefill_service|protos|tests)/[\w./]+\.\w+")
FOREIGN_FLAGS = (
    "-plaintext", "-unix", "-d", "--build", "--wait", "--volumes", "--against", "--exclude-source-info", "-o",
)  # fmt: skip
"""Flags of grpcurl, docker compose and buf."""

NOTHING = "\N{EN DASH}"
"""Cell of a table that has nothing to say."""

SERVICE_TABLES = {
    "Session, decode side": SESSION_TRANSITIONS,
    "Transfer, decode side": TRANSITIONS,
    "Session, prefill side": PREFILL_SESSION_TRANSITIONS,
    "Job, prefill side": JOB_TRANSITIONS,
}


@cache
def page(name: str) -> str:
    """Return the text of one page."""
    return (ROOT / name).read_text(encoding="utf-8")


def prose_and_blocks(name: str) -> tuple[str, list[tuple[str, str]]]:
    """Return a page without its fenced blocks, and the blocks as (language, text)."""
    prose: list[str] = []
    blocks: list[tuple[str, str]] = []
    language: str | None = None
    lines: list[str] = []
    for line in page(name).splitlines():
        if not line.strip().startswith("```"):
            (prose if language is None else lines).append(line)
        elif language is None:
            language, lines = line.strip()[3:], []
        else:
            blocks.append((language, "\n".join(lines)))
            language = None
    assert language is None, f"{name} has an open block"
    return "\n".join(prose), blocks


def code_words(name: str) -> list[str]:
    """Return every text in backticks outside of blocks."""
    return re.findall(r"`([^`\n]+)`", prose_and_blocks(name)[0])


def command_lines() -> Iterator[list[str]]:
    """Yield the words of every command in the blocks of all pages."""
    for name in PAGES:
        for language, text in prose_and_blocks(name)[1]:
            if not language:
                starts = (".venv/bin/", "make ", "docker ")
                yield from (
                    shlex.split(line, comments=True)
                    for line in map(str.strip, text.splitlines())
                    if line.startswith(starts)
                )


def section(name: str, title: str) -> str:
    """Return the text below a heading, up to the next one, without its blocks."""
    prose = prose_and_blocks(name)[0]
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", prose, re.M | re.S)
    assert found, f"{name} has no section {title!r}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """Return the cells of every row of the tables in a text, heads and rules left out."""
    lines = [line.strip() for line in text.splitlines()]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    rules = [number for number, cells in enumerate(table) if set("".join(cells)) <= set("- ")]
    heads = {number - 1 for number in rules}
    return [cells for number, cells in enumerate(table) if number not in heads and number not in rules]


@cache
def source_text() -> str:
    """Return all Python of the project."""
    paths = [path for folder in CODE_FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


@cache
def names_of_tests() -> frozenset[str]:
    """Return the names of all tests."""
    return frozenset(re.findall(r"^\s*(?:async )?def (test_\w+)\(", source_text(), re.M))


@cache
def known_flags() -> frozenset[str]:
    """Return every flag of every command."""
    flags = {flag for command in every_command() for param in command.params for flag in param.opts}
    return frozenset(flags | {"--help"})


def every_command() -> Iterator[click.Command]:
    """Yield every command and the commands below it."""
    waiting: list[click.Command] = [make_parser(COMMANDS)]
    while waiting:
        command = waiting.pop()
        yield command
        waiting += command.commands.values() if isinstance(command, click.Group) else []


def leaves(base: type[errors.KVSpanError]) -> Iterator[type[errors.KVSpanError]]:
    """Yield the errors below `base` that somebody raises: those in the table of codes."""
    for cls in base.__subclasses__():
        if cls in CODES and cls.__module__ == errors.__name__:
            yield cls
        yield from leaves(cls)


def default_text(field: str) -> str:
    """Return the default of a setting as the flags take it."""
    default = SETTINGS[field].default
    return NOTHING if default in (MISSING, (), "") else setting_text(SETTINGS[field], default)


def service_text(field: str) -> str:
    """Return which service has a setting."""
    kinds = {"decode": DecodeConfig, "prefill": PrefillConfig}
    names = [name for name, kind in kinds.items() if field in {one.name for one in fields(kind)}]
    return "both" if len(names) == 2 else names[0]


@pytest.mark.parametrize("name", PAGES)
def test_every_file_that_is_named_exists(name: str) -> None:
    """A reader who follows a path arrives."""
    paths = {path for path in SOURCE_PATH.findall(page(name)) if "*" not in path}
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", page(name))} - {""}

    assert paths | links
    assert [path for path in sorted(paths | links) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", PAGES)
def test_every_link_within_a_page_has_its_heading(name: str) -> None:
    """The contents of a page lead to its sections."""
    headings = re.findall(r"^#+ (.+)$", prose_and_blocks(name)[0], re.M)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    wanted = re.findall(r"\]\(#([^)]+)\)", page(name))

    assert [anchor for anchor in wanted if anchor not in anchors] == []


def test_every_test_that_is_named_exists() -> None:
    """A proof that was renamed or dropped is no proof."""
    named = {word for name in PAGES for word in code_words(name) if word.startswith("test_")}

    assert len(named) > 20
    assert sorted(named - names_of_tests()) == []


def test_every_flag_that_is_named_exists() -> None:
    """A flag on a page is a flag of the command line."""
    words = {word for name in PAGES for text in code_words(name) for word in text.split()}
    named = {word.partition("=")[0] for word in words if word.startswith("--")}

    assert named
    assert sorted(named - known_flags()) == []


@pytest.mark.parametrize("name", ["up", "prefill", "decode", "demo", "generate"])
def test_the_help_of_a_flag_says_its_unit_and_its_default(name: str) -> None:
    """A flag that takes a value and may be left out has a placeholder and says what happens then."""
    (command,) = (command for command in COMMANDS if command.name == name)
    optional = [
        param
        for param in command.params
        if isinstance(param, click.Option) and not (param.is_flag or param.required or param.hidden)
    ]

    assert len(optional) > 10
    assert [param.opts for param in optional if not param.metavar] == []
    assert [
        param.opts for param in optional if not (param.show_default or "(default: " in str(param.help))
    ] == []


def test_every_command_line_can_be_parsed() -> None:
    """What is pasted is understood: our commands by their parser, others by their known flags."""
    lines = list(command_lines())
    ours = [line[1:] for line in lines if line[0] == ".venv/bin/kvspan"]

    assert len(ours) > 10
    assert [parse_line(make_parser(COMMANDS), line) for line in ours]
    for line in lines:
        if line[0] != ".venv/bin/kvspan" and line[:4] != ["docker", "compose", "exec", "decode"]:
            flags = [word for word in line if word.startswith("-")]
            assert [flag for flag in flags if flag not in FOREIGN_FLAGS] == []


def test_every_command_inside_a_container_can_be_parsed() -> None:
    """Commands for `docker compose exec` are ours behind the name of the container."""
    inside = [line[5:] for line in command_lines() if line[:4] == ["docker", "compose", "exec", "decode"]]

    assert inside
    assert [parse_line(make_parser(COMMANDS), line) for line in inside]


def test_every_make_target_that_is_named_exists() -> None:
    """`make` has what the pages promise."""
    targets = set(re.findall(r"^([a-z-]+):", page("Makefile"), re.M))
    in_blocks = {line[1] for line in command_lines() if line[0] == "make"}
    in_text = {
        text.split()[1] for name in PAGES for text in code_words(name) if re.match(r"make [a-z-]+\b", text)
    }

    assert {"demo", "test"} <= in_blocks
    assert sorted((in_blocks | in_text) - targets) == []


def test_every_command_that_is_named_exists() -> None:
    """`kvspan X` in a text is a command."""
    known = {command.name for command in COMMANDS}
    named = {
        found[1]
        for name in PAGES
        for text in code_words(name)
        if (found := re.match(r"kvspan ([a-z]+)\b", text))
    }

    assert named
    assert sorted(named - known) == []


def test_python_in_the_readme_uses_what_the_package_has() -> None:
    """The example compiles and asks for nothing that is not there."""
    blocks = [text for language, text in prose_and_blocks("README.md")[1] if language == "python"]
    nodes = [node for text in blocks for node in ast.walk(ast.parse(text))]
    used = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "kvspan"
    }

    assert used
    assert sorted(used - set(kvspan.__all__)) == []


@pytest.mark.parametrize("title", SERVICE_TABLES)
def test_tables_of_the_protocol_are_those_of_the_machines(title: str) -> None:
    """State, event and next state, row by row, and no row more or less."""
    told = {tuple(cells) for cells in rows(section(PROTOCOL, title)) if len(cells) == 3}
    machine: Mapping[tuple[Enum, Enum], Enum] = SERVICE_TABLES[title]  # type: ignore[assignment]

    assert told == {(state.value, event.value, after.value) for (state, event), after in machine.items()}


def test_every_message_of_the_stream_is_told_with_its_sender() -> None:
    """A message that is added to the contract gets its row."""
    table = rows(section(PROTOCOL, "A session, message by message"))
    senders = {
        "decode": transfer_pb2.DESCRIPTOR.message_types_by_name["TransferRequest"],
        "prefill": transfer_pb2.DESCRIPTOR.message_types_by_name["TransferResponse"],
    }
    told = {cells[0].strip("`"): cells[1] for cells in table}

    assert len(told) > 5
    assert told == {
        field.message_type.name: sender
        for sender, message in senders.items()
        for field in message.oneofs_by_name["message"].fields
        if field.message_type is not None
    }


def test_states_of_the_protocol_are_those_of_the_machines() -> None:
    """Every state of a transfer and of a prefill session is explained."""
    transfer = [cells[0] for cells in rows(section(PROTOCOL, "Transfer, decode side"))]
    session = [cells[0] for cells in rows(section(PROTOCOL, "Session, prefill side")) if len(cells) == 2]

    assert {state.value for state in TransferState} <= set(transfer)
    assert session == [state.value for state in PrefillState]


def test_bytes_of_the_example_span_are_those_of_the_layout() -> None:
    """The drawing of a span has the offsets that the code computes."""
    group = GroupGeometry(0, (0, 1), num_kv_heads=3, head_dim=8, dtype=DType.BFLOAT16, window=None)
    drawing = next(text for _, text in prose_and_blocks(PROTOCOL)[1] if "offset in the span" in text)
    offsets = [int(number) for number in drawing.splitlines()[1].split()]

    keys_0, values_0 = key_range(group, 5, 0), value_range(group, 5, 0)
    keys_1, values_1 = key_range(group, 5, 1), value_range(group, 5, 1)
    assert offsets == [
        keys_0.start, values_0.start, values_0.stop, keys_1.start, values_1.start, values_1.stop,
        span_bytes(group, 2, 5),
    ]  # fmt: skip
    assert values_0 == Range(240, 480)
    assert f"`{SPAN_LAYOUT}`" in page(PROTOCOL)


def test_every_error_has_a_row_with_its_code() -> None:
    """Whoever meets a reason finds it, with the status code that carries it and whether to try again."""
    told = {cells[0].strip("`"): cells[1:3] for cells in rows(section("docs/operations.md", "Error reasons"))}
    expected = {
        cls.code: [CODES[cls].name, "yes" if cls.retryable else "no"] for cls in leaves(errors.KVSpanError)
    }

    assert len(expected) > 20
    assert told == expected


def test_every_reason_that_is_named_exists() -> None:
    """Upper-case codes on the other pages are reasons, statuses or settings that the code has."""
    statuses = {code.name for code in CODES.values()} | {"UNIMPLEMENTED"}
    named = {word for name in PAGES for word in code_words(name) if re.fullmatch(r"[A-Z]+(?:_[A-Z]+)+", word)}
    sources = source_text() + page("compose.yaml")

    assert named
    assert [word for word in sorted(named - statuses) if not re.search(rf"\b{word}\b", sources)] == []


def test_every_log_event_has_its_level() -> None:
    """The table of events is complete and says how loud each one is."""
    told = {
        (event, cells[1])
        for cells in rows(section("docs/operations.md", "Logs"))
        for event in re.findall(r"`([\w.]+)`", cells[0])
    }
    calls = re.findall(r"logger\.(\w+)\(\s*\"([a-z_]+\.[a-z_]+)\"", source_text())
    logged = {(event, "error" if call == "exception" else call) for call, event in calls}

    # The docstring of logging.py has an example that nobody logs.
    assert told == logged - {("span.sealed", "info")}
    assert all(logging.getLevelName(level.upper()) != f"Level {level.upper()}" for _, level in told)


def test_settings_are_told_with_default_and_service() -> None:
    """The table of flags is complete, and says what the configs say."""
    table = rows(section("docs/operations.md", "Flags by task"))
    told = {cells[0].strip("`"): tuple(cells[1:3]) for cells in table if cells[0].startswith("`--")}

    assert told == {flag_name(field): (default_text(field), service_text(field)) for field in SETTINGS}


def test_nothing_but_the_port_of_decode_leaves_its_container() -> None:
    """Prefill has no network, and decode one in which no container reaches another."""
    config = yaml.safe_load(page("compose.yaml"))
    prefill, decode = config["services"]["prefill"], config["services"]["decode"]

    assert (prefill["network_mode"], prefill.get("ports"), decode["networks"]) == (
        "none",
        None,
        ["published"],
    )
    assert [port.partition(":")[0] for port in decode["ports"]] == ["127.0.0.1"]
    assert decode["healthcheck"]["test"][-1] == REMOTE_HEALTH
    options = config["networks"]["published"]["driver_opts"]
    assert options == {"com.docker.network.bridge.enable_icc": "false"}


def test_variables_of_the_containers_are_told() -> None:
    """Whoever starts the containers finds every variable that compose.yaml reads."""
    table = rows(section("docs/operations.md", "Containers"))
    told = {name for cells in table for name in re.findall(r"[A-Z]+_[A-Z_]+", cells[0])}
    lists = re.findall(r"args: \[(.*)\]", page("compose.yaml"))
    read = re.findall(r"\$\{([A-Z_]+)|^ +- ([A-Z_]+)$", page("compose.yaml"), re.MULTILINE)
    read = [*map("".join, read), *", ".join(lists).split(", ")]

    assert "TORCH_INDEX" in read
    assert told == set(read)
