"""A pytest plugin: threads start in a copy of the context of the thread that starts them.

Free-threaded CPython 3.14 does so (sys.flags.thread_inherit_context), where each thread that is
started inside a trace finds the trace in its context. With this plugin any CPython does.

    PYTHONPATH=tools python -m pytest -p inherit_plugin torch_tests
"""

from __future__ import annotations

import contextvars
import threading

start_in_empty_context = threading.Thread.start


def start_in_copied_context(thread: threading.Thread) -> None:
    run, context = thread.run, contextvars.copy_context()
    thread.run = lambda: context.run(run)  # type: ignore[method-assign]
    start_in_empty_context(thread)


threading.Thread.start = start_in_copied_context  # type: ignore[method-assign]
