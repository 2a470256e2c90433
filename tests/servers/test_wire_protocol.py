"""Validation of requests, transport of samples, and parsing of errors on the wire."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save
from tritonclient.utils import InferenceServerException

from aligner.data.collectives import samples_to_tensors
from aligner.data.types import Sample
from aligner.engines.engine_protocol import SamplingOptions
from aligner.placement.addresses import Endpoint
from aligner.servers import remote_client, wire_protocol
from aligner.servers.generator_client import build_generate_request
from aligner.servers.remote_client import Connection, RefusedError, TransportError
from aligner.servers.validation import Limits, validate
from aligner.servers.wire_protocol import (
    CONTROL,
    CRITIC_INFER,
    CRITIC_SAVE,
    CRITIC_TRAIN,
    GENERATE,
    REWARD_MODEL,
    TEACHER_LOGPROBS,
    EndpointError,
    RequestError,
    parse_error,
)
from tests.servers.bad_requests import REFUSED, REFUSED_BY_TRITON, good, spoil

LIMITS = Limits(vocab_size=64, max_sequence_length=40)
CASES = [case for case in REFUSED + REFUSED_BY_TRITON if "UTF-8" not in case[3]]


@pytest.mark.parametrize(
    "endpoint",
    [CRITIC_INFER, CRITIC_TRAIN, CRITIC_SAVE, REWARD_MODEL, TEACHER_LOGPROBS],
    ids=lambda spec: spec.name,
)
def test_request_of_foreign_client_is_valid(endpoint):
    validate(endpoint, good(endpoint), LIMITS)


@pytest.mark.parametrize(
    ("endpoint", "wrong", "changes", "told"),
    CASES,
    ids=[f"{case[0].name}-{case[1]}" for case in CASES],
)
def test_bad_request_is_refused_with_allowed_values(endpoint, wrong, changes, told):
    with pytest.raises(RequestError, match=re.escape(told)):
        validate(endpoint, spoil(endpoint, changes), LIMITS)


def test_every_request_tensor_has_a_wire_dtype():
    endpoints = [
        each
        for each in vars(wire_protocol).values()
        if isinstance(each, wire_protocol.EndpointSpec)
    ]
    assert GENERATE in endpoints
    assert {
        spec.dtype for endpoint in endpoints for spec in endpoint.inputs
    } <= remote_client._TRITON_DATATYPES.keys()


def test_episode_round_trips_and_bad_branches_are_refused():
    none = torch.empty(0)
    plain = Sample(
        4, 0, torch.tensor([7, 8, 9]), 2, torch.zeros(1), torch.ones(1, dtype=torch.int64), "stop"
    )
    branch = replace(plain, tokens=torch.tensor([7, 8, 9]))
    episode = replace(
        plain,
        sample_index=1,
        tokens=torch.tensor([7, 8, 9, 3, 4]),
        engine_logprobs=torch.tensor([-1.0, 0.0, -2.0]),
        weight_versions=torch.tensor([3, 0, 4]),
        generated_mask=torch.tensor([True, False, True]),
        rewards=torch.tensor([0.5, 0.0, torch.nan]),
        branches=(branch, branch),
    )
    own = replace(episode, tokens=torch.tensor([7, 8, 3, 9, 9, 5, 6]), prompt_length=4)
    fresh = Sample(
        4, 3, torch.tensor([7, 3, 3]), 3, none, none.long(), "unfinished", branches=(branch,)
    )
    samples = [
        plain,
        own,
        replace(episode, branches=(), finish_reason="unfinished", rewards=torch.zeros(3)),
        fresh,
    ]
    begun = [
        Sample(4, at, torch.tensor([7, 8]), 2, none, none.long(), "unfinished") for at in range(4)
    ]
    taken = wire_protocol.responses_from_tensors(begun, wire_protocol.responses_to_tensors(samples))
    for one, other in zip(samples, taken, strict=True):
        assert torch.equal(one.tokens, other.tokens) and one.finish_reason == other.finish_reason
        assert torch.equal(one.weight_versions, other.weight_versions) and len(one.branches) == len(
            other.branches
        )
        assert one.prompt_length == other.prompt_length and torch.equal(
            other.initial_prompt, torch.tensor([7, 8])
        )
        if one.generated_mask is not None and one.rewards is not None:
            assert other.generated_mask is not None and other.rewards is not None
            assert torch.equal(one.generated_mask, other.generated_mask) and torch.equal(
                one.rewards.isnan(), other.rewards.isnan()
            )
    assert (
        torch.equal(taken[1].branches[1].tokens, branch.tokens)
        and taken[3].finish_reason == "unfinished"
    )
    request = build_generate_request(taken, 4, SamplingOptions(8), weight_version=1)
    validate(GENERATE, request, LIMITS)
    arrays = {name: torch.tensor(array) for name, array in request.items() if name != "options"}
    assert [len(each.branches) for each in wire_protocol.responses_from_tensors(begun, arrays)] == [
        0,
        2,
        0,
        1,
    ]
    for wrong, told in (
        ({"branches": request["branches"][:-1]}, "branches: cannot be parsed"),
        ({"branches": np.zeros(40, np.uint8)}, "branches: cannot be parsed"),
        (
            {"branch_counts": np.array([[0], [1], [0], [1]])},
            "branches: got [2, 1] branches per sample, allowed: [1, 1], as in",
        ),
        (
            {"branches": in_bytes(own)},
            "branches: got [2] branches per sample, allowed: [2, 1], as in branch_counts",
        ),
        (
            {"branches": in_bytes(replace(own, tokens=own.tokens + 60), fresh)},
            "branches: got 69, allowed: 0 to 63",
        ),
        (
            {"branches": in_bytes(own, replace(fresh, branches=(replace(fresh, branches=()),)))},
            "got an unfinished branch",
        ),
    ):
        with pytest.raises(RequestError, match=re.escape(told)):
            validate(GENERATE, {**request, **wrong}, LIMITS)
    del request["branch_counts"]
    with pytest.raises(RequestError, match="got only one of branches and branch_counts"):
        validate(GENERATE, request, LIMITS)


def in_bytes(*samples: Sample) -> np.ndarray:
    return np.frombuffer(save(samples_to_tensors(samples)), np.uint8)


def test_agent_prompt_replaces_requested_prompt():
    none, prompt = torch.empty(0), torch.tensor([7, 8])
    plain = Sample(
        4, 0, torch.tensor([7, 8, 9]), 2, torch.zeros(1), torch.ones(1, dtype=torch.int64), "stop"
    )
    longer = replace(plain, sample_index=1, tokens=torch.tensor([1, 2, 3, 9]), prompt_length=3)
    begun = [Sample(4, at, prompt, 2, none, none.long(), "unfinished") for at in range(2)]
    taken = wire_protocol.responses_from_tensors(
        begun, wire_protocol.responses_to_tensors([plain, longer], [prompt, prompt])
    )
    assert [sample.prompt_length for sample in taken] == [2, 3]
    assert torch.equal(taken[0].tokens, plain.tokens) and torch.equal(
        taken[1].tokens, longer.tokens
    )
    assert "read" not in wire_protocol.responses_to_tensors([plain, plain], [prompt, prompt])


def test_invalid_kept_ids_or_expert_routing_is_refused():
    tokens = np.arange(6).reshape(2, 3)
    drawn = {
        "tokens": tokens,
        "sequence_lengths": np.array([[3], [2]]),
        "prompt_ids": np.array([[0], [1]]),
        "samples_per_prompt": np.array([1]),
        "options": np.array([b"{}"], dtype=object),
        "responses": np.ones((2, 2), np.int64),
        "response_lengths": np.array([[2], [1]]),
        "logprobs": np.zeros((2, 2), np.float32),
        "weight_versions": np.zeros((2, 2), np.int64),
        "stopped": np.array([[-1], [-1]]),
    }
    kept = {"kept_counts": np.array([[2, 0], [1, 0]]), "kept_ids": np.array([4, 5, 6], np.int32)}
    routes = {"routes": np.zeros((2, 4, 2, 2), np.int16)}
    validate(GENERATE, {**drawn, **kept, **routes}, LIMITS)
    for wrong, told in (
        ({"kept_ids": kept["kept_ids"]}, "got only one of kept_counts and kept_ids"),
        (
            {**kept, "kept_ids": np.array([4, 5], np.int32)},
            "kept_ids: got 2 ids, allowed: 3, the sum of kept_counts",
        ),
        ({**kept, "kept_ids": np.array([4, 5, 64], np.int32)}, "kept_ids"),
        ({**kept, "kept_counts": np.array([[-1, 4], [0, 0]])}, "kept_counts"),
        (
            {"routes": routes["routes"][:, :3]},
            (
                "routes: got shape [2, 3, 2, 2], allowed: expert ids >= 0 for at least T=4"
                " tokens per row"
            ),
        ),
        ({"routes": routes["routes"] - 1}, "routes: got shape [2, 4, 2, 2]"),
    ):
        with pytest.raises(RequestError, match=re.escape(told)):
            validate(GENERATE, {**drawn, **wrong}, LIMITS)


def test_expert_routing_is_valid_with_longer_unstarted_prompt():
    none = torch.empty(0)
    begun = Sample(0, 0, torch.arange(5), 3, torch.zeros(2), torch.zeros(2).long(), "unfinished")
    begun = replace(begun, expert_routing=torch.zeros(4, 2, 2, dtype=torch.uint8))
    waiting = Sample(1, 0, torch.arange(20), 20, none, none.long(), "unfinished")
    validate(
        GENERATE,
        build_generate_request([begun, waiting], 1, SamplingOptions(8, routes=True)),
        LIMITS,
    )


def test_required_tensors_equal_nemo_aligner_tensors():
    table = {
        spec.name: (
            spec.batching,
            {t.name: (np.dtype(t.dtype).char, t.shape) for t in spec.inputs if not t.optional},
        )
        for spec in (CRITIC_INFER, CRITIC_TRAIN, CRITIC_SAVE)
    }
    assert table == {
        "critic_infer": (True, {"tokens": ("l", ("B", "S")), "sequence_lengths": ("l", ("B", 1))}),
        "critic_train": (
            False,
            {
                "tokens": ("l", ("B", "S")),
                "returns": ("f", ("B", "S-1")),
                "prev_values": ("f", ("B", "S-1")),
                "mask": ("f", ("B", "S-1")),
            },
        ),
        "critic_save": (False, {"dummy_var": ("l", (1,))}),
    }
    assert REWARD_MODEL.batching and all(tensor.optional for tensor in REWARD_MODEL.inputs)
    assert not CONTROL.batching


def test_error_is_parsed_from_triton_traceback():
    error = EndpointError(RequestError('two\nlines with "quotes" and EndpointError: in it'))
    wrapped = (
        "Model execute error: Traceback…\naligner.servers.wire_protocol.EndpointError:"
        f" {error}\n\n\nAt:\n  model.py(501)\n"
    )
    assert parse_error(wrapped) == (
        "RequestError",
        'two\nlines with "quotes" and EndpointError: in it',
    )
    assert parse_error("unexpected inference input") == ("Triton", "unexpected inference input")


@pytest.mark.parametrize("message", ["ä" * 50_000, "\x01" * 50_000, "\\" * 50_000])
def test_long_error_is_shortened_in_the_middle(message):
    error = EndpointError(RequestError(f"begin {message} end"))
    assert len(str(error).encode()) < 1600
    kind, told = parse_error(f"EndpointError: {error}\n\nAt:")
    assert kind == "RequestError"
    assert re.fullmatch(r"begin .* … \d{5} characters omitted … .* end", told, re.DOTALL)


def test_error_with_invalid_unicode_is_escaped():
    error = EndpointError(RequestError("op \ud800"))
    assert parse_error(f"EndpointError: {error}") == ("RequestError", r"op \ud800")


def test_request_above_token_or_text_limit_is_refused():
    limits = Limits(vocab_size=64, max_sequence_length=40, max_request_tokens=24)
    validate(CRITIC_INFER, good(CRITIC_INFER), limits)
    with pytest.raises(
        RequestError, match="got B=4 rows of S=8, allowed: at most 24 tokens per request"
    ):
        validate(CRITIC_INFER, good(CRITIC_INFER, rows=4), limits)
    with pytest.raises(
        RequestError, match="sentences: got 385 bytes, allowed: at most 384 per request"
    ):
        validate(
            REWARD_MODEL,
            {"sentences": np.array([[b"a" * 200], [b"b" * 185]], dtype=object)},
            limits,
        )


@pytest.mark.parametrize(
    "message",
    [
        (
            "Failed to process the request(s) for model 'critic_infer_0_3', message:"
            " TritonModelException: Model execute error: Traceback (most recent call"
            " last):\nFileNotFoundError: [Errno 2] No such file or directory: '/psm_4f1bbe1e'"
        ),
        "Stub process 'critic_infer_0_0' is not healthy.",
        "Internal error from Core",
    ],
    ids=["its process is gone", "its helper is gone", "the gateway's connection broke"],
)
def test_triton_internal_failure_is_transport_error(message):
    connection = Connection("critic", Endpoint("host", 1, 2, 3))
    error = connection._to_remote_error(
        CRITIC_INFER, InferenceServerException(message, status="StatusCode.INTERNAL"), 1.0
    )
    assert isinstance(error, TransportError)


def test_endpoint_error_wrapped_by_triton_is_refused_error():
    connection = Connection("critic", Endpoint("host", 1, 2, 3))
    told = EndpointError(RequestError("tokens: got 3"))
    message = (
        f"Model execute error: Traceback ...\naligner.servers.wire_protocol.EndpointError: {told}"
    )
    error = connection._to_remote_error(
        CRITIC_INFER, InferenceServerException(message, status="StatusCode.INTERNAL"), 1.0
    )
    assert (
        isinstance(error, RefusedError)
        and error.kind == "RequestError"
        and error.message == "tokens: got 3"
    )
