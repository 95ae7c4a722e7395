"""`python -m silograph.cli.child_process`: the command line, in a process that its parent ends.

Standard input is a pipe that the parent holds open. When it closes, however the parent ended, so
does the process; a parent that is killed can tell its children nothing.
"""

import os
import threading

from silograph.core.stop_signals import handle_signals


def end_with_input() -> None:
    """Wait for the end of standard input, and end the process."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    handle_signals()  # before the command line is imported
    threading.Thread(target=end_with_input, daemon=True).start()
    from silograph.cli import main

    main()
