"""build.sh source: a wheel built from a PyTorch source tree, the native patches included."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import common
import make_wheel
import releases
import series
from common import DIST, Fail, Parser, last_line, main, run_logged, say, scratch, warn

LANDMARKS = ("setup.py", "version.txt", "CMakeLists.txt", "torch/csrc", "torch/__init__.py")
AM_OPTIONS = ("--keep-non-patch", "--no-scissors", "--committer-date-is-author-date")
IDENTITY = {"GIT_COMMITTER_NAME": "fxctx", "GIT_COMMITTER_EMAIL": "fxctx@localhost"}
# In the configuration of DIR's repository: the commit below the series, and which series it is.
BASE_KEY = "fxctx.base"
SERIES_KEY = "fxctx.series"
# There too where build.sh made it, of a tree without git.
MADE_KEY = "fxctx.made"

# Settings that decide what is configured, as tools/setup_helpers/cmake.py passes them on.
SETTING = re.compile(r"(BUILD|USE|CMAKE)_\w+|BLAS|CC|CXX|CFLAGS|CXXFLAGS|LDFLAGS|DEBUG")
# Read by setup.py on each run.
NOT_CONFIGURED = {"CMAKE_ONLY", "CMAKE_FRESH", "BUILD_NUMBER", "CMAKE_BUILD_PARALLEL_LEVEL"}
SETTINGS_FILE = "fxctx-settings.json"

MINIMAL_OFF = (
    *("CUDA", "CUDNN", "ROCM", "XPU", "MPS", "VULKAN", "OPENCL"),
    *("DISTRIBUTED", "GLOO", "TENSORPIPE", "MPI"),
    *("FBGEMM", "MKLDNN", "XNNPACK", "NNPACK", "QNNPACK", "PYTORCH_QNNPACK"),
    *("KINETO", "ITT", "GLOG", "GFLAGS", "NUMA"),
)


def minimal_settings() -> dict[str, str]:
    """What ``--minimal`` sets, each unless the environment has it."""
    include = Path(__file__).with_name("minimal.cmake")
    return {
        **{f"USE_{name}": "OFF" for name in MINIMAL_OFF},
        "BUILD_TEST": "OFF",
        "CMAKE_PROJECT_TOP_LEVEL_INCLUDES": str(include),
        "MAX_JOBS": str(os.cpu_count() or 1),
    }


def git(tree: Path, *args: str | Path, **kwargs) -> subprocess.CompletedProcess:
    """Run git in ``tree``, whoever owns it: an archive unpacked by root often has other owners."""
    safe = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": str(tree),
    }
    return common.git(tree, *args, env=safe | kwargs.pop("env", {}), **kwargs)


def find_tree(directory: str) -> tuple[Path, series.Series]:
    """The source tree at ``directory`` and the series for its release."""
    tree = Path(directory).absolute()
    missing = [name for name in LANDMARKS if not (tree / name).exists()]
    if missing:
        raise Fail(f"{tree} is not a PyTorch source tree: it has no {missing[0]}")
    version = (tree / "version.txt").read_text().strip()
    found = re.match(r"\d+\.\d+\.\d+", version)
    if not found:
        raise Fail(f"{tree / 'version.txt'} has no release in it: {version!r}")
    return tree, series.find(found.group())


def check_tools(tree: Path) -> None:
    """Every tool that the build needs is there.

    Raises:
        Fail: the first one that is not, and how to get it.
    """
    for name in ("cmake", "ninja"):
        if not shutil.which(name):
            raise Fail(f"{name} is not installed; install it ('pip install {name}') and run again")
    for variable, default in (("CC", "cc"), ("CXX", "c++")):
        # May be more than a name: CC='ccache gcc'.
        name = (shlex.split(os.environ.get(variable, "")) or [default])[0]
        if not shutil.which(name):
            raise Fail(f"no compiler '{name}'; install one or set {variable} to it")
    missing = [name for name in build_requirements(tree) if not installed(name)]
    if missing:
        raise Fail(
            f"{sys.executable} lacks what the build imports: run "
            f"'{sys.executable} -m pip install {' '.join(missing)}'"
        )


def build_requirements(tree: Path) -> list[str]:
    """The Python packages that the tree's pyproject.toml wants for a build."""
    text = (tree / "pyproject.toml").read_text() if (tree / "pyproject.toml").exists() else ""
    # tomllib came with 3.11; the list is one of plain strings.
    table = re.search(r"^\[build-system\]$(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    wanted = re.search(r"^requires\s*=\s*\[(.*?)\]", table[1], re.M | re.S) if table else None
    lines = re.sub(r"#.*", "", wanted[1]) if wanted else ""
    strings = [a or b for a, b in re.findall(r""""([^"]*)"|'([^']*)'""", lines)]
    names = [found[0] for text in strings if (found := re.match(r"[\w.-]+", text))]
    # As programs, these are looked for apart; setup.py imports neither.
    return [name for name in ["pip", *names] if name not in ("cmake", "ninja")]


def installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def apply(tree: Path, chosen: series.Series) -> None:
    """Commit the series on top of ``tree``, all of it or none; nothing to do where it is there.

    A tree without git becomes a repository of the files that the series touches.
    """
    made = not (tree / ".git").exists()
    try:
        if made:
            make_repository(tree, chosen)
        elif is_applied(tree, chosen):
            say(f"the {len(chosen.patches)} patches are applied already")
            return
        else:
            need_clean(tree)
            if git(tree, "config", "--get", MADE_KEY, check=False).stdout.strip():
                track(tree, chosen)
        base = git(tree, "rev-parse", "HEAD").stdout.strip()
        say(f"applying {len(chosen.patches)} patches ...")
        am(tree, chosen)
        git(tree, "config", BASE_KEY, base)
        git(tree, "config", SERIES_KEY, chosen.digest)
    except BaseException:
        if made:
            shutil.rmtree(tree / ".git", ignore_errors=True)
        raise


def make_repository(tree: Path, chosen: series.Series) -> None:
    """Make ``tree`` a git repository of the files that the series touches."""
    git(tree, "init", "-q")
    (tree / ".git" / "info").mkdir(exist_ok=True)
    # All else stays as untracked as it was.
    (tree / ".git" / "info" / "exclude").write_text("*\n")
    git(tree, "config", MADE_KEY, "true")
    track(tree, chosen)


def track(tree: Path, chosen: series.Series) -> None:
    """Commit the files of ``tree`` that the series touches and its repository does not have."""
    paths = {path for patch in chosen.patches for path in patch.paths}
    existing = {path for path in paths if (tree / path).is_file()}
    missing = sorted(existing - set(git(tree, "ls-files").stdout.splitlines()))
    has_base = git(tree, "rev-parse", "--verify", "HEAD", check=False).returncode == 0
    if missing or not has_base:
        git(tree, "add", "--force", "--", *missing)
        author = {"GIT_AUTHOR_NAME": "PyTorch", "GIT_AUTHOR_EMAIL": "packages@pytorch.org"}
        title = f"torch {chosen.release}, the files that the series touches"
        git(tree, "commit", "-q", "--allow-empty", "-m", title, env=author | IDENTITY)


def is_applied(tree: Path, chosen: series.Series) -> bool:
    """Whether this series is in ``tree``.

    Raises:
        Fail: another state of the series is.
    """
    digest = git(tree, "config", "--get", SERIES_KEY, check=False).stdout.strip()
    base = git(tree, "config", "--get", BASE_KEY, check=False).stdout.strip()
    if not digest:
        return False
    below = git(tree, "merge-base", "--is-ancestor", base, "HEAD", check=False).returncode == 0
    on_top = git(tree, "rev-list", "--count", f"{base}..HEAD", check=False).stdout.strip()
    if not below or on_top == "0":
        return False  # Someone took the patches off again.
    if digest != chosen.digest:
        raise Fail(
            f"{tree} has another state of the series; take it off with "
            f"'git -C {shlex.quote(str(tree))} reset --hard {base[:12]}' and run again"
        )
    return True


def need_clean(tree: Path) -> None:
    for name in ("rebase-apply", "rebase-merge", "MERGE_HEAD"):
        path = git(tree, "rev-parse", "--git-path", name).stdout.strip()
        if (tree / path).exists():
            raise Fail(f"{tree} is in the middle of a git am, rebase or merge; finish it first")
    changed = git(tree, "status", "--porcelain", "--untracked-files=no").stdout.splitlines()
    if changed:
        raise Fail(
            f"{tree} has changes that are not committed ({changed[0][3:]}); commit or drop them "
            "first"
        )


def am(tree: Path, chosen: series.Series) -> None:
    """``git am`` of the whole series, or none of it."""
    before = git(tree, "rev-parse", "HEAD").stdout.strip()
    names = [patch.path for patch in chosen.patches]
    try:
        done = git(tree, "am", "-q", *AM_OPTIONS, *names, check=False, env=IDENTITY)
        if done.returncode == 0:
            return
        at = re.search(r"^Patch failed at (\d+)", done.stdout, re.MULTILINE)
        # The files named in the way of a patch are untracked ones: am has no line for it.
        name = names[int(at[1]) - 1].name if at else names[0].name
        reasons = [line for line in done.stderr.splitlines() if line.startswith("error:")]
        reason = (reasons[0] if reasons else last_line(done.stderr)).removeprefix("error: ")
        raise Fail(f"{name} does not apply to {tree}: {reason}; the tree is as it was")
    except BaseException:
        git(tree, "am", "--abort", check=False, env=IDENTITY)
        git(tree, "reset", "-q", "--keep", before, check=False)
        raise


def settings_now(env: dict[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(env.items())
        if SETTING.fullmatch(name) and name not in NOT_CONFIGURED
    }


def hold_to_settings(tree: Path, env: dict[str, str]) -> None:
    """Hold a build that goes on to the settings that it was configured with.

    setup.py configures once, and passes over new settings in silence after that.

    Raises:
        Fail: the settings are other ones.
    """
    build = tree / "build"
    record = build / SETTINGS_FILE
    now = settings_now(env)
    if (build / "CMakeCache.txt").exists():
        if record.exists():
            then = json.loads(record.read_text())
            other = sorted(n for n in then.keys() | now.keys() if then.get(n) != now.get(n))
            if other:
                raise Fail(
                    f"{build} was configured with another {other[0]}; remove that folder, or "
                    "use the same settings to go on with it"
                )
        else:
            say(f"going on with {build} as it is configured")
    else:
        say("configuring; a second call goes on where this one stops")
    build.mkdir(exist_ok=True)
    record.write_text(json.dumps(now, indent=1) + "\n")


def build_wheel(tree: Path, env: dict[str, str], folder: Path) -> Path:
    """Build the wheel through the tree's own setup.py; ninja's lines are the progress."""
    command = releases.pip("wheel", "--no-build-isolation", "--no-deps", f"--wheel-dir={folder}")
    if not common.quiet:
        command.append("--verbose")
    output = subprocess.DEVNULL if common.quiet else sys.stderr
    done = subprocess.run(
        [*command, str(tree)], env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output
    )
    if done.returncode:
        why = "run again without --quiet to see why" if common.quiet else "the lines above say why"
        raise Fail(f"the build failed; {why}. What is built stays in {tree / 'build'}")
    wheels = list(folder.glob("torch-*.whl"))
    if len(wheels) != 1:
        raise Fail(f"the build of {tree} left no wheel of torch")
    return wheels[0]


def tag(built: Path, chosen: series.Series, folder: Path, tool: list[str]) -> Path:
    """Put the version tag and what the series is into the wheel, and move it to dist/."""
    wheel = releases.Wheel(built)
    say("tagging the wheel ...")
    run_logged([*tool, "unpack", "--dest", folder, built], "cannot unpack the wheel")
    tree = next(path for path in folder.iterdir() if path.is_dir())
    local = series.local_version(wheel.torch_version)
    version = f"{wheel.torch_version.partition('+')[0]}+{local}"
    file = tree / "torch" / "version.py"
    file.write_bytes(make_wheel.tag_version(file.read_bytes(), version))
    manifest = chosen.describe() | {
        "patches": [
            {"name": p.name, "sha256": p.sha256, "subject": p.subject, "faults": p.faults}
            for p in chosen.patches
        ],
        "left_out": [],
        "kind": "source",
        "base": wheel.version,
    }
    told = tree / wheel.dist_info / "fxctx" / "manifest.json"
    told.parent.mkdir()
    told.write_text(json.dumps(manifest, indent=1) + "\n")
    packed = folder / "packed"
    packed.mkdir()
    pack = [*tool, "pack", "--dest-dir", packed, "--local-version", local, tree]
    run_logged(pack, "cannot pack the wheel")
    made = next(packed.glob("torch-*.whl"))
    DIST.mkdir(exist_ok=True)
    return made.replace(DIST / made.name)


def run(argv: list[str]) -> int:
    parser = Parser("source")
    parser.add_argument("--src", metavar="DIR", required=True)
    parser.add_argument("--minimal", action="store_true")
    parser.add_argument("--apply-only", action="store_true")
    args = parser.parse(argv)
    tree, chosen = find_tree(args.src)
    if not args.apply_only:
        check_tools(tree)
        tool = releases.wheel_tool()  # May have to be installed: not after hours of building.
    if not chosen.native_patches:
        warn(f"no patch for {chosen.release} touches C++; './build.sh wheel' is much faster")
    apply(tree, chosen)
    if args.apply_only:
        print(tree)
        return 0
    env = os.environ | {"PYTORCH_BUILD_VERSION": chosen.release, "PYTORCH_BUILD_NUMBER": "1"}
    if args.minimal:
        env = minimal_settings() | env
    hold_to_settings(tree, env)
    with scratch("source") as temporary:
        built = build_wheel(tree, env, temporary / "built")
        path = tag(built, chosen, temporary / "tagged", tool)
    say(f"torch {chosen.release} with {len(chosen.patches)} patches; install it with:")
    say(f"  {sys.executable} -m pip install {path}")
    print(path)
    return 0


if __name__ == "__main__":
    main(run)
