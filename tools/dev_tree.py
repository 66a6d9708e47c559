"""build.sh dev and refresh: a series as commits in a git tree, and back."""

from __future__ import annotations

import argparse
import os
import re
import shutil
from pathlib import Path

import releases
import series
from common import Fail, Parser, git, last_line, main, run_logged, say, scratch

BASE = "base"
RELEASE_KEY = "fxctx.release"
# Everything is ignored but what patches are made of.
EXCLUDE = """\
*
!*/
!/torch/**/*.py
!/torch/**/*.pyi
!/test/**
/.wheel/
__pycache__/
.pytest_cache/
.hypothesis/
"""
AS_COMMITTER = {"GIT_COMMITTER_NAME": "fxctx", "GIT_COMMITTER_EMAIL": "fxctx@localhost"}
FORMAT_PATCH = (
    *("-c", "core.abbrev=11", "-c", "diff.algorithm=myers", "-c", "core.quotePath=true"),
    *("format-patch", "--quiet", "--zero-commit", "--no-numbered", "--no-signature"),
    *("--no-renames", "--no-base", "--no-thread", "--no-attach", "--no-cover-letter"),
)


def dev(args: argparse.Namespace) -> int:
    """Make the tree, complete or not at all."""
    folder = Path(args.dir).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Fail(f"{folder} is there already; name a new folder")
    chosen, wheel = releases.choose(args, new_release=True)
    make(folder, chosen, wheel)
    for patch in chosen.native_patches:
        say(f"left out, needs a PyTorch checkout: {patch.name}")
    say(f"torch {chosen.release}, one commit a patch, in:")
    print(folder)
    return 0


def make(folder: Path, chosen: series.Series, wheel: releases.Wheel) -> None:
    """Make ``folder``, which is empty or not there, such a tree."""
    tool = releases.wheel_tool()
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir()
        say(f"unpacking {wheel.path.name} ...")
        run_logged([*tool, "unpack", "--dest", draft, wheel.path], "cannot unpack the wheel")
        next(draft.glob("torch-*")).rename(draft / ".wheel")
        fill(draft, chosen)
        if folder.exists():
            folder.rmdir()
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def fill(tree: Path, chosen: series.Series) -> None:
    """Commit the Python files of the unpacked wheel, then the patches."""
    wheel = tree / ".wheel"
    for parent, _, files in os.walk(wheel):
        for name in files:
            source = Path(parent, name)
            path = source.relative_to(wheel)
            target = tree / path
            if path.parts[0].endswith(".dist-info"):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if series.in_wheel(str(path)):
                shutil.copy2(source, target)
            else:
                target.symlink_to(os.path.relpath(source, target.parent))
    (tree / "test").mkdir()
    git(tree, "init", "-q")
    git(tree, "symbolic-ref", "HEAD", "refs/heads/series")
    (tree / ".git" / "info").mkdir(exist_ok=True)
    (tree / ".git" / "info" / "exclude").write_text(EXCLUDE)
    git(tree, "config", RELEASE_KEY, chosen.release)
    git(tree, "add", "torch")
    author = {"GIT_AUTHOR_NAME": "PyTorch", "GIT_AUTHOR_EMAIL": "packages@pytorch.org"}
    title = f"torch {chosen.release}, the Python files of its wheel"
    git(tree, "commit", "-q", "-m", title, env=author | AS_COMMITTER)
    git(tree, "tag", BASE)
    for patch in chosen.python_patches:
        options = ("--keep-non-patch", "--no-scissors", "--committer-date-is-author-date")
        done = git(tree, "am", "-q", *options, patch.path, check=False, env=AS_COMMITTER)
        if done.returncode:
            reason = last_line(done.stderr or done.stdout)
            raise Fail(f"{patch.name} does not apply to torch {chosen.release}: {reason}")


def refresh(args: argparse.Namespace) -> int:
    """Write the commits on top of the base back to patches/."""
    tree = Path(args.dir).absolute()
    release = ""
    if (tree / ".git").exists():
        release = git(tree, "config", "--get", RELEASE_KEY, check=False).stdout.strip()
    if not release:
        raise Fail(f"{tree} is not a tree that ./build.sh dev made")
    if git(tree, "status", "--porcelain").stdout:
        raise Fail(f"{tree} has changes that are not committed; commit or drop them first")
    if (tree / ".git" / "rebase-apply").exists() or (tree / ".git" / "rebase-merge").exists():
        raise Fail(f"{tree} is in the middle of a rebase; finish it first")
    if git(tree, "merge-base", "--is-ancestor", BASE, "HEAD", check=False).returncode:
        raise Fail(f"{tree} is not on top of its commit '{BASE}'; check out the series first")
    if git(tree, "rev-list", "--merges", f"{BASE}..HEAD").stdout:
        raise Fail(f"{tree} has a merge in its series; rebase it into one line first")

    folder = series.PATCHES / f"v{release}"
    old = series.load(folder) if folder.is_dir() else series.Series(folder, ())
    with scratch("refresh") as temporary:
        made = temporary / folder.name
        made.mkdir()
        git(tree, *FORMAT_PATCH, "--output-directory", made, f"{BASE}..HEAD")
        count = len(list(made.iterdir()))
        for number, patch in enumerate(old.native_patches, count + 1):
            (made / f"{number:04}{patch.name[4:]}").write_bytes(patch.content)
        new = series.load(made)
        written = {patch.name: patch.content for patch in new.patches}
        if any(patch.native for patch in new.patches[:count]):
            native = next(patch for patch in new.patches[:count] if patch.native)
            raise Fail(f"{native.name} touches more than Python files and tests")
        new.tests()  # They must apply to nothing, as torch_tests/ and the test verb need it.
    replace_patches(folder, written)
    say(f"wrote {count} patches to {folder}")
    write_readme_rows(series.PATCHES.parent / "README.md")
    if release == newest_release():
        write_torch_tests()
    return 0


def write_readme_rows(readme: Path) -> None:
    """The table of releases in README.md says what the series say."""
    if readme.exists():
        text = readme.read_text()
        rows = series.readme_rows().replace("\\", r"\\")
        new = re.sub(r"(?:^\| \d+\.\d+\.\d+ \|.*\n)+", rows, text, count=1, flags=re.MULTILINE)
        if new != text:
            readme.write_text(new)
            say(f"wrote the table of releases in {readme}")


def replace_patches(folder: Path, written: dict[str, bytes]) -> None:
    """Make ``written`` the patches in ``folder``; files that are as they should be stay."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in written.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != content:
            draft = folder / f".{name}.draft"
            draft.write_bytes(content)
            draft.replace(path)
    for path in folder.glob("[0-9][0-9][0-9][0-9]-*.patch"):
        if path.name not in written:
            path.unlink()


def newest_release() -> str:
    return series.all_series()[0].release


def write_torch_tests() -> None:
    """torch_tests/ is what the newest series adds under test/."""
    target = series.PATCHES.parent / "torch_tests"
    with scratch("tests") as temporary:
        made = temporary / "torch_tests"
        series.write_tree(series.all_series()[0].tests(), made)
        made.mkdir(exist_ok=True)
        if target.exists():
            target.rename(temporary / "old")
        made.rename(target)
    say(f"wrote {target}")


def run(argv: list[str]) -> int:
    verb, *options = argv
    parser = Parser(f"{verb} DIR")
    parser.add_argument("dir", metavar="DIR")
    if verb == "dev":
        releases.add_release_options(parser)
        return dev(parser.parse(options))
    return refresh(parser.parse(options))


if __name__ == "__main__":
    main(run)
