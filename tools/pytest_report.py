"""The reports that pytest writes with --junitxml."""

from __future__ import annotations

import xml.etree.ElementTree
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Result:
    """What a report says of a test."""

    name: str  # Class::test
    outcome: str  # passed, failed or skipped
    message: str  # first line of what pytest says of a test that failed or was skipped
    seconds: float


def read(path: Path) -> list[Result] | None:
    """The results of a run of pytest, one a test; None where it left no report."""
    try:
        cases = list(xml.etree.ElementTree.parse(path).iter("testcase"))
    except (OSError, xml.etree.ElementTree.ParseError):
        return None
    results: dict[str, Result] = {}
    for case in cases:
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        outcome, message = "passed", ""
        for tag, meaning in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
            if (element := case.find(tag)) is not None:
                outcome, message = meaning, (element.get("message") or "").strip()
        result = Result(name, outcome, message.partition("\n")[0], float(case.get("time") or 0))
        # A test that passes and then fails in its teardown has two cases.
        if name not in results or outcome == "failed":
            results[name] = result
    return list(results.values())
