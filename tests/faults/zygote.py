"""One process that has imported everything and forks a child for each service, in place of a slow start.

Theory of operation: importing torch takes seconds, forking takes milliseconds. The zygote has one thread, no
channel and no model, so that a child starts from the same state as a fresh interpreter after its imports.
It reads one JSON object a line from a socket, forks, and tells when a child has ended:

    {"task": "prefill", "name": "p1", "log": "/…/p1.log", "arguments": {…}}   ->   {"name": "p1", "pid": 7}
                                                                              ->   {"name": "p1", "code": 0}

Ownership: children ask the kernel to be killed with the zygote, and the zygote with whoever started it; it
ends when its socket does.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

PR_SET_PDEATHSIG = 1

EXIT_BROKEN = 70
"""Exit code of a task that ended with an exception."""

Task = Callable[[Mapping[str, Any]], int]


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Zygote:
    """Forks on request; belongs to the main thread of its process."""

    def __init__(self, channel: socket.socket, tasks: Mapping[str, Task]) -> None:
        self._channel = channel
        self._tasks = tasks
        self._names: dict[int, str] = {}
        # Invariant: holds the children that have not been waited for, by process id.
        self._rest = b""

    def run(self) -> None:
        """Serve until the socket ends."""
        woken, waker = socket.socketpair()
        woken.setblocking(False)
        waker.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(waker.fileno())
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if woken in ready:
                    woken.recv(4096)
                    self._reap()
                if self._channel in ready and not self._read():
                    return

    def _read(self) -> bool:
        received = self._channel.recv(1 << 16)
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            self._fork(json.loads(line))
        return bool(received)

    def _fork(self, order: Mapping[str, Any]) -> None:
        pid = os.fork()
        if pid == 0:
            self._become(order)
        self._names[pid] = order["name"]
        self._say({"name": order["name"], "pid": pid})

    def _become(self, order: Mapping[str, Any]) -> None:
        """Be the child: run the task and end the process; does not return."""
        code = EXIT_BROKEN
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent()
            _redirect(order["log"])
            os.closerange(3, 256)
            code = self._tasks[order["task"]](order["arguments"])
        except BaseException:  # noqa: BLE001 - the child ends here and tells why
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        while self._names:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._say({"name": self._names.pop(pid), "code": os.waitstatus_to_exitcode(status)})

    def _say(self, message: Mapping[str, Any]) -> None:
        self._channel.sendall(json.dumps(message).encode() + b"\n")


def _redirect(log: str) -> None:
    """Send what the child says to its log and let it read nothing."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, number in ((nothing, 0), (target, 1), (target, 2)):
        os.dup2(source, number)
    os.close(target)
    os.close(nothing)


def main() -> None:
    """Run as `python -m tests.faults.zygote FD`."""
    die_with_parent()
    channel = socket.socket(fileno=int(sys.argv[1]))
    from tests.faults.tasks import TASKS

    # Children look for garbage among what they made, not among all modules of torch.
    gc.freeze()
    channel.sendall(b'{"name": "zygote", "pid": %d}\n' % os.getpid())
    Zygote(channel, TASKS).run()


if __name__ == "__main__":
    main()
