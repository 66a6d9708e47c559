"""The parts of the repository agree with each other."""

from __future__ import annotations

import re
from pathlib import Path

import check_series
import doctor
import pytest
import series
from small_torch import ROOT

ALL = series.all_series()
PULL_REQUEST = ROOT / "patches" / "PULL_REQUEST.md"
# Files of PyTorch that the pull request names, and the series leaves as they are.
UNTOUCHED = {
    "test/test_fx.py",
    "test/test_proxy_tensor.py",
    "test/dynamo/test_misc.py",
    "torch/csrc/dynamo/eval_frame.c",
    "torch/csrc/dynamo/extra_state.cpp",
    "torch/utils/checkpoint.py",
}
PATCHES = [(s, patch) for s in ALL for patch in s.patches]


def test_torch_tests_are_what_the_newest_series_adds() -> None:
    check_series.check_torch_tests(ALL[0], ROOT / "torch_tests")


def test_the_newest_release_is_the_one_required() -> None:
    lines = (ROOT / "requirements-newest.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [f"torch=={ALL[0].release}"]


def test_the_readme_says_what_each_release_mends() -> None:
    """./build.sh refresh writes these rows."""
    rows = re.findall(r"^\| \d+\.\d+\.\d+ .*\n", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert "".join(rows) == series.readme_rows()


def test_the_readme_names_the_faults_as_the_doctor_does() -> None:
    rows = re.findall(r"^\| (F\d+) \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert dict(rows) == doctor.FAULTS


@pytest.mark.parametrize("chosen", ALL, ids=lambda s: s.folder.name)
def test_the_numbers_of_a_series_have_no_gap(chosen: series.Series) -> None:
    numbers = [int(patch.name[:4]) for patch in chosen.patches]
    assert numbers == list(range(1, len(numbers) + 1))
    natives = [patch.native for patch in chosen.patches]
    assert natives == sorted(natives), "patches that need a build from source come last"


@pytest.mark.parametrize(
    ("chosen", "patch"), PATCHES, ids=[f"{s.folder.name}/{p.name[:4]}" for s, p in PATCHES]
)
def test_a_patch_says_what_it_mends_and_brings_tests(
    chosen: series.Series, patch: series.Patch
) -> None:
    assert patch.faults and set(patch.faults) <= doctor.FAULTS.keys()
    assert any(re.fullmatch(r"test/.*test_\w+\.py", path) for path in patch.paths)
    assert re.match(rb"From 0{40} ", patch.content)


@pytest.mark.parametrize("chosen", ALL, ids=lambda s: s.folder.name)
def test_listed_guards_are_in_files_of_the_series(chosen: series.Series) -> None:
    files = chosen.tests()
    path = ROOT / "tests" / "stock_passes" / f"v{chosen.release}.txt"
    for line in path.read_text().splitlines() if path.exists() else []:
        test = line.partition("#")[0].strip().removeprefix("? ")
        assert not test or test.partition("::")[0] in files, test


def test_the_pull_request_names_every_patch_and_its_faults() -> None:
    rows = [line for line in PULL_REQUEST.read_text().splitlines() if re.match(r"\| F\d+ ", line)]
    named, last = set(), ""
    for row in rows:
        fault, *_, commits = (cell.strip() for cell in row.strip("| ").split(" | "))
        for commit in commits.split(", and "):
            last = last if commit == "the same" else commit
            named.add((last, fault))
    assert named == {(patch.subject, fault) for patch in ALL[0].patches for fault in patch.faults}


def test_the_files_that_the_pull_request_names_exist() -> None:
    touched = {path for patch in ALL[0].patches for path in patch.paths}
    names = re.findall(r"(?<![\w/.*])[\w.-]+(?:/[\w.-]+)+\.\w+", PULL_REQUEST.read_text())
    assert {name for name in touched if re.search(r"/test_\w+\.py$", name)} <= set(names)
    for name in names:
        assert name in touched | UNTOUCHED or (ROOT / name).exists(), name


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks" / "results").glob("*.json*")), ids=lambda p: p.name
)
def test_results_name_no_folder_of_a_machine(path: Path) -> None:
    text = path.read_text()
    assert not re.findall(r'(?:File \\"|(?<![\w/.]))/(?:tmp|root|home|opt|work)/', text)
