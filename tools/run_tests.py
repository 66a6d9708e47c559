"""build.sh test: an environment with the patched release, and the tests in it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import common
import dev_tree
import make_wheel
import pytest_report
import releases
import series
import upstream_compare
from common import ROOT, VENVS, Fail, Parser, git, main, run_logged, say, scratch

REQUIREMENTS = ROOT / "requirements-test.txt"
NEWEST = ROOT / "requirements-newest.txt"
STOCK_PASSES = ROOT / "tests" / "stock_passes"
TORCH_PACKAGES = ("torch", "functorch", "torchgen")

TEST_TIMEOUT = 300
FILE_TIMEOUT = 1800
# Of a test that should pass on an unpatched release.
GUARD_RETRIES = 2


@dataclass
class Environment:
    """A virtual environment under .venvs/ and what it was made from."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site(self) -> Path:
        return next(self.folder.glob("lib/python3*/site-packages"))

    def made_from(self, key: str) -> bool:
        stamp = self.folder / "made-from"
        return stamp.exists() and stamp.read_text() == key and self.python.exists()

    def stamp(self, key: str) -> None:
        (self.folder / "made-from").write_text(key)


def digest(*parts: str) -> str:
    return hashlib.sha256("\n".join([sys.version, *parts]).encode()).hexdigest()


def stock_environment(
    chosen: series.Series, wheel: releases.Wheel, options: list[str]
) -> Environment:
    """An environment with the official wheel, its dependencies and the tests' ones."""
    made = Environment(VENVS / chosen.release)
    requirements = [REQUIREMENTS]
    if f"torch=={chosen.release}" in NEWEST.read_text().splitlines():
        requirements.append(NEWEST)
    texts = [path.read_text() for path in requirements]
    key = digest(wheel.path.name, str(wheel.path.stat().st_size), *texts)
    if made.made_from(key):
        return made
    say(f"installing torch {wheel.version} and its dependencies in {made.folder} ...")
    shutil.rmtree(made.folder, ignore_errors=True)
    releases.make_venv(made.folder)
    pip = [made.python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    files = [f"--requirement={path}" for path in requirements[1:]]
    run_logged([*pip, *options, wheel.path, *files], f"cannot install torch {wheel.version}")
    # An index named for torch need not have the rest.
    others = [option for option in options if not option.startswith("--index-url")]
    run_logged([*pip, *others, f"--requirement={REQUIREMENTS}"], "cannot install the tests' needs")
    made.stamp(key)
    return made


def patched_environment(stock: Environment, wheel: Path) -> Environment:
    """An environment with the patched wheel; all else is linked from the stock one.

    The dependencies of a CUDA wheel take 4 GB, and its libraries look for them beside torch.
    """
    made = Environment(stock.folder.with_name(f"{stock.folder.name}-fxctx"))
    key = digest(wheel.name, str(make_wheel.manifest_of(wheel)["key"]), made_key(stock))
    if made.made_from(key):
        return made
    say(f"installing {wheel.name} in {made.folder} ...")
    shutil.rmtree(made.folder, ignore_errors=True)
    releases.make_venv(made.folder, with_pip=False)
    for entry in stock.site.iterdir():
        if entry.name not in TORCH_PACKAGES and not re.match(r"torch-.*\.dist-info", entry.name):
            (made.site / entry.name).symlink_to(entry)
    install = ["-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index"]
    run_logged([made.python, *install, "--no-deps", wheel], f"cannot install {wheel.name}")
    made.stamp(key)
    return made


def made_key(environment: Environment) -> str:
    return (environment.folder / "made-from").read_text()


@dataclass
class Counts:
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"

    def fail(self, what: str) -> None:
        self.failed += 1
        self.failures.append(what)

    def add_junit(self, path: Path, name: str) -> bool:
        """Add the results of one run of pytest; False where it left none."""
        found = pytest_report.read(path)
        for test in found or ():
            if test.outcome == "failed":
                self.fail(f"{name}: {test.name.replace('::', '.')}")
            elif test.outcome == "skipped":
                self.skipped += 1
            else:
                self.passed += 1
        return found is not None


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Paths in this repository (``tests/test_x.py::test_y``) and other arguments for pytest."""
    paths, others = [], []
    for argument in arguments:
        file = argument.partition("::")[0]
        inside = not argument.startswith("-") and re.match(r"(torch_)?tests(/|$)", file)
        if inside:
            paths.append(argument)
        else:
            others.append(argument)
    return paths, others


def select(paths: list[str], top: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The test files in ``folder`` that ``paths`` ask for: name, and what to run of each."""
    for file in sorted(folder.rglob("test_*.py")):
        name = str(file.relative_to(folder))
        if not paths:
            yield name, [name]
            continue
        wanted = []
        for path in paths:
            asked, _, test = path.partition("::")
            asked = asked.rstrip("/")
            if f"{top}/{name}" == asked or f"{top}/{name}".startswith(f"{asked}/"):
                wanted.append(f"{name}::{test}" if test else name)
        if wanted:
            yield name, wanted


def environment_for(python: Path, stock: Environment, caches: Path) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    return env | {
        "PYTHON": str(python),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONNOUSERSITE": "1",
        "FXCTX_STOCK_PYTHON": str(stock.python),
        # Nothing compiled by an earlier run, so that what a test waits for in a compile comes.
        "TORCHINDUCTOR_CACHE_DIR": str(caches),
    }


def run_pytest(
    command: list[str | Path], folder: Path, env: dict[str, str], limit: float
) -> int | None:
    """Run pytest; its exit status, or None when it had to be killed."""
    sys.stdout.flush()
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Compile workers and the like that a test has left behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def pytest_command(python: Path, folder: Path) -> list[str | Path]:
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={folder}"]
    return [*command, "-q"] if common.quiet else command


def run_file(
    name: str, command: list[str | Path], folder: Path, env: dict[str, str], counts: Counts
) -> bool:
    """Run one file of tests in its own process and count; False where nothing in it matches."""
    say(f"--- {name}")
    with tempfile.TemporaryDirectory(prefix="fxctx-") as temporary:
        report = Path(temporary, "junit.xml")
        options = [f"--timeout={TEST_TIMEOUT}", "--timeout-method=thread"]
        status = run_pytest([*command, *options, f"--junitxml={report}"], folder, env, FILE_TIMEOUT)
        if status == 5:
            return False
        before = counts.failed
        read = counts.add_junit(report, name)
    if status is None:
        counts.fail(f"{name}: killed after {FILE_TIMEOUT} s")
    elif not read or (status and counts.failed == before):
        counts.fail(f"{name}: pytest ended with status {status}")
    return True


def test_patched(
    python: Path, stock: Environment, tests: dict[str, bytes], arguments: list[str]
) -> Counts:
    """Run the tests of the series and those of this project, each file in its own process."""
    paths, others = split_arguments(arguments)
    counts = Counts()
    with tempfile.TemporaryDirectory(prefix="fxctx-") as name:
        temporary = Path(name)
        torch_tests = temporary / "torch_tests"
        series.write_tree(tests, torch_tests)
        env = environment_for(python, stock, temporary / "inductor")
        ran = False
        for top, folder in (("torch_tests", torch_tests), ("tests", ROOT / "tests")):
            config = ["-c", os.devnull] if top == "torch_tests" else []
            for file, wanted in select(paths, top, folder):
                command = [*pytest_command(python, folder), *config, *others, *wanted]
                ran |= run_file(f"{top}/{file}", command, folder, env, counts)
        if not ran:
            raise Fail("no test matches these arguments")
    return counts


def test_in_order(stock: Environment, chosen: series.Series, wheel: releases.Wheel) -> Counts:
    """Run the tests of each patch with the patches up to it applied, and none after it."""
    counts = Counts()
    with scratch("order") as temporary:
        tree = temporary / "tree"
        dev_tree.make(tree, chosen, wheel)
        commits = git(tree, "rev-list", "--reverse", f"{dev_tree.BASE}..HEAD").stdout.split()
        for patch, commit in zip(chosen.python_patches, commits, strict=True):
            git(tree, "checkout", "-q", "--detach", commit)
            env = environment_for(stock.python, stock, temporary / f"inductor-{patch.name[:4]}")
            env["PYTHONPATH"] = str(tree)
            for path in patch.paths:
                if re.fullmatch(r"test/(.*/)?test_\w+\.py", path) and (tree / path).exists():
                    folder = tree / "test"
                    command = [*pytest_command(stock.python, folder), "-c", os.devnull]
                    command.append(path.removeprefix("test/"))
                    run_file(f"{patch.name[:4]}: {path}", command, folder, env, counts)
    return counts


def read_stock_passes(release: str) -> set[str]:
    """The tests that must pass on the unpatched release too; those after a '?' may."""
    path = STOCK_PASSES / f"v{release}.txt"
    if not path.exists():
        return set()
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return {line for line in lines if line}


def run_with_retries(
    run_tests: Callable[[list[str]], dict[str, tuple[str, str]]],
    wanted: list[str],
    guards: set[str],
) -> dict[str, tuple[str, str]]:
    """Run the ``wanted`` tests; those that should pass have more than one try.

    An unpatched release has races, and a test that has nothing to do with one may meet it.
    """
    results = run_tests(wanted)
    for _ in range(GUARD_RETRIES):
        again = [test for test in results if test in guards and results[test][0] == "failed"]
        if not again:
            break
        for test in again:
            say(f"should pass unpatched, once more: {test}: {results[test][1]}")
        results |= run_tests(again)
    return results


def test_stock(stock: Environment, chosen: series.Series, arguments: list[str]) -> Counts:
    """Run the tests of the series on the unpatched release, and hold them to what is expected.

    A test counts as passed here when it fails on the unpatched release, or when it is listed in
    tests/stock_passes/ and passes.
    """
    paths, others = split_arguments(arguments)
    counts = Counts()
    guards = read_stock_passes(chosen.release)
    results: dict[str, tuple[str, str]] = {}
    with tempfile.TemporaryDirectory(prefix="fxctx-") as name:
        temporary = Path(name)
        torch_tests = temporary / "torch_tests"
        series.write_tree(chosen.tests(), torch_tests)
        env = environment_for(stock.python, stock, temporary / "inductor")
        env["PYTHONPATH"] = str(ROOT / "tools")
        lines = temporary / "results"
        command = [*pytest_command(stock.python, torch_tests), "-c", os.devnull]
        command += ["-p", "isolate_plugin", "-p", "no:timeout", "--tb=no", "-rN"]
        command += [f"--isolate-results={lines}", f"--isolate-timeout={TEST_TIMEOUT}", *others]

        def run_isolated(tests: list[str]) -> dict[str, tuple[str, str]]:
            """Run tests of one file: outcome and detail of each."""
            lines.write_text("")
            status = run_pytest([*command, *tests], torch_tests, env, 2 * FILE_TIMEOUT)
            if status not in (0, 1, 5):
                file = tests[0].partition("::")[0]
                counts.fail(f"torch_tests/{file}: pytest ended with status {status}")
            read = map(json.loads, lines.read_text().splitlines())
            return {test: (outcome, detail) for test, outcome, detail in read}

        for file, wanted in select(paths, "torch_tests", torch_tests):
            say(f"--- torch_tests/{file} on the unpatched torch {chosen.release}")
            results |= run_with_retries(run_isolated, wanted, guards)
    if not results and not counts.failed:
        raise Fail("no test matches these arguments")
    if "F15" in chosen.faults:
        # It ends any test that makes fake tensors on threads, where there is no GPU
        guards |= {f"? {test}" for test, (_, why) in results.items() if why.endswith("SIGSEGV")}
    judge(results, guards, counts, partial=bool(arguments))
    return counts


def unexpected(test: str, outcome: str, guards: set[str]) -> str | None:
    """What is wrong with the outcome of a test on an unpatched release; None where nothing is."""
    if outcome == "skipped" or f"? {test}" in guards:
        return None
    if test in guards:
        return "should pass on the unpatched release" if outcome == "failed" else None
    return "passes on the unpatched release, so it proves nothing" if outcome == "passed" else None


def judge(
    results: dict[str, tuple[str, str]], guards: set[str], counts: Counts, partial: bool
) -> None:
    """Hold what happened on an unpatched release against what is expected there."""
    for test, (outcome, detail) in results.items():
        if why := unexpected(test, outcome, guards):
            counts.fail(f"{test}: {why}: {detail}".removesuffix(": "))
        elif outcome == "skipped":
            counts.skipped += 1
        elif f"? {test}" in guards:
            counts.passed += 1
            say(f"{outcome} unpatched, which is left to chance: {test}: {detail}")
        else:
            counts.passed += 1
            if outcome == "failed":
                say(f"fails unpatched, as it should: {test}: {detail}")
    with_gpu = any("CUDA::" in test for test in results)
    for test in sorted({guard.removeprefix("? ") for guard in guards} - set(results)):
        if not partial and ("CUDA::" not in test or with_gpu):
            counts.fail(f"{test}: listed in {STOCK_PASSES.name}/, but there is no such test")


def test_upstream(
    folder: Path, patched: Environment, stock: Environment, arguments: list[str]
) -> int:
    """Run PyTorch's own tests on the unpatched and on the patched release."""
    with tempfile.TemporaryDirectory(prefix="fxctx-") as caches:

        def runner(environment: Environment) -> upstream_compare.Runner:
            env = environment_for(environment.python, stock, Path(caches))
            command = [environment.python, "-m", "pytest", "-p", "no:cacheprovider"]
            command += ["-c", os.devnull, f"--timeout={upstream_compare.TIMEOUT}"]

            def run_in(arguments: list[str], folder: Path) -> int | None:
                return run_pytest(
                    [*command, f"--rootdir={folder}", *arguments],
                    folder,
                    upstream_compare.environment(env),
                    upstream_compare.FILE_TIMEOUT,
                )

            return run_in

        return upstream_compare.compare(
            folder.absolute(), runner(stock), runner(patched), arguments
        )


def run(argv: list[str]) -> int:
    arguments = []
    if "--" in argv:
        argv, arguments = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    parser = Parser("test")
    releases.add_release_options(parser)
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--in-order", action="store_true")
    parser.add_argument("--upstream", metavar="DIR")
    args = parser.parse(argv)
    if args.in_order and (args.stock or args.upstream or arguments):
        raise Fail("--in-order runs every test of the series; drop the other options", 2)
    if args.stock and args.upstream:
        raise Fail("--upstream compares with the unpatched release by itself; drop --stock", 2)
    if args.upstream:
        upstream_compare.find_files(Path(args.upstream))  # Before the long part.
    chosen, wheel = releases.choose(args)
    stock = stock_environment(chosen, wheel, releases.index_options(args))
    if args.stock:
        counts = test_stock(stock, chosen, arguments)
        what = f"unpatched torch {wheel.torch_version}, tests as expected"
    elif args.in_order:
        counts = test_in_order(stock, chosen, wheel)
        what = f"torch {wheel.torch_version}, the patches one after the other"
    else:
        patched = patched_environment(stock, make_wheel.make(chosen, wheel))
        if args.upstream:
            return test_upstream(Path(args.upstream), patched, stock, arguments)
        counts = test_patched(patched.python, stock, chosen.tests(), arguments)
        what = f"patched torch {wheel.torch_version}"
    for failure in counts.failures:
        print(f"FAILED {failure}")
    print(f"{what}:\n{counts}")
    return 1 if counts.failed else 0


if __name__ == "__main__":
    main(run)
