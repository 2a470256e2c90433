"""Clients of other systems use the endpoints with only the names and tensors of NeMo-Aligner."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tritonclient.grpc
from pytriton.client import FuturesModelClient

from tests.servers.tiny_model import TinyValueModel

pytestmark = pytest.mark.slow

TOKENS = 12 + np.arange(24, dtype=np.int64).reshape(3, 8)  # letters
LENGTHS = np.array([[8], [3], [5]], dtype=np.int64)
TARGETS = {
    "tokens": TOKENS,
    "returns": np.ones((3, 7), dtype=np.float32),
    "prev_values": np.zeros((3, 7), dtype=np.float32),
    "mask": np.ones((3, 7), dtype=np.float32),
}


def infer_batch(role, model, **tensors):
    with FuturesModelClient(f"http://127.0.0.1:{role.endpoint.http}", model) as client:
        return client.infer_batch(**tensors).result(20)


def infer_sample(role, model, **tensors):
    with FuturesModelClient(f"http://127.0.0.1:{role.endpoint.http}", model) as client:
        return client.infer_sample(**tensors).result(20)


def grpc_infer(client, model, **tensors):
    names = {"int64": "INT64", "float32": "FP32"}
    inputs = []
    for name, array in tensors.items():
        inputs.append(tritonclient.grpc.InferInput(name, array.shape, names[str(array.dtype)]))
        inputs[-1].set_data_from_numpy(array)
    return client.infer(model, inputs, client_timeout=20)


@pytest.mark.promise("foreign-clients-infer-and-train")
def test_pytriton_client_infers_trains_and_saves_over_http(open_critic):
    before = infer_batch(open_critic, "critic_infer", tokens=TOKENS, sequence_lengths=LENGTHS)[
        "values"
    ]
    assert before.shape == (3, 8) and before.dtype == np.float32
    losses = [infer_sample(open_critic, "critic_train", **TARGETS)["loss_mean"] for _ in range(2)]
    assert losses[0].shape == (1,) and losses[0].dtype == np.float32 and losses[1] < losses[0]
    after = infer_batch(open_critic, "critic_infer", tokens=TOKENS, sequence_lengths=LENGTHS)[
        "values"
    ]
    assert not np.array_equal(before, after)
    assert infer_sample(open_critic, "critic_save", dummy_var=np.zeros(1, dtype=np.int64))[
        "status"
    ].tolist() == [0]
    saved = open_critic.log.parent / "checkpoints"
    assert list(saved.glob("step_*/critic/model.safetensors"))


def test_pytriton_client_scores_tokens_and_sentences(open_critic):
    scores = infer_batch(open_critic, "reward_model", tokens=TOKENS, sequence_lengths=LENGTHS)[
        "rewards"
    ]
    assert scores.shape == (3, 1) and scores.dtype == np.float32
    sentences = np.array([[b"abc"], [b"a"]])
    assert infer_batch(open_critic, "reward_model", sentences=sentences)["rewards"].tolist() == [
        [3.0],
        [1.0],
    ]


@pytest.mark.promise("foreign-clients-infer-and-train")
def test_plain_tritonclient_infers_and_trains_over_grpc(open_critic):
    with tritonclient.grpc.InferenceServerClient(
        f"127.0.0.1:{open_critic.endpoint.grpc}"
    ) as client:
        first = grpc_infer(client, "critic_train", **TARGETS).as_numpy("loss_mean")
        assert grpc_infer(client, "critic_train", **TARGETS).as_numpy("loss_mean") < first
        values = grpc_infer(
            client, "critic_infer", tokens=TOKENS, sequence_lengths=LENGTHS
        ).as_numpy("values")
        alone = grpc_infer(
            client, "critic_infer", tokens=TOKENS[:1], sequence_lengths=LENGTHS[:1]
        ).as_numpy("values")
    np.testing.assert_array_equal(values[:1], alone)
    assert (
        values.shape
        == TinyValueModel().values(torch.tensor(TOKENS), torch.tensor(LENGTHS[:, 0])).shape
    )


def test_server_without_key_refuses_management_requests(open_critic):
    with tritonclient.grpc.InferenceServerClient(
        f"127.0.0.1:{open_critic.endpoint.grpc}"
    ) as client:
        for manage in (
            client.get_model_repository_index,
            client.get_log_settings,
            client.get_trace_settings,
        ):
            with pytest.raises(
                tritonclient.grpc.InferenceServerException,
                match="this method or path is not served",
            ):
                manage()
        with pytest.raises(
            tritonclient.grpc.InferenceServerException, match="this method or path is not served"
        ):
            client.unload_model("critic_infer")
        assert client.is_model_ready("critic_infer") and client.get_model_config("critic_infer")
