"""The logs of both services tell the life of one request under one name."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from common.wire.failure import RemoteFailure
from tests.integration.conftest import LoadPair
from tests.support.cases import prompt_of
from tests.support.gates import failing
from tests.support.pair import make_configs, running_pair

IN_DECODE = [
    ("INFO", "request.started"),
    ("INFO", "route.chosen"),
    ("INFO", "transfer.started"),
    ("WARNING", "transfer.failed"),
    ("INFO", "transfer.drained"),
    ("ERROR", "request.failed"),
    ("INFO", "request.ended"),
]
IN_PREFILL = [
    ("INFO", "transfer.accepted"),
    ("INFO", "transfer.started"),
    ("ERROR", "engine.failed"),
    ("WARNING", "transfer.failed"),
]


async def test_lines_of_a_failed_request_join_over_both_services(
    tmp_path: Path, checkpoints: dict[str, str], load: LoadPair, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever has the client's name of a request, or its status, finds all about it by one search a log."""
    caplog.set_level(logging.INFO)
    configs = make_configs(tmp_path, checkpoints["DENSE"])
    broken = failing(load(*configs), RuntimeError("a device was lost"), prompt_len=70)
    async with running_pair(*configs, broken) as pair:
        await pair.ask(prompt_of(60), 2, request_id="job-6", route="remote")
        with pytest.raises(RemoteFailure) as caught:
            await pair.ask(prompt_of(70), 2, request_id="job-7\n", route="remote")

    lines = [(record, vars(record).get("fields", {})) for record in caplog.records]
    (name,) = (fields["request_id"] for _, fields in lines if fields.get("client_request_id") == "job-7")
    joined = [record for record, fields in lines if fields.get("request_id") == name]
    in_decode = [one for one in joined if one.name.startswith("decode_service")]
    in_prefill = [one for one in joined if one.name.startswith("prefill_service")]
    assert [(one.levelname, one.msg) for one in in_decode] == IN_DECODE
    assert [(one.levelname, one.msg) for one in in_prefill] == IN_PREFILL
    assert [one.msg for one in joined if one not in in_decode + in_prefill] == ["call.failed"]
    assert caught.value.metadata["request_id"] == name
