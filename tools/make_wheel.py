"""build.sh wheel: the official wheel with the series applied to its Python files."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

import releases
import series
from common import BUILD, DIST, Fail, Parser, main, run_logged, say, scratch


def tag_version(content: bytes, version: str) -> bytes:
    """torch/version.py with another ``__version__``."""
    tagged, count = re.subn(
        rb"^__version__ = '[^']+'", f"__version__ = '{version}'".encode(), content, flags=re.M
    )
    if count != 1:
        raise Fail("torch/version.py of this release has no version to tag")
    return tagged


def key(chosen: series.Series, wheel: releases.Wheel) -> str:
    """Changes with whatever the patched wheel is made from."""
    made_from = [chosen.digest, wheel.path.name, str(wheel.path.stat().st_size)]
    made_from.append(hashlib.sha256(Path(__file__).read_bytes()).hexdigest())
    return hashlib.sha256("\n".join(made_from).encode()).hexdigest()


def manifest_of(path: Path) -> dict:
    """What a patched wheel says about itself; empty for any other file."""
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if re.fullmatch(r"torch-[^/]+\.dist-info/fxctx/manifest\.json", name):
                    return json.loads(archive.read(name))
    except (zipfile.BadZipFile, ValueError):
        pass
    return {}


def make(chosen: series.Series, wheel: releases.Wheel) -> Path:
    """Make the patched wheel, or find it made, in dist/."""
    local = series.local_version(wheel.torch_version)
    version = f"{chosen.release}+{local}"
    made_from = key(chosen, wheel)
    for path in sorted(DIST.glob(f"torch-{version}-*.whl")):
        if manifest_of(path).get("key") == made_from:
            say(f"{path.name} is up to date")
            return path
    for patch in chosen.native_patches:
        say(f"left out, needs a build from source: {patch.name}")
    patched = chosen.patched(wheel.read)
    need_space(wheel)
    tool = releases.wheel_tool()
    with scratch("wheel") as temporary:
        say(f"unpacking {wheel.path.name} ...")
        run_logged([*tool, "unpack", "--dest", temporary, wheel.path], "cannot unpack the wheel")
        tree = next(temporary.iterdir())
        say(f"applying {len(chosen.python_patches)} patches ...")
        patched["torch/version.py"] = tag_version(
            patched.get("torch/version.py") or (tree / "torch/version.py").read_bytes(), version
        )
        for path, content in patched.items():
            if content is None:
                (tree / path).unlink()
            else:
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                (tree / path).write_bytes(content)
        manifest = chosen.describe() | {"kind": "wheel", "base": wheel.version, "key": made_from}
        told = tree / wheel.dist_info / "fxctx" / "manifest.json"
        told.parent.mkdir()
        told.write_text(json.dumps(manifest, indent=1) + "\n")
        say("packing the patched wheel (up to a few minutes) ...")
        out = temporary / "out"
        out.mkdir()
        pack = [*tool, "pack", "--dest-dir", out, "--local-version", local, tree]
        run_logged(pack, "cannot pack the wheel")
        packed = next(out.glob("torch-*.whl"))
        DIST.mkdir(exist_ok=True)
        return packed.replace(DIST / packed.name)


def need_space(wheel: releases.Wheel) -> None:
    """Say so before the work, not in its middle, when the disk is too full."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel.path) as archive:
        needed = sum(entry.file_size for entry in archive.infolist())
    needed += wheel.path.stat().st_size
    free = shutil.disk_usage(BUILD).free
    if free < needed:
        raise Fail(
            f"{BUILD} has {free / 1e9:.1f} GB free and {needed / 1e9:.1f} GB are needed; free "
            "some space and run again"
        )


def run(argv: list[str]) -> int:
    parser = Parser("wheel")
    releases.add_release_options(parser)
    args = parser.parse(argv)
    chosen, wheel = releases.choose(args)
    path = make(chosen, wheel)
    say(f"torch {chosen.release} with {len(chosen.python_patches)} patches; install it with:")
    say(f"  {sys.executable} -m pip install {path}")
    print(path)
    return 0


if __name__ == "__main__":
    main(run)
