"""build.sh doctor: what it makes of what the probes find. test_installed.py has real probes."""

from __future__ import annotations

import doctor
import pytest
from small_torch import RELEASE, Torch, one_line

pytestmark = pytest.mark.timeout(300)

# A torch whose probes find what this table says.
FINDINGS = {"F1": ("affected", "it raises"), "F2": ("ok", ""), "F3": ("affected", "it raises")}
MENDS_F1 = {"fxctx": 1, "kind": "in place", "patches": [{"faults": ["F1", "F2"]}]}


@pytest.fixture
def diagnose(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def run(findings: dict, manifest: dict) -> tuple[int, str]:
        tag = ".fxctx.1" if manifest else ""
        monkeypatch.setattr(doctor, "probe", lambda: (f"{RELEASE}+cpu{tag}", findings))
        monkeypatch.setattr(doctor, "installed_series", lambda version: manifest)
        monkeypatch.setattr(doctor, "find_torch", lambda: "site-packages/torch")
        status = doctor.run([])
        return status, capsys.readouterr().out

    return run


def test_an_unpatched_torch(diagnose) -> None:
    status, text = diagnose(FINDINGS, {})
    assert status == 1
    assert "not patched" in text and "./build.sh apply" in text
    states = {line.split()[0]: line.split()[1] for line in text.splitlines() if line[0] == "F"}
    assert states == {"F1": "AFFECTED", "F2": "OK", "F3": "AFFECTED"}


def test_a_fault_without_a_patch_does_not_count_on_a_patched_torch(diagnose) -> None:
    status, text = diagnose(FINDINGS | {"F1": ("ok", "")}, MENDS_F1)
    assert status == 0
    assert "F3   AFFECTED" in text and "no patch for it yet" in text
    assert "all is well" in text


def test_a_fault_that_should_be_mended_counts(diagnose) -> None:
    status, text = diagnose(FINDINGS, MENDS_F1)
    assert status == 1
    assert "F1 should be mended" in text


def test_cannot_tell(diagnose) -> None:
    status, text = diagnose({"F1": ("unknown", "OSError"), "F3": ("ok", "")}, MENDS_F1)
    assert status == 2 and "CANNOT TELL" in text
    status, _ = diagnose({"F1": ("ok", ""), "F3": ("unknown", "OSError")}, MENDS_F1)
    assert status == 0


def test_every_probe_is_described() -> None:
    source = doctor.PROBES.read_text()
    for fault in doctor.FAULTS:
        assert f'"{fault}": {fault.lower()},' in source


def test_a_torch_that_cannot_be_imported(torch_env: Torch) -> None:
    """The small torch has no nn."""
    one_line(torch_env.build("doctor"), "importing torch fails", status=2)


def test_no_torch(torch_env: Torch) -> None:
    torch_env.pip("uninstall", "-y", "torch")
    one_line(torch_env.build("doctor"), "has no torch", "PYTHON", status=2)
