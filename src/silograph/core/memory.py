"""Memory that arrays of one step leave to those of the next."""

import ctypes
import gc

import torch

LARGEST = (32 << 20) - (1 << 13)  # bytes, just below the most that glibc learns from


def keep_freed_memory() -> None:
    """Let glibc keep up to 64 MB of freed memory instead of handing it back after every step.

    What is handed back comes again page by page, zeroed: a quarter of a round in torch. glibc
    learns from the largest block that was ever freed (mallopt(3), M_MMAP_THRESHOLD and
    M_TRIM_THRESHOLD); other allocators are not affected.
    """
    torch.empty(LARGEST, dtype=torch.uint8)


def hand_back_freed_memory() -> None:
    """Give the system what this process has freed, where its allocator (glibc) can."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):  # of another allocator, or another system
        return
