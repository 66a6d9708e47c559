"""build.sh doctor: what torch there is, whether it is patched, and which faults show."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import common
import in_place
import series
from common import Fail, Parser, last_line, main, say

FAULTS = {
    "F1": "compiled functions raise while another thread traces",
    "F2": "reading the tracing flag is slow",
    "F3": "modules called on one thread end in another thread's trace",
    "F4": "overlapping traces leave nn.Module patched",
    "F5": "a compile on another thread undoes the patches of a trace",
    "F6": "names in a graph depend on other threads' traces",
    "F7": "is_compiling() and is_exporting() hold for every thread",
    "F8": "torch.fx.traceback state holds for every thread",
    "F9": "backward inside a trace can deadlock with another thread's compile",
    "F10": "skip_guard_eval_unsafe reaches other threads",
    "F11": "threads compile the same code one after the other",
    "F12": "higher-order operators switch off other threads' traces",
    "F13": "concurrent torch.export fails",
    "F14": "configuration does not reach autograd's threads",
    "F15": "fake tensors on threads crash without a GPU",
    "F16": "DataParallel of a compiled module fails",
    "F17": 'mode="reduce-overhead" fails or loses outputs on threads',
    "F18": "torch dispatch modes hold for every thread",
    "F19": "graphs get the streams and modules of other threads",
    "F20": "torch.cuda.set_rng_state() does nothing while another thread compiles",
    "F21": "error_on_graph_break() holds for every thread",
    "F22": "set_default_device() makes the functions of other threads recompile",
}
PROBES = Path(__file__).with_name("doctor_probes.py")
LIMIT = 300

HEALTHY, AFFECTED, UNKNOWN = 0, 1, 2


def find_torch() -> Path:
    """The package that this interpreter imports."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise Fail(f"{sys.executable} has no torch; set PYTHON to an interpreter that has", UNKNOWN)
    return Path(spec.origin).parent


def probe() -> tuple[str, dict[str, tuple[str, str]]]:
    """``torch.__version__``, and what each probe found."""
    say("probing, up to a minute ...")
    process = subprocess.Popen(
        [sys.executable, str(PROBES)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # From where no folder named torch can be in the way.
        cwd=PROBES.parent,
    )
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        out, err = "", f"no answer within {LIMIT} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("[")]
    if not lines or lines[0][0] != "torch":
        raise Fail(f"cannot tell, importing torch fails: {last_line(err)}", UNKNOWN)
    return lines[0][1], {fault: (state, detail) for fault, state, detail in lines[1:]}


def installed_series(version: str) -> dict:
    """What the patched torch says about its series; empty for an unpatched one."""
    with contextlib.suppress(Fail):
        torch = in_place.locate()
        if torch.interrupted:
            raise Interrupted(torch.interrupted)
        if torch.manifest:
            return torch.manifest
    if "fxctx." in version:
        with contextlib.suppress(Fail):
            return series.find(series.base_version(version)).describe()
    return {}


class Interrupted(Exception):
    """An apply or a revert died half-way."""


def covered(manifest: dict) -> set[str]:
    """The faults that the installed series mends."""
    return {fault for patch in manifest.get("patches", []) for fault in patch["faults"]}


def show(text: str) -> None:
    if not common.quiet:
        print(text)


def run(argv: list[str]) -> int:
    Parser("doctor").parse(argv)
    package = find_torch()
    try:
        installed_series("")
    except Interrupted as verb:
        raise Fail(
            f"the torch in {package} is half patched: ./build.sh {verb} was interrupted; run "
            "./build.sh apply or ./build.sh revert to finish it",
            UNKNOWN,
        ) from None
    version, findings = probe()
    manifest = installed_series(version)
    mended = covered(manifest)
    if manifest:
        how = "in place" if manifest.get("kind") == "in place" else "from its wheel"
        state = f"patched {how}, series {manifest['fxctx']}: {len(manifest['patches'])} patches"
    else:
        state = "not patched"
    show(f"torch {version} in {package}: {state}")
    show("     STATE       FAULT")
    counted, unknown = [], []
    for fault, (found, detail) in findings.items():
        awaited = not manifest or fault in mended
        if found == "affected" and awaited:
            counted.append(fault)
        elif found == "unknown" and awaited:
            unknown.append(fault)
        state = {"affected": "AFFECTED", "unknown": "CANNOT TELL", "ok": "OK"}.get(found, found)
        detail = f" ({detail})" if detail else ""
        later = "" if awaited or found != "affected" else "; no patch for it yet"
        show(f"{fault:4} {state:11} {FAULTS[fault]}{detail}{later}")
    return conclude(version, bool(manifest), counted, unknown)


def conclude(version: str, patched: bool, counted: list[str], unknown: list[str]) -> int:
    """Say what to do, and give the exit status."""
    if counted and patched:
        show(
            f"{', '.join(counted)} should be mended by the patches that are installed: install "
            "the wheel of ./build.sh again, or run ./build.sh revert and ./build.sh apply"
        )
        return AFFECTED
    if counted:
        try:
            fixes = {f for p in series.find(series.base_version(version)).patches for f in p.faults}
        except Fail as failure:
            show(f"to do: install another release; {failure}")
            return AFFECTED
        mended = [fault for fault in counted if fault in fixes]
        show(
            f"to do: ./build.sh apply patches this torch where it is, ./build.sh makes a patched "
            f"wheel; they mend {', '.join(mended) or 'none of these yet'}"
        )
        return AFFECTED
    if unknown:
        show(f"cannot tell whether {', '.join(unknown)} show; see the lines above")
        return UNKNOWN
    show("all is well" + (" for the faults patched so far" if patched else ""))
    return HEALTHY


if __name__ == "__main__":
    main(run)
