"""`python -m silograph`."""

from silograph.cli import main

if __name__ == "__main__":
    main()
