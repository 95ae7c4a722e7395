"""A proxy on this machine that counts what it forwards, and whose network can be gone."""

import socket
import struct
import threading
from contextlib import suppress
from typing import Self

CHUNK = 1 << 16


class Proxy:
    """Forwards TCP connections to an address; listens from the start, forwards once it has one.

    Attributes:
        address: where it listens.
        up: bytes forwarded to the address so far.
        down: bytes forwarded from it.
    """

    def __init__(self, target: str | None = None) -> None:
        self.up = self.down = 0
        self._target = target
        self._there = threading.Event()  # the network
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._resets = self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads: list[threading.Thread] = []
        if target is not None:
            self._there.set()
        self._start(self._accept)

    def forward_to(self, target: str) -> None:
        """Forward to HOST:PORT from now on."""
        self._target = target
        self._there.set()

    def cut(self, *, reset: bool) -> None:
        """Let the network be gone: silently, or with connections reset and new ones refused."""
        self._resets = reset
        self._there.clear()
        if reset:
            self._drop_all()

    def heal(self) -> None:
        """Let the network be back, with what was on its way if nothing was reset."""
        self._resets = False
        self._there.set()

    def close(self) -> None:
        """End all connections and threads."""
        self._closed = True
        self._there.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._drop_all()
        for thread in self._threads:
            thread.join(timeout=30)
            assert not thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._resets:
                _reset(near)
                continue
            self._start(self._connect, near)

    def _connect(self, near: socket.socket) -> None:
        self._there.wait()
        if self._closed or self._target is None:
            _reset(near)
            return
        host, _, port = self._target.rpartition(":")
        try:
            far = socket.create_connection((host, int(port)))
        except OSError:  # nobody listens there
            _reset(near)
            return
        with self._lock:
            self._pairs.append((near, far))
        self._start(self._pump, near, far, "up")
        self._start(self._pump, far, near, "down")

    def _pump(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK):
                self._there.wait()
                sink.sendall(data)
                with self._lock:
                    setattr(self, way, getattr(self, way) + len(data))
        self._there.wait()
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def _drop_all(self) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                _reset(end)


def _reset(end: socket.socket) -> None:
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RD)  # wakes the thread that reads from it
    end.close()
