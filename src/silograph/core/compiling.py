"""How kernels are compiled: once for all processes, and so that Ctrl-C and SIGTERM end the wait.

numba keeps compiled code on disk, but two processes that save code of one function at once lose
one of the two or mix their files up: a later process then runs code for arrays of other types. So
one process at a time compiles and saves.

Python handles a signal between two instructions of its main thread. LLVM optimizes a kernel for
many seconds within one instruction, and an exception inside a callback of LLVM or inside numba may
get lost. So kernels are compiled in a thread of their own, for which the main thread waits.
"""

import fcntl
import gc
import hashlib
import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
F = TypeVar("F")
NAME = "silograph-compiler"


def is_compiling() -> bool:
    """Return whether a kernel is being compiled; nothing can stop that but the process's end."""
    return any(thread.name == NAME for thread in threading.enumerate())


def run_interruptible(work: Callable[[], T]) -> T:
    """Return what `work` returns or raises; an interrupt of the main thread ends the wait at once.

    The work goes on then. A process that ends waits for it, unless it ends by `os._exit`.
    """
    if threading.current_thread().name == NAME:  # a kernel that needs another one
        return work()
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=NAME).start()
    return outcome.result()


def kept_on_disk(function: F, sources: bytes | None = None) -> F:
    """Return a function that numba has made with `cache=True`, safe for many processes at once.

    Args:
        function: a dispatcher of numba.
        sources: a digest of all code that is compiled with it; by default that of its file.
    """
    from numba.core.caching import IndexDataCacheFile  # numba takes a while

    dispatcher: Any = function
    stored = dispatcher._cache
    if sources is None:
        file = Path(inspect.getfile(dispatcher.py_func))
        sources = hashlib.sha256(file.read_bytes()).digest()
    # Files by the digest: numba reads an old index before it looks at the stamp, and an index that
    # names types of another version cannot be read.
    version = sources.hex()[:16]
    folder, base = Path(stored.cache_path), f"{stored._impl.filename_base}.{version}"
    files: Any = IndexDataCacheFile(str(folder), base, sources)  # type: ignore[no-untyped-call]
    files.save = saved_alone(files.save, folder / f"{base}.lock")
    stored._cache_file = files
    name = f"{dispatcher.py_func.__name__}.{version}"
    dispatcher.compile = one_at_a_time(dispatcher.compile, folder, name)
    return function


def one_at_a_time(compiles: Callable[[Any], Any], cache: Path, name: str) -> Callable[[Any], Any]:
    """Return a function that compiles as `compiles` does, in one process at a time.

    Other kernels, and the same for other types, are compiled side by side. A process that dies
    leaves the lock to the next one.

    Args:
        compiles: compiles for a signature, unless `cache` has its code.
        cache: the folder of compiled code; where it cannot be written, nobody waits.
        name: of the kernel and its version.
    """

    def alone(signature: Any) -> Any:
        types = hashlib.sha256(str(signature).encode()).hexdigest()[:16]
        lock = cache / f"{name}.{types}.lock"
        return run_interruptible(lambda: _locked(lock, lambda: compile_one(signature)))

    def compile_one(signature: Any) -> Any:
        with _no_garbage_collected():
            return compiles(signature)

    return alone


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Put off the collection of garbage until the end of the block.

    numba makes millions of objects that stay. Visiting them, and all of torch's, again and again
    took a tenth of the time of compilation. Putting it off costs about 100 MB of memory.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def saved_alone(saves: Callable[[Any, Any], None], lock: Path) -> Callable[[Any, Any], None]:
    """Return a function that saves code as `saves` does, in one process at a time.

    numba lists the code of a function for all types in one index, which it reads, numbers the new
    file after, and replaces: of two processes that save for two types at once one would be lost,
    or take the other's file.

    Args:
        saves: saves the code for a signature.
        lock: a file of this function alone; where it cannot be written, nobody waits.
    """
    return lambda signature, code: _locked(lock, lambda: saves(signature, code))


def _locked(path: Path, work: Callable[[], Any]) -> Any:
    """Return what some work returns that one process does at a time."""
    try:
        lock = path.open("wb")
    except OSError:
        return work()
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return work()
        finally:
            # Closing is not enough: a process forked meanwhile has the file open, and its lock.
            fcntl.flock(lock, fcntl.LOCK_UN)
