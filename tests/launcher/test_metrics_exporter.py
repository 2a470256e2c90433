"""Metrics for Prometheus and probes of the launcher, of real launches with fake roles."""

from __future__ import annotations

import re
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from aligner.launcher.rank_environment import FreePorts
from tests.launcher.test_launch import finish, processes_of, start, wait_for

SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")


def request(port: int, path: str, **headers: str) -> tuple[int, str]:
    """Return the status and the text of a response; 0 if nothing listens."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        sent = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
        with opener.open(sent, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def scrape(port: int, run: Path) -> dict[str, float]:
    """Return the values of all metrics, by name and labels as in the text."""
    key = (run / "access_key").read_text().strip()
    status, text = request(port, "/metrics", Authorization=f"Bearer {key}")
    assert status == 200, text
    values: dict[str, float] = {}
    described = set()
    for line in text.splitlines():
        if line.startswith("# "):
            kind, name = line.split()[1:3]
            assert (kind, name) not in described, f"{name} is described twice"
            described.add((kind, name))
            continue
        match = SAMPLE.fullmatch(line)
        assert match is not None, line
        assert {("HELP", match[1]), ("TYPE", match[1])} <= described
        name = match[1] + (f"{{{match[2]}}}" if match[2] else "")
        assert name not in values
        values[name] = float(match[3])
    return values


@pytest.fixture
def port() -> int:
    with FreePorts() as ports:
        return next(ports)


def test_scrape_of_running_run(run: Path, port: int) -> None:
    launcher = start(run, {"trainer": "train_until_done"}, f"logging.prometheus.port={port}")
    try:
        wait_for(lambda: request(port, "/healthz") == (200, "ok\n"), "health")
        wait_for(lambda: request(port, "/readyz")[0] == 503, "answer")
        wait_for(lambda: "run is starting" in request(port, "/readyz")[1], "reason")
        (run / "done").touch()
        wait_for(lambda: not request(port, "/healthz")[0], "end of the run")
    finally:
        code, out, error = finish(launcher, run)
    assert code == 0, error
    assert f"Prometheus metrics: http://127.0.0.1:{port}/metrics\n" in out


def test_metrics_of_a_step_and_readiness(run: Path, port: int) -> None:
    launcher = start(run, {"trainer": "train_slowly"}, f"logging.prometheus.port={port}")
    try:
        wait_for(lambda: request(port, "/readyz") == (200, "ok\n"), "readiness")
        values = scrape(port, run)
        assert values['aligner_run_state{state="running"}'] == 1
        assert values['aligner_run_state{state="failed"}'] == 0
        assert (values["aligner_step"], values["aligner_steps"]) == (1, 7)
        assert values["aligner_reward_mean"] == pytest.approx(0.3, abs=0.5)
        assert values['aligner_role_healthy{role="reward"}'] == 1
        assert values['aligner_role_restarts_total{role="trainer"}'] == 0
        assert 0 <= values["aligner_last_step_age_seconds"] < 60

        reward = next(process for process in processes_of(run) if "reward" in process.cmdline())
        reward.kill()
        wait_for(
            lambda: scrape(port, run)['aligner_role_restarts_total{role="reward"}'] == 1, "restart"
        )
    finally:
        launcher.terminate()
        finish(launcher, run)


def test_metrics_require_key_and_probes_do_not(run: Path, port: int) -> None:
    launcher = start(run, {"trainer": "train_until_done"}, f"logging.prometheus.port={port}")
    try:
        wait_for(lambda: request(port, "/healthz")[0] == 200, "health")
        key = (run / "access_key").read_text().strip()
        assert request(port, "/metrics")[0] == 401
        assert request(port, "/metrics", Authorization="Bearer wrong")[0] == 401
        assert request(port, "/metrics", Authorization=f"Basic {key}")[0] == 401
        assert request(port, "/metrics", **{"triton-access-token": key})[0] == 200
        assert request(port, "/config.yaml")[0] == 404
        assert request(port, "/metrics/../access_key")[0] == 404
        (run / "access_key").rename(run / "moved_key")
        status, text = request(port, "/metrics")
        assert status == 500 and "cannot read the access key of the run" in text
        (run / "moved_key").rename(run / "access_key")
    finally:
        launcher.terminate()
        finish(launcher, run)


@pytest.mark.slow
def test_idle_connections_do_not_disturb_the_run(run: Path, port: int) -> None:
    launcher = start(run, {"trainer": "train_until_done"}, f"logging.prometheus.port={port}")
    try:
        wait_for(lambda: request(port, "/healthz")[0] == 200, "health")
        connections = []
        for _ in range(10):
            connections += [socket.create_connection(("127.0.0.1", port)) for _ in range(34)]
            # No probe may fail, because a failure can end the run.
            assert request(port, "/healthz")[0] == 200
        for connection in connections:
            connection.close()
        (run / "done").touch()
    finally:
        code, _, error = finish(launcher, run)
    assert code == 0, error


def test_busy_port_is_refused_before_the_run_starts(run: Path, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        code, _, error = finish(start(run, None, f"logging.prometheus.port={port}"), run)
    assert code == 2
    assert error.startswith(
        f"logging.prometheus.port={port}: cannot listen on 127.0.0.1:{port}: Address already in use"
    )
    assert not run.exists()
