"""Critic server: values, numbered updates, checkpoints, refused requests and client errors."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from aligner.data import fencing
from aligner.errors import AlignerError
from aligner.paths import RunPaths
from aligner.placement.addresses import KEY_HEADER
from aligner.schema import Config, RunConfig
from aligner.servers.critic_client import CriticClient, CriticState, RunId, UpdateJournal
from aligner.servers.critic_server import CriticRank
from aligner.servers.remote_client import Connection, RemoteError, RewardClient
from aligner.servers.wire_protocol import (
    CRITIC_INFER,
    CRITIC_SAVE,
    CRITIC_TRAIN,
    decode_text,
    encode_text,
)
from tests.servers.bad_requests import REFUSED, REFUSED_BY_TRITON, good, spoil
from tests.servers.tiny_model import TinyValueModel
from tests.worker_pool import free_port

TOKENS = torch.arange(24).reshape(3, 8)
LENGTHS = torch.tensor([8, 3, 5])
TARGETS = (TOKENS, torch.ones(3, 7), torch.zeros(3, 7), torch.ones(3, 7).bool())


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory):
    """A run directory that all tests share: each client is a later trainer of the same run."""
    return tmp_path_factory.mktemp("run")


@pytest.fixture
def client(critic, run_directory):
    """A client that continues after the shared critic's last update."""
    client = critic_client(critic, run_directory)
    step = client.control("version")["version"] + 1000
    saved = client.control("checkpoint", step=step)
    client.start([CriticState(step, saved["sequence_number"] + 1)])
    yield client
    client.close()


def critic_client(role, directory):
    run = RunId("run-a", fencing.claim_run(Config(run=RunConfig(dir=str(directory))))["attempt"])
    return CriticClient(
        role.endpoint, role.access, 20, run, UpdateJournal(directory / "journal"), 16
    )


def send(client, endpoint, arrays, timeout_s=20):
    return client._replicas[0].infer(endpoint, arrays, timeout_s)


def update(client, number, run=None):
    """Send a numbered update over the wire; return its stats."""
    tokens, returns, old_values, mask = (tensor.numpy() for tensor in TARGETS)
    targets = {
        "tokens": tokens,
        "returns": returns,
        "prev_values": old_values,
        "mask": mask.astype(np.float32),
    }
    order = {
        "sequence_number": np.array([number]),
        "run_id": encode_text(run or str(client._recovery._run)),
    }
    return json.loads(decode_text(send(client, CRITIC_TRAIN, targets | order)["stats"]))


def values(client):
    """Return the critic's values without requiring an update number."""
    arrays = {"tokens": TOKENS.numpy(), "sequence_lengths": LENGTHS[:, None].numpy()}
    return torch.from_numpy(send(client, CRITIC_INFER, arrays)["values"].copy())


def test_values_equal_model_and_are_zero_beyond_longest_row(client, critic):
    # Other tests have trained the shared critic; the fixture `client` has just saved its weights.
    step = client.control("version")["version"] + 1000
    model = TinyValueModel()
    model.load(RunPaths(critic.log.parent).checkpoint(step, "critic"))

    values = client.values(torch.nn.functional.pad(TOKENS, (0, 2)), LENGTHS).result()
    assert values.shape == (3, 10) and values[:, 8:].eq(0).all()
    torch.testing.assert_close(values[:, :8], model.values(TOKENS, LENGTHS))


def test_client_splits_batch_beyond_server_maximum(client):
    tokens = torch.randint(0, 64, (37, 6))
    lengths = torch.full((37,), 6)
    whole = client.values(tokens, lengths).result()
    torch.testing.assert_close(whole[20:21], client.values(tokens[20:21], lengths[20:21]).result())


def test_values_over_http_json_equal_client_values(client, critic):
    inputs = [
        {"name": "tokens", "shape": [3, 8], "datatype": "INT64", "data": TOKENS.flatten().tolist()},
        {
            "name": "sequence_lengths",
            "shape": [3, 1],
            "datatype": "INT64",
            "data": LENGTHS.tolist(),
        },
    ]
    request = urllib.request.Request(
        f"http://127.0.0.1:{critic.endpoint.http}/v2/models/critic_infer/infer",
        data=json.dumps({"inputs": inputs}).encode(),
        headers={"Content-Type": "application/json", KEY_HEADER: critic.access.key},
    )
    with urllib.request.urlopen(request, timeout=20) as response:
        (output,) = json.load(response)["outputs"]
    values = torch.tensor(output["data"]).reshape(3, 8)
    torch.testing.assert_close(values, client.values(TOKENS, LENGTHS).result())


def test_updates_run_in_call_order_and_lower_the_loss(client):
    start = client.control("version")["version"]
    futures = [client.train(*TARGETS) for _ in range(5)]
    losses = [future.result()["loss"] for future in futures]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
    assert client.control("version")["version"] == start + 5


def test_repeated_update_is_answered_but_not_applied_again(client):
    first = client.train(*TARGETS).result()
    after = values(client)
    assert update(client, client.control("version")["sequence_number"]) == first
    assert torch.equal(values(client), after)


@pytest.mark.parametrize(
    ("shift", "told"), [(2, "updates must not be skipped"), (-1, "already applied")]
)
def test_skipped_or_old_update_number_is_refused(client, shift, told):
    for _ in range(2):
        client.train(*TARGETS).result()
    before, last = values(client), client.control("version")["sequence_number"]
    with pytest.raises(RemoteError, match=told) as caught:
        update(client, last + shift)
    assert caught.value.kind == "SequenceError"
    assert torch.equal(values(client), before)


def test_values_request_for_other_update_is_refused(client):
    client.train(*TARGETS).result()
    last = client.control("version")["sequence_number"]
    arrays = {"tokens": TOKENS.numpy(), "sequence_lengths": LENGTHS[:, None].numpy()}
    for number, told in (
        (last - 1, f"the last update is {last}"),
        (last + 1, f"the last update is {last}"),
    ):
        with pytest.raises(RemoteError, match=told) as caught:
            send(client, CRITIC_INFER, arrays | {"sequence_number": np.full((3, 1), number)})
        assert caught.value.kind == "SequenceError"
    send(client, CRITIC_INFER, arrays | {"sequence_number": np.full((3, 1), last)})


def test_update_of_other_run_or_replaced_trainer_is_refused(client):
    client.train(*TARGETS).result()
    last, before = client.control("version")["sequence_number"], values(client)
    with pytest.raises(RemoteError, match="belongs to run 'run-a'"):
        update(client, last + 1, "run-b")
    name, attempt = client.control("version")["run_id"].split("@")
    successor = f"{name}@{int(attempt) + 1}"
    # The critic answers the repeat from memory. From now on it refuses the older trainer.
    update(client, last, successor)
    with pytest.raises(RemoteError, match=f"{successor!r} has taken over"):
        client.train(*TARGETS).result()
    assert torch.equal(values(client), before)


def test_request_for_earlier_server_instance_is_refused(client):
    arrays = {"tokens": TOKENS.numpy(), "sequence_lengths": LENGTHS[:, None].numpy()}
    with pytest.raises(RemoteError) as caught:
        send(client, CRITIC_INFER, arrays | {"instance": np.full((3, 1), b"gone", dtype=object)})
    assert caught.value.kind == "InstanceError"
    with pytest.raises(RemoteError, match="InstanceError"):
        client.control("checkpoint", step=1, instance="gone")


CASES = [case for case in REFUSED if case[0] in (CRITIC_INFER, CRITIC_TRAIN)]


def test_bad_requests_are_refused_without_failing_good_ones(client):
    expected = values(client)
    version = client.control("version")["version"]
    with ThreadPoolExecutor(4) as callers:
        for endpoint, wrong, changes, told in CASES:
            good_requests = [callers.submit(values, client) for _ in range(2)]
            with pytest.raises(RemoteError) as caught:
                send(client, endpoint, spoil(endpoint, changes))
            assert caught.value.kind == "RequestError" and told in str(caught.value), wrong
            assert all(torch.equal(future.result(20), expected) for future in good_requests), wrong
    assert client.control("version")["version"] == version


def http_infer(role, endpoint, arrays):
    names = {"l": "INT64", "f": "FP32", "d": "FP64", "S": "BYTES"}
    inputs = [
        {
            "name": name,
            "shape": list(array.shape),
            "datatype": names[array.dtype.char],
            "data": [
                item.decode() if isinstance(item, bytes) else item
                for item in array.ravel().tolist()
            ],
        }
        for name, array in arrays.items()
    ]
    request = urllib.request.Request(
        f"http://127.0.0.1:{role.endpoint.http}/v2/models/{endpoint.name}/infer",
        data=json.dumps({"inputs": inputs}).encode(),
        headers={KEY_HEADER: role.access.key},
    )
    urllib.request.urlopen(request, timeout=20).close()


@pytest.mark.parametrize(
    ("endpoint", "wrong", "changes", "told"),
    REFUSED_BY_TRITON,
    ids=[f"{case[0].name}-{case[1]}" for case in REFUSED_BY_TRITON],
)
def test_request_refused_by_triton_fails_only_its_caller(
    client, critic, endpoint, wrong, changes, told
):
    with pytest.raises(urllib.error.HTTPError) as caught:
        http_infer(critic, endpoint, spoil(endpoint, changes))
    assert caught.value.code >= 400 and "error" in json.load(caught.value)
    assert client.values(TOKENS, LENGTHS).result().shape == (3, 8)


def test_http_garbage_is_refused_and_next_request_is_served(client, critic):
    for data in (b"\x00\xff garbage", b"{}", b'{"inputs": 3}'):
        url = f"http://127.0.0.1:{critic.endpoint.http}/v2/models/critic_train/infer"
        request = urllib.request.Request(url, data=data, headers={KEY_HEADER: critic.access.key})
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(request, timeout=20).close()
    assert client.values(TOKENS, LENGTHS).result().shape == (3, 8)


def test_restore_resets_weights_and_sequence_number(client):
    client.train(*TARGETS).result()
    saved = client.control("checkpoint", step=7)
    weights = client.values(TOKENS, LENGTHS).result()
    lost = client.train(*TARGETS).result()
    assert not torch.equal(client.values(TOKENS, LENGTHS).result(), weights)
    assert client.control("restore", step=7) == saved | {"run_id": "run-a@0"}
    assert torch.equal(values(client), weights)
    assert update(client, saved["sequence_number"] + 1) == lost


@pytest.mark.parametrize(
    ("op", "order", "told"),
    [
        ("begin_checkpoint", {"sequence_number": -1}, "SequenceError: .*must follow update -1"),
        ("checkpoint", {"run_id": "run-b@0"}, "SequenceError: .*belongs to run 'run-a'"),
        (
            "restore",
            {"sequence_number": 0},
            r"InstanceError: .*expects last update 0, but the critic's last update is \d+",
        ),
    ],
)
def test_late_or_foreign_checkpoint_request_changes_nothing(client, critic, op, order, told):
    for _ in range(2):
        client.train(*TARGETS).result()
    client.control("checkpoint", step=11)
    client.train(*TARGETS).result()
    saved, before = (
        critic.log.parent / "checkpoints" / "step_11" / "critic" / "updates.json",
        values(client),
    )
    content = saved.read_text()
    with pytest.raises(RemoteError, match=told):
        client.control(op, step=11, **order)
    assert saved.read_text() == content
    assert torch.equal(values(client), before)


def test_skipped_update_is_reported_when_repeated(client):
    before = values(client)
    tokens, _, old_values, mask = TARGETS
    # The loss of these returns is infinite.
    client.train(tokens, torch.full_like(old_values, 1e30), old_values, mask).result()
    last = client.control("version")["sequence_number"]
    answer = send(
        client,
        CRITIC_TRAIN,
        good(CRITIC_TRAIN)
        | {
            "sequence_number": np.array([last]),
            "run_id": encode_text(client.control("version")["run_id"]),
        },
    )
    assert np.isnan(answer["loss_mean"]).all() and json.loads(decode_text(answer["stats"])) == {
        "skipped": 1.0
    }
    assert torch.equal(values(client), before)
    client.train(*TARGETS).result()


def test_checkpoint_contains_state_at_its_begin(client):
    begun = client.begin_checkpoint(step=8)
    weights = client.values(TOKENS, LENGTHS).result()
    client.train(*TARGETS).result()
    client.finish_checkpoint()
    assert client.control("version")["sequence_number"] == begun.updates
    assert client.control("restore", step=8)["sequence_number"] == begun.updates - 1
    assert torch.equal(values(client), weights)


def test_critic_save_does_not_disturb_trainer_checkpoint(client):
    begun = client.begin_checkpoint(step=9)
    assert send(client, CRITIC_SAVE, good(CRITIC_SAVE))["status"].tolist() == [0]
    client.finish_checkpoint()
    assert client.control("restore", step=9)["sequence_number"] == begun.updates - 1


@pytest.mark.parametrize(
    ("op", "arguments", "told"),
    [
        ("restore", {"step": 999}, "critic checkpoint .* does not exist"),
        ("restore", {"step": -1}, "step: got -1, allowed: an integer from 0 to"),
        ("checkpoint", {"step": 10**300}, "step: got 1000.*, allowed: an integer from 0 to"),
        (
            "begin_checkpoint",
            {"step": 1, "sequence_number": "1"},
            "sequence_number: got '1', allowed: an integer from -1 to",
        ),
        ("checkpoint", {}, "got keys op, expected: op, step"),
        ("dance", {}, "got op 'dance', allowed: health"),
    ],
)
def test_invalid_control_request_is_refused(client, op, arguments, told):
    with pytest.raises(RemoteError, match=told):
        client.control(op, **arguments)
    assert client.control("health")["status"] == "ok"


def test_critic_save_writes_checkpoint_of_current_version(client, critic):
    assert send(client, CRITIC_SAVE, good(CRITIC_SAVE))["status"].tolist() == [0]
    version = client.control("version")["version"]
    directory = critic.log.parent / "checkpoints" / f"step_{version}"
    assert (directory / "critic" / "model.safetensors").is_file()
    assert json.loads((directory / "critic" / "updates.json").read_text())["run"] in ("run-a", None)


def test_close_cancels_pending_requests(critic, run_directory):
    client = critic_client(critic, run_directory)
    saved = client.control("checkpoint", step=client.control("version")["version"] + 2000)
    client.start([CriticState(saved["step"], saved["sequence_number"] + 1)])
    futures = [client.train(*TARGETS) for _ in range(50)]
    client.close()
    with pytest.raises(RemoteError, match="the client is closing"):
        [future.result() for future in futures]
    assert all(future.done() for future in futures)


def test_unconsumed_answer_is_reported(client):
    future = client.values(TOKENS, LENGTHS)
    with pytest.raises(AlignerError, match="1 answers of the critic server were never consumed"):
        client.assert_settled()
    future.result()
    client.assert_settled()


def test_error_names_address_of_silent_or_absent_server(critic):
    connection = Connection("critic", critic.endpoint, critic.access)
    arrays = {"tokens": TOKENS.numpy(), "sequence_lengths": LENGTHS[:, None].numpy()}
    here = f"critic server at 127.0.0.1:{critic.endpoint.grpc}"
    # The deadline has passed before the request is sent, so no server is fast enough.
    with pytest.raises(
        RemoteError, match=f"{here}: Timeout: no answer to critic_infer within 1e-09 s"
    ):
        connection.infer(CRITIC_INFER, arrays, 1e-9)
    connection.close()
    port = free_port()
    absent = RewardClient(
        [type(critic.endpoint)("127.0.0.1", port, port, port)], critic.access, 0.5
    )
    with pytest.raises(
        RemoteError, match=rf"127.0.0.1:{port}: Unreachable: .*; gave up after 0.5 s"
    ):
        absent.score(TOKENS, LENGTHS, LENGTHS).result()
    with pytest.raises(RemoteError, match=rf"127.0.0.1:{port}: NotReady: not ready within 0.3 s"):
        absent.wait_ready(0.3)
    absent.close()


def test_critic_refuses_checkpoint_of_replaced_trainer(tmp_path, monkeypatch):
    monkeypatch.setattr(fencing, "_writer_claim", None)
    config = Config(run=RunConfig(dir=str(tmp_path)))
    rank, checkpoints = CriticRank(config, TinyValueModel()), tmp_path / "checkpoints"
    run = [f"run@{fencing.claim_run(config)['attempt']}"]
    rank.checkpoint(step=1, run_id=run[0])
    rank.begin_checkpoint(step=2, run_id=run[0])
    run.append(f"run@{fencing.claim_run(config)['attempt']}")
    with pytest.raises(
        AlignerError, match=r"attempt 1 \(.*\) has taken over the run; attempt 0 may no longer"
    ):
        rank.finish_checkpoint()
    # The state in which the new trainer finds the old trainer's critic.
    rank._pending_checkpoint = (2, rank._ledger)
    rank.restore(step=1, run_id=run[1])
    rank.checkpoint(step=3, run_id=run[1])
    assert [
        (checkpoints / f"step_{step}" / "critic" / "updates.json").exists() for step in (1, 2, 3)
    ] == [True] * 3
