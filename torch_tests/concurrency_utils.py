"""Helpers for tests that trace, compile and run models on several threads at once."""

import contextlib
import faulthandler
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch


# Longer than any step of these tests takes on a busy machine; a thread that is
# still alive afterwards hangs.
TIMEOUT = 240.0


class WorkerThread(threading.Thread):
    """Runs fn() and keeps its result or exception."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._fn = fn
        self._result: Any = None
        self._exception: BaseException | None = None

    def run(self) -> None:
        try:
            self._result = self._fn()
        except BaseException as e:
            self._exception = e

    def result(self, timeout: float = TIMEOUT) -> Any:
        """Wait for the thread; return what fn returned or raise what it raised."""
        self.join(timeout)
        if self.is_alive():
            faulthandler.dump_traceback(all_threads=True)
            raise TimeoutError(f"{self.name} hangs, see the stacks on stderr")
        if self._exception is not None:
            raise self._exception
        return self._result


def run_on_thread(fn: Callable[[], Any], timeout: float = TIMEOUT) -> Any:
    """Run fn() on a new thread and return its result."""
    thread = WorkerThread(fn)
    thread.start()
    return thread.result(timeout)


def run_on_threads(
    *fns: Callable[[], Any], timeout: float = TIMEOUT, barrier: bool = True
) -> list[Any]:
    """
    Run each function on a thread of its own and return their results in order.
    With ``barrier`` all of them start at the same moment.
    """
    start = threading.Barrier(len(fns))

    def run(fn: Callable[[], Any]) -> Any:
        if barrier:
            start.wait(timeout)
        return fn()

    threads = [WorkerThread(lambda fn=fn: run(fn)) for fn in fns]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout
    return [t.result(max(0.0, end - time.monotonic())) for t in threads]


class HeldThread(WorkerThread):
    """A thread that stops inside of fn(hold), where fn calls ``hold()``."""

    def __init__(self, fn: Callable[[Callable[[], None]], Any]) -> None:
        super().__init__(lambda: fn(self.hold))
        self._held = threading.Event()
        self._released = threading.Event()

    def hold(self) -> None:
        """Stop here, the first time that this is called on the thread itself."""
        if threading.current_thread() is not self or self._held.is_set():
            return
        self._held.set()
        if not self._released.wait(TIMEOUT):
            raise TimeoutError("a held thread was not released")

    def run(self) -> None:
        super().run()
        self._held.set()  # fn may have raised before it came to the hold

    def start_and_wait(self) -> None:
        """Start, and return once the thread is held; raise if it ended instead."""
        self.start()
        if not self._held.wait(TIMEOUT) or self._exception is not None:
            self.result(0.0)
        if not self.is_alive():
            raise AssertionError("the thread ended without being held")

    def release(self) -> None:
        self._released.set()


@contextlib.contextmanager
def thread_held_in(fn: Callable[[Callable[[], None]], Any]) -> Iterator[HeldThread]:
    """
    Run fn(hold) on another thread, and the body of the ``with`` statement while
    that thread stands where fn called ``hold()``. Leaving the body releases the
    thread and waits for it; its result is ``thread.result()``.
    """
    thread = HeldThread(fn)
    thread.start_and_wait()
    try:
        yield thread
    except BaseException:
        thread.release()
        thread.join(TIMEOUT)
        raise
    thread.release()
    thread.result()


# A backward inside of this many others runs on a thread of the engine's pool: the
# outermost one and MAX_DEPTH of torch/csrc/autograd/engine.h.
MAX_DEPTH = 1 + 60


class Call(torch.autograd.Function):
    """The identity, whose backward calls a function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fn: Callable[[], Any]) -> torch.Tensor:
        ctx.fn = fn
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.fn()
        return grad, None


def call_in_nested_backward(fn: Callable[[], Any], depth: int) -> None:
    """Call fn() inside of ``depth`` nested backwards."""

    def nested() -> None:
        if depth == 1:
            fn()
        else:
            call_in_nested_backward(fn, depth - 1)

    with torch.enable_grad():
        out = Call.apply(torch.ones((), requires_grad=True), nested)
    out.backward()
