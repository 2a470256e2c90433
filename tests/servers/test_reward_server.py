"""Reward server: scores of tokens and sentences, abstentions, scorer errors, refused requests."""

from __future__ import annotations

import json
import re
import urllib.request

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from aligner.data.tokenizer import read_tokenizer
from aligner.data.types import ABSTAINED
from aligner.placement.addresses import KEY_HEADER
from aligner.rewards.sources import ModelSource
from aligner.servers.remote_client import RemoteError, RewardClient
from aligner.servers.validation import Limits
from aligner.servers.wire_protocol import PROTOCOL_VERSION, REWARD_MODEL, RequestError
from tests.servers.bad_requests import REFUSED, spoil
from tests.servers.role_main import character_tokenizer, scoring
from tests.servers.tiny_model import TinyValueModel


@pytest.fixture
def client(reward):
    client = RewardClient([reward.endpoint], reward.access, 20, max_batch_size=16)
    yield client
    client.close()


def encode_pairs(*pairs):
    """Return tokens, lengths and prompt lengths of (prompt, response) texts, each with an
    end-of-sequence token."""
    tokenizer = character_tokenizer()
    rows = [[*tokenizer.encode(prompt + response).ids, 1] for prompt, response in pairs]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return (
        tokens,
        torch.tensor([len(row) for row in rows]),
        torch.tensor([len(prompt) for prompt, _ in pairs]),
    )


def test_prompt_and_response_are_decoded_separately(client):
    assert client.score(
        *encode_pairs(("ab", "xyz"), ("", "hello world"), ("abc", ""))
    ).result().tolist() == [203.0, 11.0, 300.0]


def test_text_without_prompt_length_is_scored_as_response(client):
    tokens, lengths, _ = encode_pairs(("ab", "xyz"))
    arrays = {"tokens": tokens.numpy(), "sequence_lengths": lengths[:, None].numpy()}
    assert client._infer(REWARD_MODEL, arrays)["rewards"].tolist() == [[5.0]]
    sentences = np.array([[b"four"], ["fünf".encode()]], dtype=object)
    assert client._infer(REWARD_MODEL, {"sentences": sentences})["rewards"].tolist() == [
        [4.0],
        [4.0],
    ]


def test_metadata_reaches_scorer(client):
    rows = encode_pairs(("ab", "xyz"), ("", "hello world"))
    assert client.score(*rows, [{"extra": 1000, "answer": "ü"}, {}]).result().tolist() == [
        1203.0,
        11.0,
    ]
    arrays = {
        "sentences": np.array([[b"four"]], dtype=object),
        "metadata": np.array([[b'{"extra": 0.5}']], dtype=object),
    }
    assert client._infer(REWARD_MODEL, arrays)["rewards"].tolist() == [[4.5]]


def test_abstention_is_nan_over_grpc_and_in_json_over_http(client, reward):
    rows = encode_pairs(("ab", "abstain"), ("", "hello"))
    assert client.score(*rows).result().tolist() == [ABSTAINED, 5.0]
    sentences = np.array([[b"abstain"], [b"four"]], dtype=object)
    rewards = client._infer(REWARD_MODEL, {"sentences": sentences})["rewards"]
    assert np.isnan(rewards[0, 0]) and rewards[1, 0] == 4.0

    column = {
        "name": "sentences",
        "datatype": "BYTES",
        "shape": [2, 1],
        "data": ["abstain", "four"],
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{reward.endpoint.http}/v2/models/reward_model/infer",
        json.dumps({"inputs": [column]}).encode(),
        {KEY_HEADER: reward.access.key or ""},
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        (output,) = json.load(response)["outputs"]
    assert np.isnan(output["data"][0]) and output["data"][1] == 4.0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"{", "metadata: row 1 is not valid JSON"),
        (b"[1]", "metadata: row 1 is list, must be a JSON object"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "metadata: row 1 is not valid JSON"),
        (b"\xff", "metadata: got bytes that are not valid UTF-8"),
    ],
    ids=["not JSON", "no object", "too deep", "not UTF-8"],
)
def test_metadata_other_than_json_object_is_refused(client, text, told):
    tokens, lengths, _ = encode_pairs(("a", "b"), ("a", "b"))
    arrays = {"tokens": tokens.numpy(), "sequence_lengths": lengths[:, None].numpy()}
    with pytest.raises(RemoteError, match=re.escape(told)) as caught:
        client._infer(
            REWARD_MODEL, arrays | {"metadata": np.array([[b"{}"], [text]], dtype=object)}
        )
    assert caught.value.kind == "RequestError"
    assert client._infer(REWARD_MODEL, arrays)["rewards"].tolist() == [[2.0], [2.0]]


def test_scorer_error_names_sample_and_fails_only_its_caller(client):
    good = [client.score(*encode_pairs(("ab", "x" * n))) for n in range(1, 13)]
    with pytest.raises(
        RemoteError, match="returned nan for prompt 'ab ' and response '67'; must be finite"
    ) as caught:
        client.score(*encode_pairs(("ab", "1"), ("ab ", "67"))).result()
    assert caught.value.kind == "ScoringError"
    assert [future.result(20).item() for future in good] == [200.0 + n for n in range(1, 13)]


def test_unscorable_prompt_is_retried_alone_and_skipped(client, caplog):
    rows = encode_pairs(("a", "1"), ("a", "22"), ("b", "1"), ("b", "67"), ("cd", "1"), ("cd", "22"))
    scores = client.score(*rows, retry_batch_rows=2).result()
    assert scores[[0, 1, 4, 5]].tolist() == [101.0, 102.0, 201.0, 202.0]
    assert scores[2:4].isnan().all()
    assert (
        "samples without a score are skipped" in (said := caplog.text)
        and "for prompt 'b' and response '67'" in said
    )
    with pytest.raises(RemoteError, match="for prompt 'b' and response '67'"):
        client.score(*encode_pairs(("b", "67")), retry_batch_rows=1).result()


def test_long_scorer_error_is_shortened_in_the_middle(client):
    sentences = np.array([["7ü€".encode() * 5000]], dtype=object)
    with pytest.raises(
        RemoteError,
        match=r"the scorer lengths returned nan.* 1\d{4} characters omitted .*7ü€'; must be finite$",
    ) as caught:
        client._infer(REWARD_MODEL, {"sentences": sentences})
    assert caught.value.kind == "ScoringError"


def test_sentence_with_unknown_token_id_is_refused():
    # This vocabulary contains only the digits.
    limits = Limits(vocab_size=12, max_sequence_length=40)
    served = scoring(ModelSource("tiny", TinyValueModel()), limits).create_endpoints(print)
    with pytest.raises(
        RequestError,
        match=r"sentences: row 1 has token id 12, allowed: 0 to 11 \(the model's vocabulary\)",
    ):
        served[REWARD_MODEL]({"sentences": np.array([[b"09"], [b"0a"]], dtype=object)})


def test_sentences_are_tokenized_like_training_data(tmp_path):
    tokenizer = character_tokenizer()
    tokenizer.enable_padding()
    tokenizer.enable_truncation(2)
    tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    asked = []

    def call(op, tensors, **arguments):
        asked.append(tensors)
        return {"rewards": torch.zeros(2)}

    model = ModelSource("tiny", TinyValueModel())
    scoring(model, tokenizer=read_tokenizer(tmp_path)).create_endpoints(call)[REWARD_MODEL](
        {"sentences": np.array([[b"abc"], [b"a"]], dtype=object)}
    )
    assert asked[0]["tokens"].tolist() == [[1, 12, 13, 14], [1, 12, 0, 0]] and asked[0][
        "lengths"
    ].tolist() == [4, 2]


CASES = [case for case in REFUSED if case[0] is REWARD_MODEL]


@pytest.mark.parametrize(
    ("endpoint", "wrong", "changes", "told"), CASES, ids=[case[1] for case in CASES]
)
def test_bad_request_is_refused_and_next_one_is_served(client, endpoint, wrong, changes, told):
    with pytest.raises(RemoteError, match=re.escape(told)):
        client._infer(endpoint, spoil(endpoint, changes))
    assert client.score(*encode_pairs(("a", "b"))).result().tolist() == [101.0]


def test_health_reports_reward_and_checkpoint_is_refused(client):
    assert client.control("health")["role"] == "reward"
    assert client.control("version")["protocol"] == PROTOCOL_VERSION
    with pytest.raises(
        RemoteError, match="got op 'checkpoint', allowed: health, shutdown, version"
    ):
        client.control("checkpoint", step=1)
