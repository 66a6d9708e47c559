"""build.sh apply and revert: patch the installed torch where it is, all or nothing.

What makes an apply undoable lives in the ``fxctx`` folder of torch's dist-info:

    manifest.json   the series, and the hash of each file that it changes
    original/       the files as they were (RECORD and byte code among them)
    new/            files not yet in their place; the folder is there while an apply is under way
    REVERTING       there while a revert is under way

It is made complete under another name and renamed into place before the first file of torch
changes, and every file then changes by a rename. So wherever a run dies, the next one can finish
it or undo it.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import importlib.metadata
import importlib.util
import io
import json
import os
import py_compile
import shutil
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import releases
import series
from common import Fail, Parser, last_line, main, read_or_none, say, warn
from make_wheel import tag_version

JOURNAL = "fxctx"
DRAFT = "fxctx.draft"
JUNK = "fxctx.junk"
LOCK = ".fxctx.lock"


@dataclass(frozen=True)
class Installed:
    """The torch that this interpreter imports."""

    site: Path
    dist_info: Path

    @property
    def journal(self) -> Path:
        return self.dist_info / JOURNAL

    @cached_property
    def version(self) -> str:
        return importlib.metadata.PathDistribution(self.dist_info).version

    @property
    def manifest(self) -> dict:
        """What a patched torch says about itself; empty where it is not patched."""
        try:
            return json.loads((self.journal / "manifest.json").read_text())
        except FileNotFoundError:
            return {}
        except ValueError:
            raise Fail(
                f"{self.journal / 'manifest.json'} is damaged; install torch again with pip"
            ) from None

    @property
    def from_patched_wheel(self) -> bool:
        return self.manifest.get("kind") != "in place" and "fxctx." in self.version

    @property
    def record_path(self) -> str:
        return str((self.dist_info / "RECORD").relative_to(self.site))

    @property
    def interrupted(self) -> str | None:
        """The verb that was under way when it died, if one was."""
        if (self.journal / "REVERTING").exists():
            return "revert"
        return "apply" if (self.journal / "new").exists() else None

    def record(self) -> dict[str, list[str]]:
        """The rows of RECORD by path."""
        text = (self.dist_info / "RECORD").read_bytes().decode()
        return {row[0]: row for row in csv.reader(io.StringIO(text)) if row}

    def byte_code(self, path: str) -> list[str]:
        """The compiled files of a source file, by their path in site-packages."""
        file = Path(path)
        found = (self.site / file.parent / "__pycache__").glob(f"{file.stem}.*.pyc")
        return sorted(str(p.relative_to(self.site)) for p in found)


def locate() -> Installed:
    """Find the installed torch without importing it.

    Raises:
        Fail: none is installed, or it was not installed from a wheel.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise Fail(f"{sys.executable} has no torch; set PYTHON to an interpreter that has")
    package = Path(spec.origin).parent
    found = [d for d in package.parent.glob("torch-*.dist-info") if (d / "RECORD").is_file()]
    if not found:
        raise Fail(
            f"the torch in {package} was not installed from a wheel (a source tree, or another "
            "package manager); make a wheel with ./build.sh and install that"
        )
    if len(found) > 1:
        names = " and ".join(sorted(d.name for d in found))
        raise Fail(f"{package.parent} has {names}; install torch again with pip")
    return Installed(package.parent, found[0])


@contextlib.contextmanager
def locked(site: Path) -> Iterator[None]:
    """Hold the lock of ``site`` so that one run at a time changes it.

    Raises:
        Fail: site-packages cannot be written.
    """
    path = site / LOCK
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise Fail(
                f"{site} cannot be written ({error.strerror}); run as its owner, or use a virtual "
                "environment and the wheel that ./build.sh makes"
            ) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another run of build.sh on this torch ...")
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            warn(f"{site} is on a file system without locks; run one build.sh at a time")
        # The run that we waited for has removed its lock file: start again with a new one.
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            break
        os.close(handle)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def refuse_edited(torch: Installed, paths: list[str], record: dict[str, list[str]]) -> None:
    """Make sure that each file is as the wheel brought it."""
    for path in paths:
        file = torch.site / path
        row = record.get(path)
        if row is None:
            if file.exists():
                raise Fail(f"{file} is in the way: the series adds a file of that name")
        elif not file.is_file() or releases.record_hash(file.read_bytes()) != row[1]:
            raise Fail(
                f"{file} is not as the wheel installed it (edited by hand?); install torch "
                f"{torch.version} again with pip, then run ./build.sh apply"
            )


def sync(path: Path) -> None:
    """Bring a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush(folder: Path) -> None:
    """Bring a folder and all in it to the disk."""
    for path in [folder, *folder.rglob("*")]:
        sync(path)


def keep(source: Path, target: Path) -> None:
    """Keep ``source`` as ``target``: the same file where possible, else a faithful copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        target.symlink_to(os.readlink(source))
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def draft(torch: Installed, chosen: series.Series) -> None:
    """Stage all of the series beside the originals; nothing of torch changes here."""

    def read(path: str) -> bytes | None:
        return read_or_none(torch.site / path)

    touched = {path for patch in chosen.python_patches for path in patch.paths}
    touched = {path for path in touched if series.in_wheel(path)} | {"torch/version.py"}
    refuse_edited(torch, sorted(touched), torch.record())
    changes = chosen.patched(read)
    version_file = changes.get("torch/version.py") or read("torch/version.py") or b""
    local = series.local_version(releases.version_in(version_file))
    changes["torch/version.py"] = tag_version(version_file, f"{chosen.release}+{local}")

    folder = torch.dist_info / DRAFT
    original, new = folder / "original", folder / "new"
    original.mkdir(parents=True)
    byte_code = [name for path in changes for name in torch.byte_code(path)]
    for name in [*changes, *byte_code]:
        if (torch.site / name).exists():
            keep(torch.site / name, original / name)
    for path, content in changes.items():
        if content is not None:
            (new / path).parent.mkdir(parents=True, exist_ok=True)
            (new / path).write_bytes(content)
            if (original / path).exists():
                (new / path).chmod(stat.S_IMODE((original / path).stat().st_mode))
            compile_staged(torch, new, path, byte_code)
    record = torch.record_path
    keep(torch.site / record, original / record)
    manifest = chosen.describe() | {
        "kind": "in place",
        "base": torch.version,
        "record": record,
        "files": {path: hash_or_none(content) for path, content in changes.items()},
        "originals": {path: hash_or_none(read(path)) for path in changes},
        "byte_code": byte_code,
        "folders": sorted({d for path in changes for d in new_folders(torch, path)}),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    (new / record).parent.mkdir(parents=True, exist_ok=True)
    (new / record).write_text(new_record(torch, folder, changes), encoding="utf-8", newline="")
    (new / record).chmod(stat.S_IMODE((torch.site / record).stat().st_mode))
    for name in [*changes, record]:
        target = (torch.site / name).parent
        if target.is_dir() and not os.access(target, os.W_OK):
            raise Fail(f"{target} cannot be written; run as its owner")
    flush(folder)


def hash_or_none(content: bytes | None) -> str | None:
    return None if content is None else releases.record_hash(content)


def new_folders(torch: Installed, path: str) -> list[str]:
    """The folders above ``path`` that are not there yet."""
    return [str(d) for d in Path(path).parents if not (torch.site / d).is_dir()]


def compile_staged(torch: Installed, new: Path, path: str, byte_code: list[str]) -> None:
    """Compile a staged file, and keep the result where there was byte code before."""
    if not path.endswith(".py"):
        return
    name = importlib.util.cache_from_source(path)
    source = (new / path).read_bytes()
    target = str(torch.site / path)
    try:
        if name in byte_code:
            py_compile.compile(str(new / path), cfile=str(new / name), dfile=target, doraise=True)
        else:
            compile(source, target, "exec")
    except (SyntaxError, py_compile.PyCompileError) as error:
        raise Fail(f"the series breaks {path} for this Python: {last_line(str(error))}") from None


def new_record(torch: Installed, folder: Path, changes: dict[str, bytes | None]) -> str:
    """RECORD with the changed files, and with the journal, so that pip removes it with torch."""
    text = (torch.site / torch.record_path).read_bytes().decode()
    rows = torch.record()

    def add(path: str, content: bytes) -> None:
        rows[path] = [path, releases.record_hash(content), str(len(content))]

    for path, content in changes.items():
        if content is None:
            rows.pop(path, None)
        else:
            add(path, content)
    journal = torch.journal.relative_to(torch.site)
    kept = sorted(p for p in (folder / "original").rglob("*") if p.is_file())
    for file in [folder / "manifest.json", *kept]:
        add(str(journal / file.relative_to(folder)), file.read_bytes())
    out = io.StringIO()
    csv.writer(out, lineterminator="\r\n" if "\r\n" in text else "\n").writerows(rows.values())
    return out.getvalue()


def install(torch: Installed) -> None:
    """Move what is staged into its place; goes on from wherever an earlier run stopped."""
    manifest = torch.manifest
    new = torch.journal / "new"
    # Byte code goes first, so that none is ever newer than its source and RECORD is true last.
    for name in manifest["byte_code"]:
        if (torch.site / name).exists() and same_file(torch, name):
            (torch.site / name).unlink()
    staged = [str(p.relative_to(new)) for p in new.rglob("*") if p.is_file()]
    staged.sort(key=lambda name: (name == manifest["record"], not name.endswith(".pyc"), name))
    for name in staged:
        (torch.site / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(new / name, torch.site / name)
    for path, content in manifest["files"].items():
        if content is None:
            (torch.site / path).unlink(missing_ok=True)
    flush_changed(torch, manifest)
    discard(new)


def same_file(torch: Installed, name: str) -> bool:
    """Whether ``name`` is still the original."""
    return (torch.site / name).read_bytes() == (torch.journal / "original" / name).read_bytes()


def restore(torch: Installed) -> None:
    """Put every original back; goes on from wherever an earlier run stopped."""
    manifest = torch.manifest
    original = torch.journal / "original"
    (torch.journal / "REVERTING").touch()
    for path, content in manifest["originals"].items():
        for name in torch.byte_code(path):
            if name not in manifest["byte_code"]:
                (torch.site / name).unlink()
        if content is None:
            (torch.site / path).unlink(missing_ok=True)
    for folder in sorted(manifest["folders"], reverse=True):
        for path in (torch.site / folder / "__pycache__", torch.site / folder):
            with contextlib.suppress(OSError):
                path.rmdir()
    kept = [str(p.relative_to(original)) for p in original.rglob("*") if p.is_file()]
    kept.sort(key=lambda name: (name == manifest["record"], name.endswith(".pyc"), name))
    for name in kept:
        (torch.site / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(original / name, torch.site / name)
    flush_changed(torch, manifest)
    discard(torch.journal)


def flush_changed(torch: Installed, manifest: dict) -> None:
    """Bring the folders in which files were renamed to the disk."""
    names = [*manifest["files"], *manifest["byte_code"], manifest["record"]]
    for folder in {(torch.site / name).parent for name in names}:
        if folder.is_dir():
            sync(folder)


def discard(folder: Path) -> None:
    """Remove a folder so that a reader finds all of it or none of it."""
    junk = folder.with_name(JUNK)
    shutil.rmtree(junk, ignore_errors=True)
    os.rename(folder, junk)
    shutil.rmtree(junk, ignore_errors=True)


def refuse_edited_since(torch: Installed, manifest: dict) -> None:
    """Make sure that each file is as an apply or a revert leaves it, finished or not."""
    for path, content in manifest["files"].items():
        file = torch.site / path
        now = hash_or_none(read_or_none(file))
        if now not in (content, manifest["originals"][path]):
            raise Fail(
                f"{file} was edited after ./build.sh apply; save your change elsewhere and "
                f"install torch {torch.version} again with pip"
            )


def clean(torch: Installed) -> None:
    """Remove what a run that died before or after its real work has left."""
    for name in (DRAFT, JUNK):
        shutil.rmtree(torch.dist_info / name, ignore_errors=True)
    shutil.rmtree(torch.journal / JUNK, ignore_errors=True)


def leftovers(torch: Installed) -> bool:
    return any(
        path.exists()
        for path in (
            torch.dist_info / DRAFT,
            torch.dist_info / JUNK,
            torch.journal / JUNK,
            torch.site / LOCK,
        )
    )


def apply() -> int:
    torch = locate()
    chosen = series.find(torch.version)
    manifest = torch.manifest
    if torch.from_patched_wheel:
        if manifest and manifest["series"] != chosen.digest:
            raise Fail(
                f"torch {torch.version} was installed from a patched wheel with other patches "
                "than these; make a new one with ./build.sh and install it"
            )
        say(f"torch {torch.version} was installed from a patched wheel: nothing to do")
        return 0
    if up_to_date(torch, chosen) and not leftovers(torch):
        refuse_edited_since(torch, manifest)
        say(f"torch {torch.version} is patched already: nothing to do")
        return 0
    with locked(torch.site):
        clean(torch)
        return apply_locked(torch, chosen)


def up_to_date(torch: Installed, chosen: series.Series) -> bool:
    return torch.manifest.get("series") == chosen.digest and torch.interrupted is None


def apply_locked(torch: Installed, chosen: series.Series) -> int:
    manifest = torch.manifest
    if manifest:
        refuse_edited_since(torch, manifest)
        if up_to_date(torch, chosen):
            say(f"torch {torch.version} is patched already: nothing to do")
            return 0
        if torch.interrupted == "apply" and manifest["series"] == chosen.digest:
            say("finishing an apply that was interrupted ...")
            install(torch)
            report(torch, chosen)
            return 0
        # Other patches than these, or half reverted. See that ours apply before the change.
        original = torch.journal / "original"

        def read(path: str) -> bytes | None:
            file = original / path if (original / path).exists() else torch.site / path
            return None if manifest["originals"].get(path, "") is None else read_or_none(file)

        chosen.patched(read)
        say("putting the original files back first ...")
        restore(torch)
    try:
        draft(torch, chosen)
        os.rename(torch.dist_info / DRAFT, torch.journal)
        sync(torch.dist_info)
    except BaseException:
        clean(torch)
        raise
    try:
        install(torch)
    except BaseException:
        restore(torch)
        raise
    report(torch, chosen)
    return 0


def report(torch: Installed, chosen: series.Series) -> None:
    for patch in chosen.native_patches:
        say(f"left out, needs a build from source: {patch.name}")
    say(
        f"patched torch {torch.version} in {torch.site}: {len(chosen.python_patches)} patches; "
        "./build.sh revert puts it back"
    )


def revert() -> int:
    torch = locate()
    if torch.from_patched_wheel:
        base = torch.manifest.get("base") or series.base_version(torch.version)
        raise Fail(
            f"torch {torch.version} was installed from a patched wheel; to go back: "
            f"{sys.executable} -m pip install --force-reinstall --no-deps torch=={base}"
        )
    if not torch.manifest and not leftovers(torch):
        say(f"torch {torch.version} is not patched: nothing to do")
        return 0
    with locked(torch.site):
        clean(torch)
        if torch.manifest:
            refuse_edited_since(torch, torch.manifest)
            restore(torch)
    say(f"torch {torch.version} in {torch.site} is as it was")
    return 0


def run(argv: list[str]) -> int:
    verb, *options = argv
    Parser(verb).parse(options)
    return apply() if verb == "apply" else revert()


if __name__ == "__main__":
    main(run)
