"""build.sh apply and revert."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from small_torch import (
    MODULES,
    PATCHED,
    RELEASE,
    Torch,
    make_series,
    make_wheel,
    one_line,
    python_wrapper,
    snapshot,
)

pytestmark = pytest.mark.timeout(300)

# Kills the tool before its nth change of the file system, as kill -9 would at that point.
KILL = """
import os, pathlib, signal, shutil
left = {count}
def counted(function):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call
os.replace = counted(os.replace)
os.rename = counted(os.rename)
os.unlink = counted(os.unlink)
pathlib.Path.unlink = counted(pathlib.Path.unlink)
pathlib.Path.touch = counted(pathlib.Path.touch)
pathlib.Path.write_bytes = counted(pathlib.Path.write_bytes)
"""


def is_patched(torch: Torch) -> bool:
    files = {name: (torch.site / name) for name in PATCHED if name.startswith("torch/")}
    return all(f.is_file() and f.read_text() == PATCHED[name] for name, f in files.items())


def test_apply_patches_and_revert_restores_byte_for_byte(torch_env: Torch) -> None:
    assert torch_env.evaluate("torch.fx.is_tracing()") == "False"
    before = snapshot(torch_env.site)

    done = torch_env.build("apply")
    assert done.returncode == 0, done.stderr
    assert is_patched(torch_env)
    assert not (torch_env.site / "torch/fx/old.py").exists()
    assert torch_env.evaluate("torch.__version__") == "2.13.0+cpu.fxctx.1"
    assert torch_env.evaluate("type(torch.fx.trace.flag).__name__") == "ContextVar"
    assert not list(torch_env.site.rglob("test_state.py"))
    torch_env.check_record()
    check = torch_env.pip("check")
    assert check.returncode == 0, check.stdout

    done = torch_env.build("revert")
    assert done.returncode == 0, done.stderr
    assert snapshot(torch_env.site) == before
    assert not (torch_env.site / "torch/fx/state").exists()
    assert torch_env.evaluate("torch.__version__") == "2.13.0+cpu"
    assert torch_env.evaluate("torch.fx.trace.flag") == "False"
    assert snapshot(torch_env.site) == before


def test_both_are_idempotent(torch_env: Torch) -> None:
    stock = snapshot(torch_env.site)
    done = torch_env.build("revert")
    assert done.returncode == 0 and "nothing to do" in done.stderr
    assert snapshot(torch_env.site) == stock

    assert torch_env.build("apply").returncode == 0
    patched = snapshot(torch_env.site)
    done = torch_env.build("apply")
    assert done.returncode == 0 and "nothing to do" in done.stderr
    assert snapshot(torch_env.site) == patched

    assert torch_env.build("revert").returncode == 0
    assert torch_env.build("revert").returncode == 0
    assert snapshot(torch_env.site) == stock


def test_quiet_says_nothing(torch_env: Torch) -> None:
    for verb in ("apply", "apply", "revert", "revert"):
        done = torch_env.build(verb, "--quiet")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_pip_uninstalls_a_patched_torch_entirely(torch_env: Torch) -> None:
    assert torch_env.build("apply").returncode == 0
    torch_env.evaluate("torch.__version__")
    done = torch_env.pip("uninstall", "-y", "torch")
    assert done.returncode == 0, done.stderr
    assert list(torch_env.site.rglob("*")) == []


def test_pip_replaces_a_patched_torch(torch_env: Torch, small_wheel: Path) -> None:
    assert torch_env.build("apply").returncode == 0
    done = torch_env.pip("install", "--force-reinstall", "--no-deps", "--no-index", small_wheel)
    assert done.returncode == 0, done.stderr
    assert torch_env.evaluate("torch.__version__") == "2.13.0+cpu"
    assert not (torch_env.dist_info / "fxctx").exists()
    assert "nothing to do" in torch_env.build("revert").stderr


@pytest.mark.parametrize("name", ["torch/fx/trace.py", "torch/version.py"])
def test_a_torch_edited_by_hand_is_left_alone(torch_env: Torch, name: str) -> None:
    with (torch_env.site / name).open("a") as file:
        file.write("# mine\n")
    before = snapshot(torch_env.site)
    one_line(torch_env.build("apply"), name, "edited by hand", "pip")
    assert snapshot(torch_env.site) == before


def test_a_file_in_the_way_is_left_alone(torch_env: Torch) -> None:
    (torch_env.site / "torch/fx/state").mkdir()
    (torch_env.site / "torch/fx/state/owner.py").write_text("mine = True\n")
    before = snapshot(torch_env.site)
    one_line(torch_env.build("apply"), "torch/fx/state/owner.py", "in the way")
    assert snapshot(torch_env.site) == before


@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_an_edit_after_apply_is_not_lost(torch_env: Torch, verb: str) -> None:
    assert torch_env.build("apply").returncode == 0
    with (torch_env.site / "torch/fx/trace.py").open("a") as file:
        file.write("# mine\n")
    before = snapshot(torch_env.site)
    one_line(torch_env.build(verb), "torch/fx/trace.py", "edited after")
    assert snapshot(torch_env.site) == before


def test_a_release_without_a_series(torch_env: Torch) -> None:
    (torch_env.patches / f"v{RELEASE}").rename(torch_env.patches / "v2.99.0")
    before = snapshot(torch_env.site)
    one_line(torch_env.build("apply"), "no patches for torch 2.13.0", "2.99.0")
    assert snapshot(torch_env.site) == before


def test_a_series_that_does_not_apply(torch_env: Torch, tmp_path: Path) -> None:
    patch = next(torch_env.patches.glob("v*/0001-*.patch"))
    patch.write_text(patch.read_text().replace("-flag = False", "-flag = None"))
    before = snapshot(torch_env.site)
    one_line(torch_env.build("apply"), patch.name, "does not apply", "torch/fx/trace.py")
    assert snapshot(torch_env.site) == before


def test_a_series_that_breaks_the_syntax(torch_env: Torch) -> None:
    shutil.rmtree(torch_env.patches / f"v{RELEASE}")
    make_series(torch_env.patches / f"v{RELEASE}", {"torch/fx/trace.py": "flag = = False\n"})
    before = snapshot(torch_env.site)
    one_line(torch_env.build("apply"), "torch/fx/trace.py", "SyntaxError")
    assert snapshot(torch_env.site) == before


def test_no_torch(torch_env: Torch) -> None:
    torch_env.pip("uninstall", "-y", "torch")
    for verb in ("apply", "revert"):
        one_line(torch_env.build(verb), "has no torch", "PYTHON")


def test_a_source_tree_is_refused(torch_env: Torch, tmp_path: Path) -> None:
    tree = tmp_path / "checkout"
    shutil.copytree(torch_env.site / "torch", tree / "torch")
    torch_env.env["PYTHONPATH"] = str(tree)
    before = snapshot(tree)
    one_line(torch_env.build("apply"), "not installed from a wheel")
    assert snapshot(tree) == before


@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_a_read_only_site_packages(torch_env: Torch, verb: str) -> None:
    """Root may write in spite of the mode, so root gives up that right for the run."""
    if verb == "revert":
        assert torch_env.build("apply").returncode == 0
    before = snapshot(torch_env.site)
    prefix: tuple[str, ...] = ()
    if os.geteuid() == 0:
        if not shutil.which("setpriv"):
            pytest.skip("needs setpriv (util-linux) when run as root")
        prefix = ("setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner")
    folders = [torch_env.site, *(p for p in torch_env.site.rglob("*") if p.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        done = torch_env.build(verb, prefix=prefix)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    one_line(done, "cannot be written")
    assert snapshot(torch_env.site) == before


def killed(torch: Torch, verb: str, count: int) -> bool:
    """Run ``verb``, dying before change number ``count``; False when it ended before that."""
    wrapper = python_wrapper(torch.folder, torch.python, KILL.format(count=count))
    environment = torch.environment | {"PYTHON": str(wrapper)}
    done = subprocess.run(
        [str(torch.repo / "build.sh"), verb, "--quiet"],
        env=environment,
        capture_output=True,
        timeout=120,
    )
    return done.returncode != 0


@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_killed_at_any_point(torch_env: Torch, verb: str, tmp_path: Path) -> None:
    """Wherever a run dies, revert brings the stock torch back and apply the patched one."""
    stock = snapshot(torch_env.site)
    assert torch_env.build("apply").returncode == 0
    assert is_patched(torch_env)
    assert torch_env.build("revert").returncode == 0
    count, half_done = 0, 0
    while True:
        if verb == "revert":
            assert torch_env.build("apply").returncode == 0
        if not killed(torch_env, verb, count):
            break
        half_done += (torch_env.dist_info / "fxctx").exists()
        done = torch_env.build("apply" if count % 2 else "revert")
        assert done.returncode == 0, (count, done.stderr)
        if count % 2:
            assert is_patched(torch_env), count
            torch_env.check_record()
            done = torch_env.build("revert")
            assert done.returncode == 0, (count, done.stderr)
        assert snapshot(torch_env.site) == stock, count
        count += 1
    assert count > 10 and half_done > 5


def test_doctor_tells_of_an_interrupted_apply(torch_env: Torch) -> None:
    count = 0
    while not (torch_env.dist_info / "fxctx").exists():
        assert killed(torch_env, "apply", count)
        count += 1
    done = torch_env.build("doctor")
    assert done.returncode == 2
    assert "interrupted" in done.stdout + done.stderr


def test_an_error_half_way_is_rolled_back(torch_env: Torch, tmp_path: Path) -> None:
    before = snapshot(torch_env.site)
    code = """
    import errno, os
    real, left = os.replace, 4
    def replace(source, target):
        global left
        if "/new/" in str(source):
            left -= 1
            if left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        return real(source, target)
    os.replace = replace
    """
    torch_env.env["PYTHON"] = str(python_wrapper(tmp_path, torch_env.python, code))
    one_line(torch_env.build("apply"), "No space left on device", "free some space")
    assert snapshot(torch_env.site) == before


def test_another_series_replaces_the_first(torch_env: Torch) -> None:
    before = snapshot(torch_env.site)
    assert torch_env.build("apply").returncode == 0
    folder = torch_env.patches / f"v{RELEASE}"
    shutil.rmtree(folder)
    make_series(folder, {"torch/fx/trace.py": "flag = 2\n\n\ndef is_tracing():\n    return 2\n"})
    done = torch_env.build("apply")
    assert done.returncode == 0, done.stderr
    assert torch_env.evaluate("torch.fx.is_tracing()") == "2"
    assert (torch_env.site / "torch/fx/old.py").exists()
    torch_env.check_record()
    assert torch_env.build("revert").returncode == 0
    assert snapshot(torch_env.site) == before


def test_another_series_that_does_not_apply_leaves_the_first(torch_env: Torch) -> None:
    assert torch_env.build("apply").returncode == 0
    before = snapshot(torch_env.site)
    patch = next(torch_env.patches.glob("v*/0001-*.patch"))
    patch.write_text(patch.read_text().replace("-flag = False", "-flag = None"))
    one_line(torch_env.build("apply"), patch.name, "does not apply")
    assert snapshot(torch_env.site) == before


def test_two_at_once(torch_env: Torch) -> None:
    """The second waits for the first and finds its work done."""
    before = snapshot(torch_env.site)
    slow = "import os, time\nreal = os.replace\n" + (
        "def replace(*a):\n    time.sleep(0.3)\n    return real(*a)\nos.replace = replace\n"
    )
    wrapper = python_wrapper(torch_env.folder, torch_env.python, slow)
    build = str(torch_env.repo / "build.sh")
    first = subprocess.Popen(
        [build, "apply"],
        env=torch_env.environment | {"PYTHON": str(wrapper)},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (torch_env.dist_info / "fxctx").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    second = torch_env.build("apply")
    assert first.wait(60) == 0
    assert second.returncode == 0
    assert "waiting" in second.stderr and "patched already" in second.stderr
    assert torch_env.build("revert").returncode == 0
    assert snapshot(torch_env.site) == before


def test_a_torch_from_a_patched_wheel(torch_env: Torch, small_wheel: Path) -> None:
    torch_env.pip("uninstall", "-y", "torch")
    version = f"{RELEASE}+cpu.fxctx.1"
    wheel = make_wheel(torch_env.folder, version)
    assert torch_env.pip("install", "--no-deps", "--no-index", wheel).returncode == 0
    before = snapshot(torch_env.site)
    done = torch_env.build("apply")
    assert done.returncode == 0 and "patched wheel" in done.stderr
    one_line(torch_env.build("revert"), "patched wheel", "torch==2.13.0+cpu")
    assert snapshot(torch_env.site) == before


def test_the_manifest_names_patches_and_faults(torch_env: Torch) -> None:
    assert torch_env.build("apply").returncode == 0
    manifest = json.loads((torch_env.dist_info / "fxctx" / "manifest.json").read_text())
    assert [p["faults"] for p in manifest["patches"]] == [["F1", "F2"], []]
    assert manifest["patches"][0]["subject"] == "[fx] The flag becomes a ContextVar"
    assert manifest["originals"]["torch/fx/state/owner.py"] is None
    assert set(manifest["originals"]) - set(MODULES) == {
        "torch/fx/state/__init__.py",
        "torch/fx/state/owner.py",
    }
