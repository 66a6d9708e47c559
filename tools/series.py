"""The patch series: what each patch touches, and what files look like with it applied."""

from __future__ import annotations

import email
import email.header
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

from common import ROOT, Fail, git, last_line, read_or_none, scratch

PATCHES = ROOT / "patches"
RELEASE = re.compile(r"v(\d+)\.(\d+)\.(\d+)\Z")

Reader = Callable[[str], "bytes | None"]


def fxctx_version() -> int:
    """The N of ``+fxctx.N``, from patches/VERSION."""
    return int((PATCHES / "VERSION").read_text())


def local_version(version: str) -> str:
    """The local part of the version of a patched torch: ``2.13.0+cpu`` gives ``cpu.fxctx.1``."""
    _, _, local = version.partition("+")
    return ".".join(filter(None, [local, f"fxctx.{fxctx_version()}"]))


def base_version(version: str) -> str:
    """``version`` without our tag."""
    public, _, local = version.partition("+")
    local = re.sub(r"(^|\.)fxctx\.\d+$", "", local)
    return f"{public}+{local}" if local else public


@dataclass(frozen=True)
class Patch:
    """One file of a series, as ``git format-patch`` wrote it."""

    path: Path
    content: bytes = field(repr=False)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def subject(self) -> str:
        header = email.message_from_bytes(self.content)["Subject"] or ""
        text = str(email.header.make_header(email.header.decode_header(header)))
        return re.sub(r"^\[PATCH[^]]*\] *", "", re.sub(r"\s*\n\s*", " ", text))

    @cached_property
    def faults(self) -> list[str]:
        """The faults that it mends, from the ``Faults: F1, F2`` trailer of its message."""
        message, _, _ = self.content.decode(errors="replace").partition("\n---\n")
        trailers = re.findall(r"^Faults:(.*)$", message, re.MULTILINE)
        return sorted({f for line in trailers for f in re.findall(r"F\d+", line)}, key=fault_number)

    @cached_property
    def paths(self) -> list[str]:
        """The files that it touches, old and new names."""
        with scratch("paths") as empty:
            listing = git(empty, "apply", "--numstat", "-z", self.path, check=False)
        if listing.returncode:
            raise Fail(f"{self.path}: not a patch: {last_line(listing.stderr)}")
        found = {entry.split("\t", 2)[2] for entry in listing.stdout.split("\0") if entry}
        text = self.content.decode(errors="replace")
        found.update(re.findall(r"^rename from (.+)$", text, re.MULTILINE))
        return sorted(found)

    @property
    def native(self) -> bool:
        """Whether it needs a build from source: it touches more than Python files and tests."""
        return any(not in_wheel(path) and not beside_wheel(path) for path in self.paths)


def fault_number(fault: str) -> int:
    return int(fault[1:])


def in_wheel(path: str) -> bool:
    """Whether a wheel carries this file of PyTorch's repository as it is."""
    return path.startswith("torch/") and PurePosixPath(path).suffix in (".py", ".pyi")


def beside_wheel(path: str) -> bool:
    """Whether no build of torch has any use for this file."""
    return path.startswith(("test/", "docs/", "benchmarks/"))


@dataclass(frozen=True)
class Series:
    """The patches for one release, in order."""

    folder: Path
    patches: tuple[Patch, ...]

    @property
    def release(self) -> str:
        return self.folder.name.removeprefix("v")

    @property
    def python_patches(self) -> list[Patch]:
        return [patch for patch in self.patches if not patch.native]

    @property
    def native_patches(self) -> list[Patch]:
        return [patch for patch in self.patches if patch.native]

    @property
    def digest(self) -> str:
        """Changes with every patch and with the version of the series."""
        parts = [str(fxctx_version())] + [f"{p.name} {p.sha256}" for p in self.patches]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def faults(self) -> list[str]:
        """What the series mends in a build from source; a wheel has no native patches."""
        return sorted({f for patch in self.patches for f in patch.faults}, key=fault_number)

    def describe(self) -> dict:
        """What a patched torch says about the series that it has."""
        return {
            "fxctx": fxctx_version(),
            "release": self.release,
            "series": self.digest,
            "patches": [
                {"name": p.name, "sha256": p.sha256, "subject": p.subject, "faults": p.faults}
                for p in self.python_patches
            ],
            "left_out": [p.name for p in self.native_patches],
        }

    def patched(self, read: Reader) -> dict[str, bytes | None]:
        """The new content of each file of the wheel that the series changes.

        Args:
            read: gives the content of a file of the release, or None where it has no such file.

        Returns:
            Path to new content, or to None for a file that the series deletes.

        Raises:
            Fail: a patch does not apply.
        """
        paths = {path for p in self.python_patches for path in p.paths if in_wheel(path)}
        return self._apply(paths, read, include="torch/*", exclude=("test/*", "docs/*"))

    def tests(self) -> dict[str, bytes]:
        """The files under test/ that the series adds, by their path under test/.

        Those of patches that need a build from source are not among them.
        """
        paths = {path for p in self.python_patches for path in p.paths}
        paths = {path for path in paths if path.startswith("test/")}
        added = self._apply(paths, lambda path: None, include="test/*", exclude=("torch/*",))
        return {
            path.removeprefix("test/"): content
            for path, content in added.items()
            if content is not None
        }

    def _apply(
        self, paths: set[str], read: Reader, include: str, exclude: tuple[str, ...]
    ) -> dict[str, bytes | None]:
        before = {path: read(path) for path in sorted(paths)}
        options = ["--whitespace=nowarn", *(f"--exclude={glob}" for glob in exclude)]
        with scratch("apply") as tree:
            git(tree, "init", "-q")
            for path, content in before.items():
                if content is not None:
                    (tree / path).parent.mkdir(parents=True, exist_ok=True)
                    (tree / path).write_bytes(content)
            for patch in self.python_patches:
                done = git(tree, "apply", *options, f"--include={include}", patch.path, check=False)
                if done.returncode:
                    raise Fail(
                        f"{patch.name} does not apply to torch {self.release} as it is here: "
                        f"{last_line(done.stderr).removeprefix('error: ')}"
                    )
            after = {path: read_or_none(tree / path) for path in before}
        return {path: content for path, content in after.items() if content != before[path]}


def all_series() -> list[Series]:
    """Every series here, the newest release first."""
    folders = [p for p in PATCHES.iterdir() if p.is_dir() and RELEASE.match(p.name)]
    folders.sort(key=lambda p: [int(n) for n in RELEASE.match(p.name).groups()], reverse=True)
    return [load(folder) for folder in folders]


def load(folder: Path) -> Series:
    """Read the series in ``folder``."""
    files = sorted(folder.glob("[0-9][0-9][0-9][0-9]-*.patch"))
    return Series(folder, tuple(Patch(file, file.read_bytes()) for file in files))


def find(version: str) -> Series:
    """The series for a torch version, which may have a local part (``2.13.0+cpu``).

    Raises:
        Fail: no series for that release.
    """
    public = version.partition("+")[0].removeprefix("v")
    known = all_series()
    for series in known:
        if series.release == public and series.patches:
            return series
    names = ", ".join(s.release for s in known if s.patches)
    raise Fail(f"no patches for torch {public}; there are some for {names or 'no release'}")


def find_or_empty(version: str) -> Series:
    """The series for a torch version, empty where there is none yet."""
    folder = PATCHES / f"v{version.partition('+')[0]}"
    return load(folder) if folder.is_dir() else Series(folder, ())


def ci_releases() -> set[str]:
    """The releases that .ci/run tests as a wheel; the series of the others are only applied."""
    script = PATCHES.parent / ".ci" / "run"
    text = script.read_text() if script.exists() else ""
    named = " ".join(re.findall(r"^(?:FULL|OTHERS)=(.*)$", text, re.MULTILINE))
    return set(re.findall(r"\d+\.\d+\.\d+", named))


def gpus_tested() -> dict[str, set[str]]:
    """The GPUs on which a patched release ran, by release, as benchmarks/results/ says."""
    found: dict[str, set[str]] = {}
    for path in sorted((PATCHES.parent / "benchmarks" / "results").glob("*.json")):
        torch = json.loads(path.read_text()).get("torch")
        for arm in torch.values() if isinstance(torch, dict) else ():
            if arm["patched"] and arm["gpus"]:
                release = arm["torch"].partition("+")[0]
                found.setdefault(release, set()).update(arm["gpus"])
    return found


def readme_rows() -> str:
    """The rows of the table of releases in README.md: release, faults, tested by CI, GPUs."""
    in_ci, gpus = ci_releases(), gpus_tested()
    return "".join(
        f"| {s.release} | {', '.join(s.faults)} "
        f"| {'CPU tests' if s.release in in_ci else 'applied'} "
        f"| {', '.join(sorted(gpus.get(s.release, ()))) or '-'} |\n"
        for s in all_series()
        if s.patches
    )


def write_tree(files: dict[str, bytes], folder: Path) -> None:
    """Write ``files`` as the whole content of ``folder``."""
    shutil.rmtree(folder, ignore_errors=True)
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
