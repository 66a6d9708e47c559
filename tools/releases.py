"""Which release to work on, and its official wheel, through pip."""

from __future__ import annotations

import argparse
import base64
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import common
import series
from common import BUILD, Fail, Parser, last_line, run_logged, say, scratch

NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|Failed to establish a new connection|"
    r"Temporary failure in name resolution|Network is unreachable|ConnectTimeoutError|"
    r"ReadTimeoutError|Connection aborted|ProxyError|SSLError"
)
NOT_FOUND = re.compile(r"No matching distribution found|Could not find a version")
CAPPED = re.compile(r"The user requested \(constraint\) (torch\S*)")


class NotHere(Fail):
    """pip was asked, and does not give this release."""


def add_release_options(parser: Parser) -> None:
    """The options of every verb that may have to fetch a wheel."""
    parser.add_argument("--torch", metavar="V")
    parser.add_argument("--index-url", "-i", metavar="URL")
    parser.add_argument("--extra-index-url", metavar="URL", action="append", default=[])
    parser.add_argument("--find-links", "-f", metavar="DIR", action="append", default=[])
    parser.add_argument("--no-index", action="store_true")


def index_options(args: argparse.Namespace) -> list[str]:
    """The options among ``args`` that are for pip."""
    options = [f"--index-url={args.index_url}"] if args.index_url else []
    options += [f"--extra-index-url={url}" for url in args.extra_index_url]
    options += [f"--find-links={place}" for place in args.find_links]
    return options + (["--no-index"] if args.no_index else [])


@dataclass(frozen=True)
class Wheel:
    """An official wheel on disk."""

    path: Path

    @functools.cached_property
    def dist_info(self) -> str:
        with zipfile.ZipFile(self.path) as archive:
            for name in archive.namelist():
                folder, _, rest = name.partition("/")
                if folder.endswith(".dist-info") and rest == "METADATA":
                    return folder
        raise Fail(f"{self.path} is not a wheel")

    @property
    def version(self) -> str:
        """The version of the distribution, as pip sees it: ``2.11.0`` or ``2.13.0+cpu``."""
        return self.dist_info.removesuffix(".dist-info").partition("-")[2]

    def read(self, path: str) -> bytes | None:
        """The content of a file of the release, None where there is none."""
        with zipfile.ZipFile(self.path) as archive:
            try:
                return archive.read(path)
            except KeyError:
                return None

    @functools.cached_property
    def torch_version(self) -> str:
        """``torch.__version__``: ``2.11.0+cu130`` where the distribution is ``2.11.0``."""
        return version_in(self.read("torch/version.py") or b"")


def version_in(content: bytes) -> str:
    """``torch.__version__`` as torch/version.py states it."""
    found = re.search(rb"^__version__ = '([^']+)'", content, re.MULTILINE)
    if not found:
        raise Fail("torch/version.py of this release states no version")
    return found.group(1).decode()


def installed_version() -> str | None:
    """The version to ask pip for to get what is installed for this interpreter."""
    for entry in sys.path[1:]:
        for found in importlib.metadata.distributions(name="torch", path=[entry]):
            told = found.read_text("fxctx/manifest.json")
            if told:
                return json.loads(told)["base"]
            return found.version
    return None


def pip(*arguments: str) -> list[str]:
    if importlib.util.find_spec("pip") is None:
        raise Fail(
            f"{sys.executable} has no pip; set PYTHON to an interpreter that has, or run "
            f"'{sys.executable} -m ensurepip'"
        )
    return [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check"]


def wheel_cache(options: list[str]) -> Path:
    """Where wheels from these indexes, for this interpreter, are kept."""
    settings = subprocess.run(pip("config", "list"), capture_output=True, text=True).stdout
    environment = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("PIP_")]
    tag = [sys.implementation.cache_tag, sysconfig.get_platform()]
    key = json.dumps([settings, environment, tag, options])
    return BUILD / "wheels" / hashlib.sha256(key.encode()).hexdigest()[:12]


def cached_wheel(folder: Path, version: str) -> Wheel | None:
    wanted = [version] if "+" in version else [version, f"{version}+*"]
    for pattern in wanted:
        for path in sorted(folder.glob(f"torch-{pattern}-*.whl")):
            return Wheel(path)
    return None


def fetch(version: str, options: list[str]) -> Wheel:
    """The official wheel of ``version``, from build/ or through pip.

    Raises:
        Fail: pip has no such wheel here, or no network.
    """
    folder = wheel_cache(options)
    at_hand = cached_wheel(folder, version)
    if at_hand:
        return at_hand
    say(f"fetching the wheel of torch {version} with pip ...")
    with scratch("download") as temporary:
        command = pip("download", "--no-deps", "--only-binary=:all:", f"--dest={temporary}")
        command += [*options, f"torch=={version}"]

        def download(stdout: int | TextIO) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )

        done = download(subprocess.DEVNULL if common.quiet else sys.stderr)
        told = done.stderr
        if done.returncode and "ResolutionImpossible" in told:
            # What it conflicts with is in the other stream, after the progress.
            done = download(subprocess.PIPE)
            told = done.stdout + done.stderr
        if done.returncode:
            raise (Fail if NETWORK.search(told) else NotHere)(explain(version, told))
        found = next(temporary.glob("torch-*.whl"))
        folder.mkdir(parents=True, exist_ok=True)
        return Wheel(Path(shutil.move(found, folder / found.name)))


def explain(version: str, told: str) -> str:
    """One line for a failed ``pip download``."""
    capped = CAPPED.search(told)
    if capped:
        return (
            f"pip's constraints ask for {capped.group(1)}, so torch {version} cannot be had; "
            "lift the constraint or choose another release with --torch"
        )
    if NETWORK.search(told):
        return (
            f"pip could not reach the package index for torch {version}; check the network, or "
            "name a folder that has the wheel with --find-links"
        )
    if "No space left on device" in told:
        return "no space left on device; free some space and run again"
    if NOT_FOUND.search(told):
        return (
            f"pip finds no torch {version} for this Python "
            f"({sys.version_info.major}.{sys.version_info.minor}); choose a release with --torch, "
            "or another index with --index-url"
        )
    return f"pip could not fetch torch {version}: {last_line(told)}"


def choose(args: argparse.Namespace, new_release: bool = False) -> tuple[series.Series, Wheel]:
    """The series to apply and the official wheel to apply it to, as the options ask.

    Args:
        args: has what ``add_release_options`` adds.
        new_release: take a release that ``--torch`` names even where it has no series yet.

    Raises:
        Fail: no series for the release, or no wheel.
    """
    options = index_options(args)
    version = args.torch or installed_version()
    if version:
        version = series.base_version(version.removeprefix("v"))
        if new_release and args.torch:
            return series.find_or_empty(version), fetch(version, options)
        return series.find(version), fetch(version, options)
    failure = Fail("there are no patches here")
    for candidate in series.all_series():
        if not candidate.patches:
            continue
        try:
            return candidate, fetch(candidate.release, options)
        except Fail as error:
            failure = error
            if not isinstance(error, NotHere):
                break
    raise failure


def wheel_tool() -> list[str]:
    """The command of the ``wheel`` package: the interpreter's own, or a private one."""
    own = [sys.executable, "-m", "wheel"]
    if knows_local_version(own):
        return own
    folder = BUILD / "wheel-tool"
    private = [str(folder / "bin" / "python"), "-m", "wheel"]
    if not knows_local_version(private):
        say("installing the wheel package under build/ ...")
        shutil.rmtree(folder, ignore_errors=True)
        make_venv(folder)
        python = str(folder / "bin" / "python")
        command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        run_logged([*command, "wheel>=0.48"], "pip cannot install the wheel package")
    return private


def knows_local_version(command: list[str]) -> bool:
    try:
        told = subprocess.run([*command, "pack", "--help"], capture_output=True, text=True)
    except OSError:
        return False
    return "--local-version" in told.stdout


def make_venv(folder: Path, with_pip: bool = True) -> None:
    """Make a virtual environment, with pip unless told otherwise."""
    try:
        venv.EnvBuilder(with_pip=with_pip, symlinks=True).create(folder)
    except subprocess.CalledProcessError:
        shutil.rmtree(folder, ignore_errors=True)
        raise Fail(
            f"{sys.executable} cannot make a virtual environment with pip; install its venv and "
            "ensurepip modules (python3-venv on Debian)"
        ) from None


def record_hash(content: bytes) -> str:
    """A hash as RECORD files have it."""
    digest = hashlib.sha256(content).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
