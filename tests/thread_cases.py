"""Tests of several threads: each in a process of its own, with threads that stop where told."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import os
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

LIMIT = 120  # seconds for a test's process, unless it asks for more
STEP = 60  # seconds for one step inside it
STOCK = os.environ.get("FXCTX_STOCK_PYTHON", "")

BODIES: dict[str, Callable[..., None]] = {}


def run_body(
    body: Callable[..., None],
    python: str,
    limit: int,
    arguments: Iterable[str] = (),
    without: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run the test by this interpreter; ``without`` names a variable to leave out."""
    file = sys.modules[body.__module__].__file__
    command = [python, str(file), str(limit), body.__name__, *arguments]
    env = {name: value for name, value in os.environ.items() if name != without}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit + 30)


def in_own_process(body: Callable[..., None]) -> Callable[..., None]:
    """Run the test in a fresh interpreter, which prints all stacks should it hang."""
    BODIES[body.__name__] = body

    @functools.wraps(body)
    def test(**arguments: str) -> None:
        done = run_body(body, sys.executable, LIMIT, arguments.values())
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"

    return pytest.mark.timeout(LIMIT + 60)(test)


def here_and_stock(limit: int = LIMIT) -> Callable[[Callable[[], None]], Callable[..., None]]:
    """Run the test as in_own_process() does, and once more on the unpatched torch beside it.

    There it must get as far as side_by_side() and then fail. Needs the environments of
    ``./build.sh test``; without them only the first half runs.
    """

    def decorate(body: Callable[[], None]) -> Callable[..., None]:
        BODIES[body.__name__] = body

        @pytest.mark.timeout(limit + 60)
        @pytest.mark.parametrize("torch_is", ["here", "stock"])
        def test(torch_is: str) -> None:
            if torch_is == "here":
                done = run_body(body, sys.executable, limit)
                assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
                return
            if not STOCK:
                pytest.skip("needs the environments of ./build.sh test")
            done = run_body(body, STOCK, limit, without="PYTHONPATH")
            assert ALONE in done.stdout, f"{done.stdout}\n{done.stderr}"
            assert done.returncode, "passes on the unpatched torch, so it proves nothing"

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return decorate


def run_asked_body() -> None:
    """What the process of a test does: ``sys.argv`` names the time limit, the test, its arguments.

    Call it where ``__name__ == "__main__"``.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    faulthandler.enable()
    faulthandler.dump_traceback_later(int(sys.argv[1]), exit=True)
    BODIES[sys.argv[2]](*sys.argv[3:])


class Threads:
    """Threads whose exceptions are not lost: join() raises the first one."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def start(self, fn: Callable[..., Any], *args: Any) -> threading.Thread:
        def run() -> None:
            try:
                fn(*args)
            except BaseException as e:
                traceback.print_exc()
                self.errors.append(e)

        thread = threading.Thread(target=run, name=fn.__name__, daemon=True)
        self.threads.append(thread)
        thread.start()
        return thread

    def join(self) -> None:
        for thread in self.threads:
            thread.join(STEP)
            assert not thread.is_alive(), f"{thread.name} does not end"
        if self.errors:
            raise self.errors[0]


def reach(event: threading.Event, what: str) -> None:
    assert event.wait(STEP), f"nobody came to: {what}"


class Gate(nn.Module):
    """Passes its input through; a thread that is listed in ``stops`` stops there first, once.

    Torch traces through it, as through any module that is not one of its own.
    """

    stops: ClassVar[dict[int, Callable[[], None]]] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stop = self.stops.pop(threading.get_ident(), None)
        if stop is not None:
            stop()
        return x


class ConvNet(nn.Module):
    """A small convolutional classifier with a gate after its first block."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(3 if i == 0 else channels, channels, 3, padding=1),
                nn.BatchNorm2d(channels),
                nn.ReLU6(),
            )
            for i in range(3)
        )
        self.scale = nn.Parameter(torch.ones(channels))
        self.gate = Gate()
        self.head = nn.Linear(channels, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.gate(self.blocks[0](x))
        for block in list(self.blocks)[1:]:
            x = block(x)
        return self.head(x.mean((2, 3)) * self.scale)


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """What a trace changes for the process is as before once all traces have ended."""

    def seen() -> tuple[Any, ...]:
        return (
            nn.Module.__call__,
            nn.Module.__getattr__,
            torch.fx._symbolic_trace.is_fx_symbolic_tracing(),
            torch.compiler.is_compiling(),
        )

    before = seen()
    yield
    assert seen() == before, "a trace left something behind"


ALONE = "got the results of one thread at a time"


def side_by_side(
    held: Sequence[Callable[[], Any]], free: Sequence[Callable[[], Any]] = ()
) -> list[Any]:
    """Run each function on a thread of its own so that all overlap, and return their results.

    Each of ``held`` goes through a Gate in some trace of its own, and stops there. When all of
    them stand, those of ``free`` start at once and run to their end. Then the held ones go on one
    after the other, the first in being the first out, which no nesting of traces explains.
    """
    print(ALONE, flush=True)
    results: dict[int, Any] = {}
    inside = [threading.Event() for _ in held]
    let_go = [threading.Event() for _ in held]
    start = threading.Barrier(max(1, len(free)))
    threads = Threads()

    def run_held(i: int) -> None:
        def stop() -> None:
            inside[i].set()
            reach(let_go[i], "the turn of this thread")

        Gate.stops[threading.get_ident()] = stop
        try:
            results[i] = held[i]()
            assert threading.get_ident() not in Gate.stops, "never came to its gate"
        finally:
            inside[i].set()

    def run_free(i: int) -> None:
        start.wait(STEP)
        results[len(held) + i] = free[i]()

    with nothing_left_behind():
        started = []
        for i, event in enumerate(inside):
            started.append(threads.start(run_held, i))
            reach(event, f"the gate of thread {i}")
        for thread in [threads.start(run_free, i) for i in range(len(free))]:
            thread.join()
        for thread, event in zip(started, let_go, strict=True):
            event.set()
            thread.join()
        threads.join()
    return [results[i] for i in range(len(held) + len(free))]
