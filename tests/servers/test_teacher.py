"""Log-probs of the teacher server, selection of teachers by task, and refused requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from aligner.config.compose import compose_config
from aligner.data.model_directory import prepare_model
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Grammar, GuidedTokens, TeacherTopK
from aligner.errors import ConfigError
from aligner.schema.teacher_sources import TeacherSource, compute_teacher_shares
from aligner.servers.rank_commands import Command
from aligner.servers.remote_client import RemoteError, TeacherClient
from aligner.servers.teacher_server import TeacherRank, serve_teacher
from aligner.servers.validation import Limits, validate
from aligner.servers.wire_protocol import (
    TEACHER_LOGPROBS,
    RequestError,
    grammars_from_texts,
    grammars_to_texts,
)
from tests.megatron.jobs import TEMPERATURE
from tests.megatron.reference import logprobs as reference_logprobs
from tests.megatron.reference import save_llama
from tests.servers import teacher_jobs
from tests.servers.role_main import character_tokenizer
from tests.servers.roles import RunningRole

LENGTHS, PROMPTS = torch.tensor([12, 5, 9]), torch.tensor([4, 2, 8])
TOKENS = torch.randint(2, 72, (3, 12), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("teacher"), tied=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, directory: Path) -> Iterator[RunningRole]:
    """A teacher server with TP2 and two models; the second model serves only the task `sums`."""
    sums = save_llama(tmp_path_factory.mktemp("sums"), tied=False, seed=5)
    sources = (
        f"+teacher.sources.all.path={directory}"
        f" +teacher.sources.sums={{path:{sums},weight:3,tasks:[sums]}}"
    )
    overrides = f"experiment=tiny_ppo {sources} teacher.parallel.tensor=2"
    role = RunningRole("teacher", tmp_path_factory.mktemp("server"), ranks=2, OVERRIDES=overrides)
    yield role.wait_ready()
    role.stop()


@pytest.fixture
def client(server: RunningRole) -> Iterator[TeacherClient]:
    client = TeacherClient(
        [server.endpoint], server.access, 60, max_batch_size=2, temperature=TEMPERATURE
    )
    yield client
    client.close()


def expected(directory: Path) -> torch.Tensor:
    """Return the log-probs that transformers computes."""
    from transformers import LlamaForCausalLM

    with torch.no_grad():
        return reference_logprobs(LlamaForCausalLM.from_pretrained(directory), TOKENS, LENGTHS)


@pytest.mark.promise("teacher-server-logprobs")
@pytest.mark.slow
def test_teacher_logprobs_equal_transformers_at_temperature(client, directory):
    places = torch.arange(1, TOKENS.shape[1])
    in_response = (places >= PROMPTS[:, None]) & (places < LENGTHS[:, None])
    found = client.logprobs(TOKENS, LENGTHS, PROMPTS, [{}] * 3).result()
    assert found.dtype == torch.float32 and found.shape == (3, 11)
    torch.testing.assert_close(
        found, torch.where(in_response, expected(directory), 0.0), rtol=1e-4, atol=1e-4
    )
    client.assert_settled()


@pytest.mark.slow
def test_top_k_logprobs_of_tp2_teacher_equal_transformers(server, directory):
    """Each of the two ranks holds half of the vocabulary; k is 3, then more than all 72 tokens."""
    from transformers import LlamaForCausalLM

    with torch.no_grad():
        logits = LlamaForCausalLM.from_pretrained(directory)(TOKENS).logits[:, :-1]
    expected = (logits / TEMPERATURE).log_softmax(-1)
    places = torch.arange(1, TOKENS.shape[1])
    inside = (places >= PROMPTS[:, None]) & (places < LENGTHS[:, None])
    for count in (3, 100):
        client = TeacherClient(
            [server.endpoint],
            server.access,
            60,
            max_batch_size=2,
            temperature=TEMPERATURE,
            top_k=count,
        )
        taught = TeacherTopK.unpack(client.logprobs(TOKENS, LENGTHS, PROMPTS, [{}] * 3).result())
        client.close()
        count = min(count, 72)
        best = expected.topk(count)
        assert taught.ids.dtype == torch.int32 and taught.ids.shape == (3, 11, count)
        assert torch.equal(taught.ids[inside].long(), best.indices[inside])
        assert not taught.pack()[~inside].any()
        torch.testing.assert_close(
            taught.outcomes[inside][:, :-1], best.values[inside], rtol=1e-4, atol=1e-4
        )
        drawn = expected.gather(-1, TOKENS[:, 1:, None])[..., 0]
        torch.testing.assert_close(taught.logprobs[inside], drawn[inside], rtol=1e-4, atol=1e-4)
        sums = taught.outcomes[inside].exp().sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums))


@pytest.mark.slow
def test_request_without_prompt_lengths_scores_every_token(client, directory, pool):
    arrays = {"tokens": TOKENS[:2].numpy(), "sequence_lengths": LENGTHS[:2, None].numpy()}
    found = torch.from_numpy(client._infer(TEACHER_LOGPROBS, arrays)["logprobs"].copy())
    (alone,) = pool.run(teacher_jobs.frozen_logprobs, 1, str(directory), TOKENS[:2], LENGTHS[:2])
    assert found.shape == (2, 11) and bool((found[1, 4:] == 0).all())
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_bad_request_is_refused_and_next_one_is_served(client):
    for change, message in (
        ({"tokens": np.full((1, 3), 72)}, r"tokens: got 72, allowed: 0 to 71"),
        ({"tokens": np.full((1, 129), 5)}, r"tokens: got S=129, allowed: 1 to 128"),
        (
            {"temperature": np.zeros((1, 1), dtype=np.float32)},
            "temperature: got 0, allowed: a finite number above 0",
        ),
        ({"top_k": np.zeros((1, 1), dtype=np.int64)}, "top_k: got 0, allowed: at least 1"),
    ):
        arrays = {"tokens": np.full((1, 3), 5), "sequence_lengths": np.array([[3]])} | change
        with pytest.raises(RemoteError, match=message) as caught:
            client._infer(TEACHER_LOGPROBS, arrays)
        assert caught.value.kind == "RequestError"
    assert client.logprobs(TOKENS, LENGTHS, PROMPTS, [{}] * 3).result().isfinite().all()


@pytest.mark.slow
def test_health_reports_teacher_and_checkpoint_is_refused(client):
    assert client.control("health")["role"] == "teacher"
    assert client.control("version")["version"] == 0
    with pytest.raises(
        RemoteError, match="got op 'checkpoint', allowed: health, shutdown, version"
    ):
        client.control("checkpoint", step=1)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf")])
def test_invalid_temperature_or_single_token_row_is_refused(value):
    arrays = {"tokens": np.full((2, 3), 5), "sequence_lengths": np.full((2, 1), 3)}
    limits = Limits(vocab_size=64, max_sequence_length=40)
    with pytest.raises(
        RequestError, match=r"temperature: got .*, allowed: a finite number above 0"
    ):
        validate(
            TEACHER_LOGPROBS,
            arrays | {"temperature": np.full((2, 1), value, dtype=np.float32)},
            limits,
        )
    with pytest.raises(
        RequestError,
        match="temperature: got different values, allowed: the same value in every row",
    ):
        validate(
            TEACHER_LOGPROBS,
            arrays | {"temperature": np.array([[1.0], [2.0]], dtype=np.float32)},
            limits,
        )
    with pytest.raises(RequestError, match="tokens: got S=1, allowed: at least 2"):
        validate(
            TEACHER_LOGPROBS,
            {"tokens": np.full((2, 1), 5), "sequence_lengths": np.full((2, 1), 1)},
            limits,
        )


ONE = (TeacherSource(key="teacher", path="path"),)
SEVERAL = (
    TeacherSource(key="teacher.sources.all", path="path"),
    TeacherSource(key="teacher.sources.sums", path="other", weight=3.0, tasks=("sums", "products")),
)


class Successors:
    """A model whose log-prob of a token is -(token + previous token)."""

    def logprobs(self, tokens, lengths, *, mask=None, temperature=1.0):
        found = -(tokens[:, 1:] + tokens[:, :-1]) / temperature
        inside = torch.arange(1, tokens.shape[1]) < lengths[:, None]
        return torch.where(inside if mask is None else inside & mask, found, 0.0)


@pytest.mark.promise("teacher-server-logprobs")
def test_joined_requests_get_individual_answers():
    handler = TeacherRank([Successors()], ONE, 72).logprobs  # type: ignore[list-item]
    join = handler.batcher  # type: ignore[attr-defined]
    widths = (5, 9, 6)
    commands = [
        Command(
            "teacher_logprobs",
            {"tokens": torch.arange(2 * width).view(2, width), "lengths": torch.tensor([width, 3])},
        )
        for width in widths
    ]
    whole = join.batch(commands)
    parts = join.split(handler(**whole.tensors, **whole.arguments), commands)
    for part, command in zip(parts, commands, strict=True):
        assert torch.equal(part, handler(**command.tensors))
        assert not part[:, -1].any() and part.shape == command.tensors["tokens"].shape


def test_requests_with_different_temperatures_are_not_joined():
    join = TeacherRank([Successors()], ONE, 72).logprobs.batcher  # type: ignore[list-item, attr-defined]
    tensors = {"tokens": torch.ones(1, 3, dtype=torch.int64), "lengths": torch.tensor([3])}
    warm, cold = (
        Command("teacher_logprobs", tensors, {"temperature": value}) for value in (1.0, 0.5)
    )
    assert join.batch_key(warm) != join.batch_key(cold)


def test_teacher_with_different_tokenizer_is_refused(tmp_path, directory):
    config = compose_config(
        ["experiment=tiny_ppo", f"run.dir={tmp_path / 'run'}", f"teacher.path={tmp_path / 'other'}"]
    )
    prepare_model(config)
    other = save_llama(tmp_path / "other", tied=False)
    character_tokenizer().save(str(other / "tokenizer.json"))
    with pytest.raises(
        ConfigError,
        match=r"teacher\.path=.*other: \d+ of the policy's \d+ token ids are different tokens",
    ):
        serve_teacher(config)


class Scaled(Successors):
    """Multiplies the log-probs by a factor, and records the rows of the last request."""

    def __init__(self, factor: float) -> None:
        self.factor, self.asked = factor, torch.zeros(0)

    def logprobs(self, tokens, lengths, *, mask=None, temperature=1.0):
        self.asked = tokens[:, 0]
        return self.factor * super().logprobs(tokens, lengths, mask=mask, temperature=temperature)


def test_teacher_shares_follow_task_and_weights():
    assert compute_teacher_shares(SEVERAL, {"task": "sums"}) == [0.25, 0.75]
    assert (
        compute_teacher_shares(SEVERAL, {"task": "letters"})
        == compute_teacher_shares(SEVERAL, {})
        == [1.0, 0.0]
    )
    with pytest.raises(
        ConfigError,
        match=(
            "no teacher for a prompt with task='letters'; the teachers are for the tasks products,"
            " sums"
        ),
    ):
        compute_teacher_shares(SEVERAL[1:], {"task": "letters"})


def test_mixture_is_weighted_mean_and_skips_unassigned_rows():
    models = [Scaled(1.0), Scaled(10.0)]
    handler = TeacherRank(models, SEVERAL, 72).logprobs  # type: ignore[arg-type]
    tokens, lengths, prompts = (
        torch.arange(15).view(3, 5),
        torch.tensor([5, 4, 5]),
        torch.tensor([1, 1, 2]),
    )
    plain = handler(tokens, lengths, prompts)
    found = handler(tokens, lengths, prompts, shares=[[1.0, 0.0], [0.25, 0.75], [0.0, 1.0]])
    torch.testing.assert_close(found, torch.tensor([1.0, 0.25 + 7.5, 10.0])[:, None] * plain)
    assert [model.asked.tolist() for model in models] == [[0, 5], [5, 10]]


@pytest.mark.slow
def test_prompt_task_selects_teacher_over_the_wire(client, directory):
    every = client.logprobs(TOKENS, LENGTHS, PROMPTS, [{}] * 3).result()
    found = client.logprobs(
        TOKENS, LENGTHS, PROMPTS, [{"task": "sums"}, {"answer": "1"}, {"task": "letters"}]
    ).result()
    torch.testing.assert_close(found[1:], every[1:], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found[0], every[0], atol=1e-2)


def test_prompt_without_teacher_is_refused():
    serve = TeacherRank([], SEVERAL[1:], 72).create_endpoints(lambda *_, **__: None)[
        TEACHER_LOGPROBS
    ]  # type: ignore[arg-type, return-value]
    arrays = {"tokens": TOKENS[:1].numpy(), "sequence_lengths": LENGTHS[:1, None].numpy()}
    with pytest.raises(RequestError, match="no teacher for a prompt with task=None"):
        serve(arrays)


def test_top_k_of_row_with_several_teachers_is_refused():
    serve = TeacherRank([], SEVERAL, 72).create_endpoints(lambda *_, **__: None)[TEACHER_LOGPROBS]  # type: ignore[arg-type, return-value]
    arrays = {
        "tokens": TOKENS[:1].numpy(),
        "sequence_lengths": LENGTHS[:1, None].numpy(),
        "top_k": np.full((1, 1), 4),
    }
    arrays["metadata"] = np.array([[b'{"task": "sums"}']], dtype=object)
    with pytest.raises(RequestError, match="top_k: got rows that belong to several teachers"):
        serve(arrays)


def guided_request(spans: object) -> dict[str, np.ndarray]:
    return {
        "tokens": np.array([[9, 10, 11, 12]]),
        "sequence_lengths": np.array([[4]]),
        "grammars": np.array([[json.dumps(spans).encode()]], dtype=object),
    }


@pytest.mark.parametrize(
    "spans",
    [[[0, 2, "", [1]]], [[1, 5, "", [1]]], [[1, 2, "", [99]]], [[1, 2, 3, [1]]], [[1, 2]], 5],
    ids=str,
)
def test_malformed_grammars_are_refused(spans):
    limits = Limits(vocab_size=72, max_sequence_length=40)
    validate(TEACHER_LOGPROBS, guided_request([[1, 2, "start: /./", [1]]]), limits)
    with pytest.raises(RequestError, match="grammars: cannot be parsed"):
        validate(TEACHER_LOGPROBS, guided_request(spans), limits)


def test_tokens_that_do_not_follow_their_grammar_are_refused(tmp_path):
    model = save_llama(tmp_path, tied=False)
    character_tokenizer().save(str(model / "tokenizer.json"))
    sent = []

    def call(_: str, tensors: dict[str, torch.Tensor], **arguments: object) -> torch.Tensor:
        sent.append(arguments["grammars"])
        return torch.zeros(1, 4)

    serve = TeacherRank([], ONE, 72, model).create_endpoints(call)[TEACHER_LOGPROBS]  # type: ignore[arg-type]
    text = Tokenizer(model).decode(torch.tensor([10, 11]))
    serve(guided_request([[1, 3, f"start: {json.dumps(text)}", [12]]]))
    serve(guided_request([[1, 4, f"start: {json.dumps(text)}", [12]]]))
    assert len(sent) == 2
    for grammar, problem in (
        ('start: "other"', "the tokens of row 0 do not follow their grammar"),
        ("start: (", "grammars: "),
    ):
        with pytest.raises(RequestError, match=problem):
            serve(guided_request([[1, 3, grammar, [12]]]))


def test_grammars_of_rows_survive_the_wire():
    spans = torch.tensor([[-1, 0, 0, 1, -1], [-1, -1, -1, -1, -1], [2, 2, 2, 2, 2]])
    grammars = (Grammar("one", (1, 2)), Grammar("one", (1,)), Grammar("three", (3,)))
    found = grammars_from_texts(grammars_to_texts(GuidedTokens(spans, grammars)), 6)
    assert torch.equal(found.spans, spans) and found.grammars == grammars


def test_top_k_logprobs_survive_packing():
    ids = torch.tensor([[[2**24 - 1, 3], [0, 49151]]], dtype=torch.int32)
    taught = TeacherTopK(torch.randn(1, 2), ids, torch.randn(1, 2, 3))
    found = TeacherTopK.unpack(taught.pack())
    assert torch.equal(found.ids, ids) and found.ids.dtype == torch.int32
    assert torch.equal(found.logprobs, taught.logprobs) and torch.equal(
        found.outcomes, taught.outcomes
    )
