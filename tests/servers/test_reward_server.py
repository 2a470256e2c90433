from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from aligner.servers.client import RemoteError, RewardClient
from aligner.servers.protocol import REWARD_MODEL
from tests.servers.bad_requests import REFUSED, spoiled
from tests.servers.role_main import character_tokenizer

pytestmark = pytest.mark.system


@pytest.fixture
def client(reward):
    client = RewardClient(reward.endpoint, 20, max_batch_size=16)
    yield client
    client.close()


def encoded(*pairs):
    """Tokens, lengths and prompt lengths of (prompt, response) texts, an end-of-sequence token after each."""
    tokenizer = character_tokenizer()
    rows = [[*tokenizer.encode(prompt + response).ids, 1] for prompt, response in pairs]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return tokens, torch.tensor([len(row) for row in rows]), torch.tensor([len(prompt) for prompt, _ in pairs])


def test_prompt_and_response_are_cut_decoded_and_scored_apart(client):
    assert client.score(*encoded(("ab", "xyz"), ("", "hello world"), ("abc", ""))).result().tolist() == [203.0, 11.0, 300.0]


def test_without_prompt_lengths_the_whole_text_is_the_response_and_sentences_are_scored_as_they_are(client):
    tokens, lengths, _ = encoded(("ab", "xyz"))
    arrays = {"tokens": tokens.numpy(), "sequence_lengths": lengths[:, None].numpy()}
    assert client._infer(REWARD_MODEL, arrays)["rewards"].tolist() == [[5.0]]
    sentences = np.array([[b"four"], ["fünf".encode()]], dtype=object)
    assert client._infer(REWARD_MODEL, {"sentences": sentences})["rewards"].tolist() == [[4.0], [4.0]]


def test_a_failing_scorer_is_told_with_prompt_and_response_to_its_caller_alone(client):
    with ThreadPoolExecutor(4) as callers:
        good = [callers.submit(client._score, *encoded(("ab", "x" * n))) for n in range(1, 13)]
        with pytest.raises(RemoteError, match="returned nan, must be finite, for prompt 'ab ' and response '67'") as caught:
            client.score(*encoded(("ab", "1"), ("ab ", "67"))).result()
        assert caught.value.kind == "ScoringError"
        assert [future.result(20).item() for future in good] == [200.0 + n for n in range(1, 13)]


CASES = [case for case in REFUSED if case[0] is REWARD_MODEL]


@pytest.mark.parametrize(("endpoint", "wrong", "changes", "told"), CASES, ids=[case[1] for case in CASES])
def test_a_bad_request_is_refused_and_the_next_one_served(client, endpoint, wrong, changes, told):
    with pytest.raises(RemoteError, match=re.escape(told)):
        client._infer(endpoint, spoiled(endpoint, changes))
    assert client.score(*encoded(("a", "b"))).result().tolist() == [101.0]


def test_the_reward_server_answers_control_but_keeps_no_checkpoints(client):
    assert client.control("health")["role"] == "reward"
    assert client.control("version")["protocol"] == 1
    with pytest.raises(RemoteError, match="got op 'checkpoint', allowed: health, shutdown, version"):
        client.control("checkpoint", step=1)
