"""What a child of the zygote can be: a service as its command runs it, a client, or the oracle."""

from __future__ import annotations

import asyncio
import importlib
import resource
from collections.abc import Callable, Mapping
from typing import Any

import torch

from common.errors import ConfigError
from common.model.folder.source import parse_source
from common.model.loader import TORCH_DTYPES, load_model
from common.model.tiny import make_tiny, tiny_config
from common.telemetry.logging import configure_logging
from decode_service.app import serve as serve_decode
from decode_service.config import DecodeConfig
from kvspan.client import Client
from prefill_service.app import serve as serve_prefill
from prefill_service.config import PrefillConfig
from tests.faults.gates import Gates, install_decode, install_prefill
from tests.faults.zygote import Task

Arguments = Mapping[str, Any]

EXIT_CONFIG = 2
"""Exit code of a service that refused its configuration, as the command has it."""


def run_prefill(arguments: Arguments) -> int:
    """Be a prefill service."""
    options = tuple(arguments["config"].get("engine_option", ()))
    config = PrefillConfig(**{**arguments["config"], "engine_option": options})
    return _serve(arguments, install_prefill, lambda ready: serve_prefill(config, ready))


def run_decode(arguments: Arguments) -> int:
    """Be a decode service."""
    given = {**arguments["config"], "prefill": tuple(arguments["config"]["prefill"])}
    config = DecodeConfig(**given)
    return _serve(arguments, install_decode, lambda ready: serve_decode(config, ready))


def _serve(arguments: Arguments, install: Callable[[Gates], None], serve: Callable[..., Any]) -> int:
    configure_logging(arguments["name"])
    if limit := arguments["num_descriptors"]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    gates = Gates(arguments["control"], arguments["name"])
    install(gates)
    for order in arguments["armed"]:
        gates.arm(**order)
    for name, value in arguments["constants"].items():
        module, _, constant = name.rpartition(".")
        setattr(importlib.import_module(module), constant, value)
    try:
        asyncio.run(serve(lambda address: gates.say(ready=address)))
    except ConfigError as error:
        gates.say(refused=str(error))
        return EXIT_CONFIG
    return 0


def run_client(arguments: Arguments) -> int:
    """Be a client that is in the middle of an answer until it is killed."""
    gates = Gates(arguments["control"], arguments["name"])
    with Client(arguments["target"]) as client:
        gates.say(ready="")
        for count, _ in enumerate(client.generate(**arguments["request"]), 1):
            gates.say(at=f"tokens{count}")
    return 0


def run_oracle(arguments: Arguments) -> int:
    """Tell what transformers' own `generate` answers, greedy and in fp32, to each prompt."""
    gates = Gates(arguments["control"], arguments["name"])
    torch.set_num_threads(1)
    loaded = load_model(arguments["model"], "float32", progress=False)
    family = parse_source(arguments["model"]).family
    assert family is not None
    # A copy that kvspan never touched, with the weights of the one that services load.
    model = make_tiny(tiny_config(family), 0, TORCH_DTYPES[loaded.dtype])
    model.load_state_dict(loaded.model.state_dict())
    answers = []
    with torch.inference_mode():
        for prompt, num_tokens in arguments["prompts"]:
            ids = torch.tensor([prompt])
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=[],
                pad_token_id=0,
            )
            answers.append(output[0, len(prompt) :].tolist())
    gates.say(ready="", answers=answers)
    return 0


TASKS: Mapping[str, Task] = {
    "prefill": run_prefill,
    "decode": run_decode,
    "client": run_client,
    "oracle": run_oracle,
}
