from __future__ import annotations

import contextlib
import dataclasses
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request

import psutil
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from aligner.errors import ConfigError
from aligner.placement.addresses import KEY_HEADER, Access, create_access_key, http_address, interface_address, run_access
from aligner.schema import Config, TLSConfig
from aligner.servers.connection import Connection, RemoteError
from aligner.servers.triton_host import Guard
from aligner.servers.wire_protocol import CONTROL, CRITIC_INFER, CRITIC_SAVE, CRITIC_TRAIN, REWARD_MODEL, text_array
from tests.servers.bad_requests import good
from tests.servers.roles import RunningRole


def http(role, path, key=None, data=None):
    """(status, body) of a request to Triton's HTTP."""
    headers = {} if key is None else {KEY_HEADER: key}
    request = urllib.request.Request(f"http://127.0.0.1:{role.endpoint.http}{path}", data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


APIS = [
    ("/v2", None),
    ("/v2/models/critic_infer", None),
    ("/v2/models/critic_infer/config", None),
    ("/v2/models/critic_infer/stats", None),
    ("/v2/models/critic_infer/infer", b'{"inputs": []}'),
    ("/v2/models/control/infer", b'{"inputs": [{"name": "request", "shape": [1], "datatype": "BYTES", "data": ["{}"]}]}'),
    ("/v2/repository/index", b""),
    ("/v2/repository/models/critic_infer/unload", b"{}"),
    ("/v2/systemsharedmemory/status", None),
    ("/v2/trace/setting", None),
    ("/v2/logging", None),
]


@pytest.mark.parametrize("key", [None, "", "wrong"])
def test_over_http_only_health_is_open_to_those_without_the_key(critic, key):
    for path, data in APIS:
        status, body = http(critic, path, key, data)
        assert status in (400, 403) and "restricted" in body, (path, status, body)
    assert [http(critic, path)[0] for path in ("/v2/health/ready", "/v2/health/live", "/v2/models/control/ready")] == [200] * 3
    assert http(critic, "/v2/models/critic_infer/config", critic.access.key)[0] == 200


@pytest.mark.parametrize("key", [None, "", "wrong"])
def test_over_grpc_too_whatever_is_asked_for(critic, key):
    with contextlib.closing(Connection("critic", critic.endpoint, Access(key))) as stranger:
        for spec in (CRITIC_INFER, CRITIC_TRAIN, CRITIC_SAVE):
            with pytest.raises(RemoteError, match="AccessError: it wants the run's key"):
                stranger.infer(spec, good(spec), 20)
        with pytest.raises(RemoteError, match="AccessError"):
            stranger.infer(CONTROL, {"request": text_array('{"op": "shutdown"}')}, 20)
        stranger.check_ready(20)
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{critic.endpoint.grpc}") as client:
        for ask in (client.get_server_metadata, client.get_model_repository_index, client.get_log_settings):
            with pytest.raises(InferenceServerException, match="restricted"):
                ask()


def test_the_key_is_in_no_log_and_no_error(critic, reward):
    assert len(critic.access.key) > 30
    logs = {*critic.log.parent.glob("*.log"), *(critic.log.parent / "logs").iterdir()}
    assert {"critic-triton.log", "reward-triton.log", critic.log.name, reward.log.name} <= {log.name for log in logs}
    assert all(critic.access.key not in log.read_text() for log in logs)
    assert critic.access.key not in repr(critic.access) + repr(Guard(critic.access.key))


def test_metrics_tell_how_much_waits(critic):
    with urllib.request.urlopen(f"http://127.0.0.1:{critic.endpoint.metrics}/metrics", timeout=20) as response:
        text = response.read().decode()
    for name in ("nv_inference_pending_request_count", "nv_inference_request_failure", "nv_inference_queue_duration_us"):
        assert f'{name}{{model="critic_infer"' in text, name


def certificate(folder, name, authority=None):
    """NAME.key and NAME.pem for 127.0.0.1, signed by the authority or, without one, by themselves."""
    subject = ["-subj", f"/CN={name}", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-days", "2"]
    signer = [] if authority is None else ["-CA", f"{authority}.pem", "-CAkey", f"{authority}.key"]
    names = [] if authority is None else ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=CA:FALSE"]
    command = ["openssl", "req", "-x509", *subject, *signer, *names, "-out", f"{name}.pem"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    folder = tmp_path_factory.mktemp("tls")
    certificate(folder, "authority")
    certificate(folder, "server", "authority")
    certificate(folder, "stranger")
    return folder


@pytest.fixture(scope="module")
def secure(certificates, tmp_path_factory):
    """A server with mutual TLS and the run's key."""
    role = RunningRole("reward", tmp_path_factory.mktemp("secure"), TLS=str(certificates))
    try:
        yield role.wait_ready()
    finally:
        role.stop()


def asked(role, access):
    with contextlib.closing(Connection("reward", role.endpoint, access)) as connection:
        return connection.infer(REWARD_MODEL, good(REWARD_MODEL), 5)["rewards"].shape


@pytest.mark.slow
def test_with_mutual_tls_only_key_and_certificate_together_are_served_and_plaintext_is_refused(secure, certificates):
    trusted = Access(
        secure.access.key, certificates / "authority.pem", certificates / "server.pem", certificates / "server.key"
    )
    assert asked(secure, trusted) == (3, 1)
    refused = {
        "plaintext": secure.access,
        "no certificate": Access(secure.access.key, certificates / "authority.pem"),
        "another authority's": dataclasses.replace(
            trusted, certificate=certificates / "stranger.pem", certificate_key=certificates / "stranger.key"
        ),
        "no trust in the server": dataclasses.replace(trusted, authorities=certificates / "stranger.pem"),
        "no key": dataclasses.replace(trusted, key=None),
        "wrong key": dataclasses.replace(trusted, key="wrong"),
    }
    for what, access in refused.items():
        with pytest.raises(RemoteError):
            asked(secure, access)
            pytest.fail(what)
    assert asked(secure, trusted) == (3, 1)


@pytest.mark.slow
def test_with_tls_http_serves_this_machine_with_health_alone_even_to_holders_of_the_runs_key(secure):
    assert http(secure, "/v2/health/ready") == (200, "")
    for path, data in APIS:
        status, body = http(secure, path.replace("critic_infer", "reward_model"), secure.access.key, data)
        assert status in (400, 403) and "restricted" in body, (path, status, body)
    triton = [process for process in secure.seen if process.name() == "tritonserver"]
    listening = {
        connection.laddr
        for process in triton
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert ("127.0.0.1", secure.endpoint.http) in listening
    with pytest.raises((ssl.SSLError, OSError)):
        urllib.request.urlopen(f"http://127.0.0.1:{secure.endpoint.grpc}/v2/health/ready", timeout=5).close()


def test_what_is_closed_and_to_whom():
    def closed(guard):
        settings = guard.triton_settings()
        found = {}
        for name in ("http_restricted_api", "grpc_restricted_protocol"):
            apis, key = settings[name].split(f":{KEY_HEADER}=")
            found[name[:4]] = ("inference" in apis, "model-repository" in apis, "health" in apis, key)
        return found

    tls = TLSConfig("server.pem", "server.key")
    own = {"own_key": "own"}
    everything, management = (True, True, False), (False, True, False)
    assert closed(Guard("key", **own)) == {"http": (*everything, "key"), "grpc": (*everything, "key")}
    assert closed(Guard(None, **own)) == {"http": (*management, "own"), "grpc": (*management, "own")}
    assert closed(Guard("key", tls, **own)) == {"http": (*everything, "own"), "grpc": (*everything, "key")}
    assert closed(Guard(None, tls, **own)) == {"http": (*everything, "own"), "grpc": (*management, "own")}
    assert http_address("10.0.0.1", tls) == "127.0.0.1" and http_address("10.0.0.1", TLSConfig()) == "10.0.0.1"


def test_a_run_has_one_key_that_only_its_owner_may_read(tmp_path):
    config = Config()
    config.run.dir = str(tmp_path)
    with pytest.raises(ConfigError, match="cannot read the run's access key"):
        run_access(config)
    create_access_key(config)
    key = run_access(config).key
    create_access_key(config)
    assert run_access(config).key == key and [path.name for path in tmp_path.iterdir()] == ["access_key"]
    assert (tmp_path / "access_key").stat().st_mode & 0o777 == 0o600
    config.server.guard = "none"
    assert run_access(config).key is None


def test_an_interface_is_known_by_name_or_address_and_another_names_those_there_are():
    assert interface_address("lo") == "127.0.0.1" and interface_address("10.1.2.3") == "10.1.2.3"
    with pytest.raises(ConfigError, match=r"server.interface=nothere0: .* allowed: .*lo \(127.0.0.1\)"):
        interface_address("nothere0")
