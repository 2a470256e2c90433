"""The security campaign `python -m benchmarks.security`: its outcomes, its exit code, and a complete
run without findings."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from benchmarks.security import __main__ as campaign
from benchmarks.security import registry
from benchmarks.security.registry import HELD, Outcome, Probe, finding, not_enforceable


def fail() -> Outcome:
    raise LookupError("no such file")


def run(
    monkeypatch: pytest.MonkeyPatch, *functions: Callable[[], Outcome], arguments: tuple[str, ...]
) -> int:
    """Run the campaign with probes `probe0`, `probe1` and so on, and return its exit code."""
    probes = [
        Probe("sandbox", f"probe{number}", "attempt", "expected", "component", function)
        for number, function in enumerate(functions)
    ]
    monkeypatch.setattr(campaign, "load_probes", lambda groups: probes)
    return campaign.main(arguments)


def test_campaign_without_findings_exits_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    functions = (lambda: HELD, lambda: not_enforceable("no namespaces"))
    assert run(monkeypatch, *functions, arguments=("--json",)) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["findings"] == 0
    held, missing = report["probes"]
    assert held["state"] == "held" and held["name"] == "probe0"
    assert missing["state"] == "not enforceable" and missing["detail"] == "no namespaces"


@pytest.mark.parametrize("function", [lambda: finding("escaped"), fail])
def test_finding_or_failed_probe_exits_1(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    function: Callable[[], Outcome],
) -> None:
    assert run(monkeypatch, lambda: HELD, function, arguments=("--json",)) == 1
    report = json.loads(capsys.readouterr().out)
    assert [result["state"] for result in report["probes"]] == ["held", "finding"]
    assert report["findings"] == 1
    assert run(monkeypatch, function, arguments=()) == 1
    assert "0 held, 0 not enforceable, 1 finding" in capsys.readouterr().out


def test_unknown_group_is_refused_with_the_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        campaign.main(["sandboxes"])
    assert exit_info.value.code == 2
    assert "sandboxes: no such group; allowed: " in capsys.readouterr().err


def test_every_probe_is_described() -> None:
    probes = registry.load_probes(registry.list_groups())
    assert {each.group for each in probes} == {*registry.list_groups()}
    for each in probes:
        assert each.attempt and each.expected and each.component, each.name


def test_json_report_is_alone_on_standard_output() -> None:
    program = """
import os, sys
from benchmarks.security import __main__ as campaign
from benchmarks.security.registry import HELD, Probe
def talk():
    print("from Python")
    os.system("echo from a program")
    return HELD
campaign.load_probes = lambda groups: [Probe("g", "n", "a", "e", "c", talk)]
sys.exit(campaign.main(["--json"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["findings"] == 0
    assert "from Python\n" in done.stderr and "from a program\n" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("group", registry.list_groups())
def test_campaign_has_no_findings_on_this_machine(group: str) -> None:
    command = [sys.executable, "-m", "benchmarks.security", group, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["findings"] == 0
