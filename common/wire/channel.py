"""Channels to a service, with the options that suit two processes on one host.

Theory of operation: a dead peer shows at once on one host; keep-alive pings only find one that hangs. So an
address at which nobody listens fails a call at once, while a service that listens and is slow to answer is
waited for as long as the call's own time limit allows. Each channel has its own connection, so that a
session's stream never waits behind another client of the process.
"""

from __future__ import annotations

import grpc

from common.runtime.address import parse_address

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # A session that waits for work is pinged as often as needed.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # A restarted service is found again within about a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Not a pause, whatever its name says: the time that one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 20_000),
    ("grpc.use_local_subchannel_pool", 1),
    # The peer is on this host or named on purpose; a proxy for the internet has no part in it.
    ("grpc.enable_http_proxy", 0),
)

TARGET = "target"
"""Name of the setting that errors blame."""


def make_channel(target: str) -> grpc.aio.Channel:
    """Return an asyncio channel to `host:port` or `unix:PATH`; the caller closes it.

    Connects when it is first used. Raises: `ConfigError` when `target` is no address.
    """
    return grpc.aio.insecure_channel(parse_address(TARGET, target).uri, options=CHANNEL_OPTIONS)


def make_sync_channel(target: str) -> grpc.Channel:
    """Return a blocking channel to `host:port` or `unix:PATH`; the caller closes it.

    Connects when it is first used. Raises: `ConfigError` when `target` is no address.
    """
    return grpc.insecure_channel(parse_address(TARGET, target).uri, options=CHANNEL_OPTIONS)
