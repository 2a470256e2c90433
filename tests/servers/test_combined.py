"""A critic server that also serves the reward, with both models on the same devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from aligner.rewards.sources import TextSource
from aligner.servers.critic_server import with_reward_endpoints
from aligner.servers.remote_client import Connection, RemoteError
from aligner.servers.wire_protocol import (
    CRITIC_INFER,
    CRITIC_INFER_WITH_REWARD,
    CRITIC_TRAIN,
    REWARD_MODEL,
    RequestError,
)
from tests.megatron.reference import save_llama, save_reward_llama
from tests.servers import combined_jobs
from tests.servers.role_main import character_tokenizer, length_scorer, scoring
from tests.servers.tiny_model import TinyValueModel

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> tuple[str, str]:
    return (
        str(save_llama(tmp_path_factory.mktemp("critic"), tied=False)),
        str(save_reward_llama(tmp_path_factory.mktemp("reward"))),
    )


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ({"data": 2}, {"distributed": True}),
        ({"tensor": 2, "sequence": True}, {}),
        ({"pipeline": 2}, {"distributed": True, "precision": "bf16"}),
    ],
    ids=["DP2-distributed", "TP2-SP", "PP2-bf16"],
)
def test_critic_and_reward_on_shared_devices_equal_separate_ones(
    pool, directories, tmp_path, layout, settings
):
    for rank in pool.run(
        combined_jobs.separate_and_shared, 2, *directories, str(tmp_path), layout, settings
    ):
        for apart, together in zip(rank["apart"], rank["together"], strict=True):
            assert (
                torch.equal(apart, together)
                if isinstance(apart, torch.Tensor)
                else apart == together
            )
        whole = rank["whole"]
        resident = {
            "neither": [0, 0],
            "critic": [whole["critic"], 0],
            "reward": [0, whole["reward"]],
        }
        assert [held for _, *held in rank["seen"]] == [
            resident[asked] for asked, *_ in rank["seen"]
        ]
        assert min(whole.values()) > 0
        # No weights move while consecutive requests use the same model.
        runs = [asked for asked, _ in itertools.groupby(asked for asked, *_ in rank["seen"][1:])]
        assert rank["moves"] == len(runs) < len(rank["seen"]) - 1
    files = sorted((tmp_path / "apart").iterdir())
    assert len(files) > 1
    for file in files:
        assert file.read_bytes() == (tmp_path / "together" / file.name).read_bytes(), file.name


def test_weighted_model_and_function_score_is_equal_on_ranks(pool, directories):
    texts = ["x" * count for count in range(6)]
    ranks = pool.run(combined_jobs.weighted_scores, 2, directories[1], texts)
    for scores, (judged, lengths), errors in ranks:
        assert torch.equal(scores, ranks[0][0])
        assert lengths.tolist() == [0, 1, 2, 3, 4, 5]
        assert judged.std() > 0
        assert torch.equal(scores, (2 * (0.5 * judged + 1) - 3 * (lengths + 0.25)).float())
        refused, broken = errors.splitlines()
        assert (
            refused
            == "the scorer length returned nan for prompt 'a prompt' and response 'refuse'; must be"
            " finite"
        )
        assert (
            broken == "the scorer judge returned nan for prompt 'a prompt' and response ''; must be"
            " finite"
        )


@pytest.fixture
def connection(open_critic) -> Iterator[Connection]:
    connection = Connection("critic", open_critic.endpoint, open_critic.access)
    yield connection
    connection.close()


def sequences(*texts: str) -> dict[str, np.ndarray]:
    rows = [character_tokenizer().encode(text).ids for text in texts]
    width = max(map(len, rows))
    tokens = np.array([row + [0] * (width - len(row)) for row in rows])
    return {"tokens": tokens, "sequence_lengths": np.array([[len(row)] for row in rows])}


def test_combined_endpoint_returns_values_and_rewards(connection):
    arrays = sequences("abcde", "xyz")
    expected = TinyValueModel().values(torch.tensor(arrays["tokens"]), torch.tensor([5, 3])).numpy()
    parts = {
        "prompt_lengths": np.array([[2], [0]]),
        "metadata": np.array([[b'{"extra": 0.5}'], [b"{}"]], dtype=object),
        "sequence_number": np.array([[-1], [-1]]),
    }
    both = connection.infer(CRITIC_INFER_WITH_REWARD, arrays | parts, 20)
    assert both["values"] == pytest.approx(expected, abs=1e-6)
    assert both["rewards"].tolist() == [[203.5], [3.0]]
    # The form of a request from NeMo-Aligner's clients.
    both = connection.infer(CRITIC_INFER_WITH_REWARD, arrays, 20)
    assert both["rewards"].tolist() == [[5.0], [3.0]]
    assert np.array_equal(connection.infer(CRITIC_INFER, arrays, 20)["values"], both["values"])
    assert connection.infer(REWARD_MODEL, arrays, 20)["rewards"].tolist() == [[5.0], [3.0]]


def test_invalid_metadata_is_refused_before_reaching_ranks():
    asked = []

    def infer(arrays):
        asked.append("infer")
        return {}

    endpoints = with_reward_endpoints(
        lambda call: {CRITIC_INFER: infer}, scoring(TextSource("lengths", length_scorer))
    )
    served = endpoints(lambda op, *_, **__: asked.append(op))
    with pytest.raises(RequestError, match="row 0 is not valid JSON"):
        served[CRITIC_INFER_WITH_REWARD](
            sequences("ab") | {"metadata": np.array([[b"{"]], dtype=object)}
        )
    assert asked == []


def test_scoring_error_fails_only_its_request(connection):
    with pytest.raises(
        RemoteError, match=r"the scorer lengths returned nan.*response '67'"
    ) as caught:
        connection.infer(CRITIC_INFER_WITH_REWARD, sequences("ab", "67"), 20)
    assert caught.value.kind == "ScoringError"
    arrays = sequences("ab", "cd")
    update = {
        name: np.ones((2, 1), dtype=np.float32) for name in ("returns", "prev_values", "mask")
    }
    assert np.isfinite(
        connection.infer(CRITIC_TRAIN, {"tokens": arrays["tokens"], **update}, 20)["loss_mean"]
    ).all()
    assert connection.infer(CRITIC_INFER_WITH_REWARD, arrays, 20)["rewards"].tolist() == [
        [2.0],
        [2.0],
    ]
