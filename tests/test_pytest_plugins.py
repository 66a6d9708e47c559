"""tools/inherit_plugin.py and tools/ast_plugin.py: what they change, and that it matters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from small_torch import ROOT

INHERIT = """
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

var = contextvars.ContextVar("var", default=0)


def test_threads_start_in_a_copy():
    seen = []

    def run():
        seen.append(var.get())
        var.set(2)

    class Thread(threading.Thread):
        def run(self):
            run()

    token = var.set(1)
    for thread in (threading.Thread(target=run), Thread()):
        thread.start()
        thread.join()
    with ThreadPoolExecutor(1) as pool:
        seen.append(pool.submit(var.get).result())
    assert (seen, var.get()) == ([1, 1, 1], 1)
    var.reset(token)
"""

# A thread stays at the start of its parse: CPython raises the event "compile" there.
AST = """
import ast
import sys
import threading

first, go_on = threading.Event(), threading.Event()
seen = []


def hold(event, args):
    if event == "compile" and args[1] in ("one", "two"):
        seen.append(args[1])
        if args[1] == "one":
            first.set()
            go_on.wait(20)


def test_threads_take_turns():
    sys.addaudithook(hold)
    threads = [threading.Thread(target=ast.parse, args=("x", name)) for name in ("one", "two")]
    threads[0].start()
    assert first.wait(20)
    threads[1].start()
    threads[1].join(0.5)
    alone = seen == ["one"]
    go_on.set()
    for thread in threads:
        thread.join()
    assert alone
    assert seen == ["one", "two"]
"""


def run(folder: Path, tests: str, *plugin: str) -> int:
    (folder / "test_threads.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin]
    environment = {"PYTHONPATH": str(ROOT / "tools"), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        command, cwd=folder, env=environment, timeout=120, capture_output=True, check=False
    ).returncode


def test_inherit_plugin(tmp_path: Path) -> None:
    assert run(tmp_path, INHERIT, "-p", "inherit_plugin") == 0
    inherits = getattr(sys.flags, "thread_inherit_context", False)
    assert run(tmp_path, INHERIT) == (0 if inherits else 1)


def test_ast_plugin(tmp_path: Path) -> None:
    assert run(tmp_path, AST, "-p", "ast_plugin") == 0
    assert run(tmp_path, AST) == 1
