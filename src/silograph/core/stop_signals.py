"""Ctrl-C and SIGTERM, from the first line of the program on; this module imports nothing slow.

Python raises KeyboardInterrupt wherever it is. Inside an import of a C extension that does harm:
torch and Cython drop or replace it, and no extension can be loaded a second time. So the program
ends at once where it is importing, before torch is there: by then no run has begun.
"""

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130  # exit code of a program that was stopped by Ctrl-C
_IMPORTS = "<frozen importlib._bootstrap>"  # file name of the code that carries out an import
_WAITS = "compiling.py"  # where the main thread waits for a kernel, perhaps inside an import
_stopped_by: list[int] = []  # received signals


def handle_signals() -> None:
    """Handle SIGINT, unless it is switched off or has another handler, and SIGTERM from now on."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _stop)


def was_stopped() -> bool:
    """Return whether a signal has come; an error after it may be what became of the interrupt."""
    return bool(_stopped_by)


def exit_interrupted() -> None:
    """End the process with one line and `INTERRUPTED`, without whatever Python does at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105 - contextlib would be one more import before signals are handled
            stream.flush()
        except (AttributeError, OSError, RuntimeError, ValueError):  # closed, or just being used
            pass
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(INTERRUPTED)


def _stop(number: int, frame: FrameType | None) -> None:
    """Raise `KeyboardInterrupt`, or end the process where an import would lose it."""
    _stopped_by.append(number)
    if _is_importing(frame) and not _is_loaded("torch"):
        exit_interrupted()
    raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a frame belongs to an import, and not to the wait for a kernel in one."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTS:
            return True
        if os.path.basename(frame.f_code.co_filename) == _WAITS:
            return False
        frame = frame.f_back
    return False


def _is_loaded(name: str) -> bool:
    """Return whether a module has been imported to its end."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)
