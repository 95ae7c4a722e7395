"""Scripts on a terminal of their own."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

from forked import Forked

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(script: str, columns: int, **environment: str) -> tuple[str, str]:
    """Run a script with standard error on a terminal; return what it shows, and standard output."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    unset = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    inherited = {k: v for k, v in os.environ.items() if k not in unset}
    process = Forked(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=side,
        stdin=subprocess.DEVNULL,
        env={**inherited, "TERM": "xterm-256color", **environment},
    )
    os.close(side)
    shown = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:  # Linux says so when the other side is closed
            break
        if not part:
            break
        shown += part
    os.close(main)
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0, shown.decode()
    return shown.decode(), printed.decode()
