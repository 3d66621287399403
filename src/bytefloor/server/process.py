"""The server as a process: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from bytefloor.errors import RequestError
from bytefloor.server.app import create_app
from bytefloor.server.service import Service

SWITCH_S = 2e-4
"""After which a thread that computes lets another have its turn. The engine's waits for it at each step, and the event
loop would keep it waiting for python's own 5 ms, longer than a step takes."""
LOG = logging.getLogger("bytefloor.server")
GRACE_S = 5
"""For the last bytes of answers, once no request runs any more."""


class Server(uvicorn.Server):
    """uvicorn's, which leaves signals to `serve`: new requests get an answer while the running ones finish."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None."""
        yield


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address but does not listen yet; port 0 takes a free one. RequestError if it is taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"cannot listen on {host} port {port}: {reason}") from None
    return bound


def make_server(service: Service) -> Server:
    """For `Server.serve(sockets=[...])`."""
    config = uvicorn.Config(
        create_app(service),
        log_config=None,
        access_log=False,
        lifespan="on",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    return Server(config)


async def stop(service: Service, server: Server) -> None:
    """Take nothing new, let what runs finish, end."""
    LOG.info("stopping", extra={"facts": {"open": service.worker.n_open}})
    n_cut = await service.drain()
    LOG.info("stopped", extra={"facts": {"cut_short": n_cut}})
    server.should_exit = True


async def serve(service: Service, bound: socket.socket) -> int:
    """Serve until SIGTERM or SIGINT, of which a second one waits for nobody. The exit status: 1 for a broken engine."""
    server = make_server(service)
    loop = asyncio.get_running_loop()
    stopping: asyncio.Task[None] | None = None

    def on_signal() -> None:
        nonlocal stopping
        if stopping is None:
            stopping = loop.create_task(stop(service, server))
        else:
            server.force_exit = server.should_exit = True

    def on_broken() -> None:
        # A moment in which /health says why.
        loop.call_later(GRACE_S, setattr, server, "should_exit", True)

    service.worker.on_broken = on_broken
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    # What is there now stays. To look through a large vocabulary for garbage takes a quarter of a second, in which
    # nobody else runs.
    gc.freeze()
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        await server.serve(sockets=[bound])
    finally:
        gc.unfreeze()
        sys.setswitchinterval(switch_s)
    return 1 if service.worker.broken is not None else 0
