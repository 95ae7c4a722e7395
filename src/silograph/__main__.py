"""`python -m silograph`, and what the program `silograph` calls.

Signals are handled before the command line is imported, which takes a fifth of a second.
"""

from silograph.core.stop_signals import exit_interrupted, handle_signals, was_stopped

handle_signals()


def main() -> None:
    """Run the command line; an interrupt is one line and exit code 130, whenever it comes."""
    try:
        from silograph.cli import main as run_command_line

        run_command_line()
    except SystemExit:
        raise
    except BaseException as error:
        # C code may have made another error of the interrupt.
        if not was_stopped() and not isinstance(error, KeyboardInterrupt):
            raise
        exit_interrupted()


if __name__ == "__main__":
    main()
