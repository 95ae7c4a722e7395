"""The process of a worker: reads calls from standard input, and writes reports to its output.

It ends when its input does, even during a call, so no worker outlives its engine.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine, which ends its workers

import os  # noqa: E402 - an interrupt during the imports would print a traceback
import sys  # noqa: E402
import threading  # noqa: E402
from queue import SimpleQueue  # noqa: E402
from typing import Any  # noqa: E402

from silograph.federation.workers.packing import Packed, unpack  # noqa: E402
from silograph.federation.workers.processes import read_message, write_message  # noqa: E402
from silograph.federation.workers.worker import WorkerServer  # noqa: E402


def listen(calls: "SimpleQueue[tuple[str, list[Packed]]]") -> None:
    """Pass calls on to `main`; end the process when the engine has closed its input."""
    try:
        while True:
            method, number = unpack(read_message(sys.stdin.buffer))
            calls.put((method, [read_message(sys.stdin.buffer) for _ in range(number)]))
    except EOFError:
        os._exit(0)


def main() -> None:
    """Carry out calls until the input ends."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not look like a report
    calls: SimpleQueue[tuple[str, Any]] = SimpleQueue()
    threading.Thread(target=listen, args=(calls,), daemon=True).start()
    server = WorkerServer()
    while True:
        method, arguments = calls.get()
        write_message(output, server.handle(method, *arguments))


if __name__ == "__main__":
    main()
