"""A pytest plugin: threads take turns in ast.parse.

CPython keeps the depth of the tree that ast.parse makes in state of the interpreter, so two threads
that parse at once may get "SystemError: AST constructor recursion depth mismatch" (gh-106905).
TorchScript parses what it compiles.
"""

from __future__ import annotations

import ast
import threading
from typing import Any

parse, lock = ast.parse, threading.RLock()


def parse_alone(*args: Any, **kwargs: Any) -> ast.AST:
    with lock:
        return parse(*args, **kwargs)


ast.parse = parse_alone  # type: ignore[assignment]
