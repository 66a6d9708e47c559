"""A pytest plugin: every test in a forked process of its own, its outcome as a line of JSON.

A test that crashes its process, hangs or leaves torch broken then says nothing about the next
one. Used for runs on unpatched releases, where all of that happens.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import signal
import sys

import pytest
from _pytest.runner import runtestprotocol

GRACE = 15
# Standard error as it is before pytest starts to capture what tests write.
STDERR = os.dup(2)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("isolate")
    group.addoption("--isolate-timeout", type=float, default=300.0)
    group.addoption("--isolate-results", required=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool:
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports, died = run_forked(item, item.config.getoption("--isolate-timeout"))
    outcomes = [report.outcome for report in reports]
    if died:
        reports.append(
            pytest.TestReport(
                nodeid=item.nodeid,
                location=item.location,
                keywords={},
                outcome="failed",
                longrepr=died,
                when="call",
            )
        )
        outcome = "failed"
    elif "failed" in outcomes:
        outcome = "failed"
    else:
        outcome = "skipped" if "skipped" in outcomes else "passed"
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    with open(item.config.getoption("--isolate-results"), "a") as file:
        detail = died or next((short(r) for r in reports if r.outcome == "failed"), "")
        print(json.dumps([item.nodeid, outcome, detail]), file=file)
    return True


def short(report: pytest.TestReport) -> str:
    """The error of a failed test in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    return text.strip().splitlines()[0][:200] if text.strip() else "failed"


def run_forked(item: pytest.Item, limit: float) -> tuple[list[pytest.TestReport], str]:
    """Run ``item`` in a child; its reports, and how the child died if it did."""
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            # Dumps every thread's stack and ends the process, even if it hangs in native code.
            faulthandler.dump_traceback_later(limit, exit=True, file=STDERR)
            found = runtestprotocol(item, nextitem=None, log=False)
            serialize = item.config.hook.pytest_report_to_serializable
            data = [serialize(config=item.config, report=report) for report in found]
            with os.fdopen(writer, "wb") as pipe:
                pickle.dump(data, pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, limit + GRACE)
    with os.fdopen(reader, "rb") as pipe:
        content = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.setitimer(signal.ITIMER_REAL, 0)
    if status < 0:
        return [], f"the process died of {signal.Signals(-status).name}"
    if status or not content:
        return [], f"the process ended with status {status}; a test may take {limit:.0f} s"
    deserialize = item.config.hook.pytest_report_from_serializable
    return [deserialize(config=item.config, data=data) for data in pickle.loads(content)], ""
