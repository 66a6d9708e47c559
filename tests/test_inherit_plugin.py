"""tools/inherit_plugin.py: threads start in a copy of their starter's context."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from small_torch import ROOT

TESTS = """
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


def run(folder: Path, *plugin: str) -> int:
    (folder / "test_threads.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin]
    environment = {"PYTHONPATH": str(ROOT / "tools"), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        command, cwd=folder, env=environment, timeout=120, capture_output=True, check=False
    ).returncode


def test_inherit_plugin(tmp_path: Path) -> None:
    assert run(tmp_path, "-p", "inherit_plugin") == 0
    inherits = getattr(sys.flags, "thread_inherit_context", False)
    assert run(tmp_path) == (0 if inherits else 1)
