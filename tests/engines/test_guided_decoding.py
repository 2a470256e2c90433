"""Responses that follow a grammar: engine, trainer and an independent computation agree on the
log-probs."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
import tokenizers
import torch
import torch.distributed as dist
from tokenizers import decoders, models
from torch import Tensor

from aligner.algorithms.distillation import distillation_loss
from aligner.data.collectives import (
    broadcast_samples,
    samples_from_tensors,
    samples_to_tensors,
)
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Prompt, Rows, Sample, TeacherTopK, collate
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.engine_loop import (
    CreateSample,
    EngineLoop,
    complete_response,
    create_unfinished_sample,
    start_on_replica,
)
from aligner.engines.engine_protocol import (
    GenerationEngine,
    GenerationRequest,
    RequestKey,
    SamplingOptions,
)
from aligner.engines.replicas import create_replica_group
from aligner.errors import AlignerError, UnsupportedError
from aligner.megatron import world as worlds
from aligner.megatron.policy import FrozenPolicy
from aligner.models.model_source import directory_shape
from aligner.schema import (
    EngineConfig,
    EngineParallelConfig,
    ParallelConfig,
    SpeculationConfig,
    TeacherConfig,
)
from aligner.schema.teacher_sources import TeacherSource
from aligner.servers.teacher_server import TeacherRank
from aligner.servers.wire_protocol import (
    grammars_to_texts,
    responses_from_tensors,
    responses_to_tensors,
)
from tests.data.chat_models import tokenizer_file
from tests.engines.engines import engine_of, load_directory, save_tiny
from tests.engines.test_embedded import load_transformers
from tests.engines.test_generation import begin
from tests.engines.test_kept_tokens import trained_step
from tests.megatron import jobs

PADDING = 30
"""Ids of the model's vocabulary that the tokenizer does not have."""
LENGTH = 200
"""Maximum number of tokens of a sequence."""
OBJECT = (
    'start: %json {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
)


def save_model(directory: Path, tokenizer: str | None = None) -> Path:
    """Save a random model with a tokenizer in JSON; None: one of `tests.data.chat_models`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tokenizer or tokenizer_file("bytes")
    (directory / "tokenizer.json").write_text(tokenizer)
    size = len(json.loads(tokenizer)["model"]["vocab"])
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=size + PADDING,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=LENGTH,
        initializer_range=0.3,
        eos_token_id=[1, 2],
        bos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def draw_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a random JSON schema."""
    kinds = ["string", "integer", "boolean", "enum", "pattern"]
    kind = draw.choice(kinds if depth > 1 else [*kinds, "object", "object", "array"])
    if kind == "object":
        names = draw.sample(["a", "b", "name", "ä", 'x"y'], draw.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: draw_schema(draw, depth + 1) for name in names},
            "required": draw.sample(names, draw.randint(0, len(names))),
            "additionalProperties": draw.choice([False, True]),
        }
    if kind == "array":
        return {"type": "array", "items": draw_schema(draw, depth + 1), "maxItems": 3}
    if kind == "enum":
        return {"enum": draw.sample(["yes", "no", 1, None, "ü"], 2)}
    if kind == "pattern":
        return {"type": "string", "pattern": "^[a-f]{2,5}$"}
    return {"type": kind, **({"maxLength": 6} if kind == "string" else {})}


def draw_grammars(seed: int, count: int) -> list[str | None]:
    """Return random grammars; None, free text, is among them."""
    draw = random.Random(seed)
    grammars = [f"start: %json {json.dumps(draw_schema(draw))}" for _ in range(count - 1)]
    return [*grammars, None]


def generate(
    engine: GenerationEngine, grammars: Sequence[str | None], options: SamplingOptions
) -> list[Sample]:
    """Generate one response per grammar. Runs on all ranks of a replica; only the first one returns
    complete samples."""
    requests = [
        GenerationRequest(Prompt(index, "", torch.tensor([40, 50 + index])), 0)
        for index in range(len(grammars))
    ]

    def start(_: Sequence[GenerationRequest]) -> tuple[EngineLoop, CreateSample]:
        loop = EngineLoop(engine)

        def create(index: int, request: GenerationRequest) -> Coroutine[Any, Any, Sample]:
            return complete_response(loop, request, replace(options, grammar=grammars[index]))

        return loop, create

    samples = start_on_replica(engine, requests, start)
    found: dict[int, Sample] = {}
    while not samples.is_done:
        found |= dict(samples.step())
    return [found[index] for index in range(len(grammars))]


def make_engine(directory: Path, tensor: int = 1, **settings: Any) -> EmbeddedEngine:
    layout = EngineParallelConfig(tensor=tensor, data=1)
    rank = dist.get_rank() if tensor > 1 else 0
    group = create_replica_group(layout, rank, timedelta(seconds=60)) if tensor > 1 else None
    engine = EmbeddedEngine(
        directory_shape(directory, "model.path"),
        EngineConfig(parallel=layout, **{"batch_size": 3} | settings),
        rank,
        2,
        group,
        tokenizer_directory=directory,
    )
    load_directory(engine, directory)
    return engine


def generate_on_ranks(directory: str, tensor: int, options: SamplingOptions) -> list[Sample]:
    """Return the samples of an embedded engine on all ranks of the world."""
    samples = generate(make_engine(Path(directory), tensor), draw_grammars(4, 10), options)
    return broadcast_samples(samples if dist.get_rank() == 0 else None)


def compare_with_trainer(
    directory: str, tensor: int, options: SamplingOptions, samples: list[Sample] | None = None
) -> dict[str, Any]:
    """Return the samples and the largest differences of the trainer's log-probs."""
    if samples is None:
        samples = generate_on_ranks(directory, tensor, options)
    actor = jobs.policy(directory, {"tensor": tensor}, {"micro_batch_tokens": 130})
    batch = collate(samples, pad_token_id=0)
    rows = {"sampling_support": batch.sampling_support, "guided_tokens": batch.guided_tokens}
    errors = {}
    for name, scorer in (("policy", actor.logprobs), ("reference", actor.reference_logprobs)):
        logprobs = scorer(
            batch.tokens, batch.lengths, temperature=options.temperature, mask=batch.mask, **rows
        )
        errors[name] = float((logprobs - batch.engine_logprobs)[batch.mask].abs().max())
    free = actor.logprobs(batch.tokens, batch.lengths, temperature=options.temperature)
    errors["without grammars"] = float((free - batch.engine_logprobs)[batch.mask].abs().max())
    worlds.shutdown()
    return {"samples": samples, "errors": errors}


def compare_with_teacher(directory: str, tensor: int, options: SamplingOptions) -> dict[str, float]:
    """Return the largest differences between the log-probs of a teacher and of the policy, which
    are the same model, and the results of training with divergences between the two."""
    batch = collate(generate_on_ranks(directory, tensor, options), pad_token_id=0)
    assert batch.guided_tokens is not None
    settings = TeacherConfig(parallel=ParallelConfig(tensor=tensor))
    world = worlds.initialize(settings.parallel, 1, timeout_s=60)
    shape = directory_shape(Path(directory), "model.path")
    source = TeacherSource(key="teacher", path=directory)
    model = FrozenPolicy(shape, world, settings, Path(directory), chunk_tokens=7)
    teacher = TeacherRank([model], [source], shape.vocab_size, Path(directory))
    request = {
        "prompt_lengths": batch.prompt_lengths,
        "temperature": options.temperature,
        "grammars": grammars_to_texts(batch.guided_tokens),
    }
    plain = teacher.logprobs(batch.tokens, batch.lengths, **request)[:, :-1]
    packed = teacher.logprobs(batch.tokens, batch.lengths, top_k=20, **request)[:, :-1]
    worlds.shutdown()

    top = TeacherTopK.unpack(packed)
    rows = replace(batch, candidates=top.ids, candidate_targets=top.outcomes)
    # The updates below must not change the weights.
    frozen = {"micro_batch_tokens": 130, "optimizer": {"learning_rate": 1e-12}}
    actor = jobs.policy(directory, {"tensor": tensor}, frozen)
    logprobs, scored = actor.score_candidates(rows)
    assert scored.candidate_logprobs is not None
    mask = batch.mask
    is_possible = top.outcomes[mask] > -50
    difference = (scored.candidate_logprobs - top.outcomes)[mask]
    found = {
        "advantage": float((plain - batch.engine_logprobs)[mask].abs().max()),
        "top_k": float((top.logprobs - batch.engine_logprobs)[mask].abs().max()),
        "policy": float((logprobs - batch.engine_logprobs)[mask].abs().max()),
        "candidates": float(difference[is_possible].abs().max()),
        "total": float((top.outcomes.exp().sum(-1) - 1)[mask].abs().max()),
        # fewer tokens than k are allowed at many positions
        "excluded": float(1 - is_possible.float().mean()),
    }
    for kind in ("forward_kl", "reverse_kl", "jensen_shannon"):

        def loss(_: Tensor, __: Tensor, part: Rows, count: float, kind: str = kind) -> Any:
            def reduce(terms: Tensor) -> Tensor:
                return torch.where(part.mask, terms, 0.0).sum() / count

            return distillation_loss(part, TeacherConfig(loss=kind), reduce)

        stats = actor.train(rows, loss)
        found[kind] = abs(stats["teacher_divergence"]) + stats["grad_norm"]
    worlds.shutdown()
    return found


def reference_logprobs(directory: Path, sample: Sample, temperature: float) -> Tensor:
    """Return the log-probs of a response from transformers and llguidance's own tokenizer."""
    tokenizer = Tokenizer(directory)
    with torch.no_grad():
        logits = load_transformers(directory)(sample.tokens[None]).logits[0]
    scores = logits[sample.prompt_length - 1 : -1] / temperature
    (span,) = sample.grammar_spans or (None,)
    if span is None:
        return scores.log_softmax(-1).gather(1, sample.response[:, None])[:, 0]
    stop = list(span.grammar.stop_token_ids)
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer(
            tokenizer._tokenizer.to_str(), n_vocab=tokenizer.vocab_size, eos_token=stop
        ),
        llguidance.LLMatcher.grammar_from_lark(
            '%llguidance {"no_forcing": true}\n' + span.grammar.text
        ),
    )
    found = []
    for place, token in enumerate(sample.response.tolist()):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = torch.from_numpy(bits[: tokenizer.vocab_size].astype(bool))
        found.append(scores[place].masked_fill(~allowed, -torch.inf).log_softmax(-1)[token])
        matcher.consume_token(token)
    return torch.stack(found)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


OPTIONS = SamplingOptions(60, temperature=0.8, stop_token_ids=(1, 2))


@pytest.mark.promise("guided-logprobs-are-exact")
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("truncation", [{}, {"top_k": 4, "top_p": 0.9, "renormalize": True}])
def test_guided_logprobs_of_engine_and_trainer_agree(pool, model, tensor, truncation):
    ranks = pool.run(
        compare_with_trainer, tensor, str(model), tensor, replace(OPTIONS, **truncation)
    )
    for rank in ranks:
        errors = rank["errors"]
        assert errors["policy"] < 2e-5 and errors["reference"] < 2e-5
        assert errors["without grammars"] > 0.1
    tokenizer = Tokenizer(model)
    samples = ranks[0]["samples"]
    assert sum(sample.finish_reason == "stop" for sample in samples) >= 5
    for sample in samples:
        if sample.grammar_spans:
            assert int(sample.response.max()) < tokenizer.vocab_size - PADDING
        if not truncation:
            expected = reference_logprobs(model, sample, OPTIONS.temperature)
            torch.testing.assert_close(sample.engine_logprobs, expected, rtol=0, atol=2e-5)
        if sample.grammar_spans and sample.finish_reason == "stop":
            json.loads(tokenizer.decode(sample.response[:-1]))


def assert_exact(directory: Path, samples: Sequence[Sample]) -> None:
    """Check log-probs against transformers, and that complete responses are JSON."""
    tokenizer = Tokenizer(directory)
    for sample in samples:
        expected = reference_logprobs(directory, sample, OPTIONS.temperature)
        torch.testing.assert_close(sample.engine_logprobs, expected, rtol=0, atol=2e-5)
        if sample.grammar_spans and sample.finish_reason == "stop":
            json.loads(tokenizer.decode(sample.response[:-1]))


def test_first_ratio_of_guided_training_step_is_one(pool, model):
    (step,) = pool.run(train_guided, 1, str(model))
    assert step["mismatch/logprob_abs"] < 1e-5
    assert step["policy/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert step["kl/reference"] == pytest.approx(0, abs=1e-4)
    assert step["policy/grad_norm"] > 0


def train_guided(directory: str) -> dict[str, float]:
    """Return the online trainer's metrics of a step on guided samples."""
    options = replace(OPTIONS, temperature=jobs.TEMPERATURE)
    samples = generate(make_engine(Path(directory)), draw_grammars(4, 8), options)
    # Two adjacent samples form a group.
    samples = [replace(one, prompt_id=at // 2) for at, one in enumerate(samples)]
    actor = jobs.policy(directory, {}, {"micro_batch_tokens": 130})
    prompts = tuple(range(len(samples) // 2))
    step = trained_step(actor, samples, prompts, asks_before_update=True)
    worlds.shutdown()
    return step


@pytest.mark.promise("guided-logprobs-are-exact")
@pytest.mark.parametrize("tensor", [1, 2])
def test_teacher_and_policy_have_distributions_over_the_same_tokens(pool, model, tensor):
    options = replace(OPTIONS, temperature=jobs.TEMPERATURE)
    for found in pool.run(compare_with_teacher, tensor, str(model), tensor, options):
        assert found.pop("excluded") > 0.1
        assert max(found.values()) < 1e-4, found


@pytest.mark.parametrize(
    "settings",
    [
        {"speculation": SpeculationConfig(tokens=3, rows=8)},
        {"steps_per_sync": 4},
        {"exact": True},
        {"batch_size": 20},
    ],
    ids=["speculation", "steps_per_sync", "exact", "one-batch"],
)
def test_settings_of_the_engine_do_not_change_guided_responses(model, settings):
    grammars = draw_grammars(7, 6)
    expected = generate(make_engine(model), grammars, OPTIONS)
    samples = generate(make_engine(model, **settings), grammars, OPTIONS)
    assert [one.tokens.tolist() for one in samples] == [one.tokens.tolist() for one in expected]
    assert_exact(model, samples)


def test_guided_requests_do_not_change_free_ones(model):
    free, guided = generate(make_engine(model), [None, None], OPTIONS), draw_grammars(7, 6)
    mixed = generate(make_engine(model, batch_size=8), [None, None, *guided], OPTIONS)
    assert [one.tokens.tolist() for one in mixed[:2]] == [one.tokens.tolist() for one in free]
    assert all(not one.grammar_spans for one in mixed[:2])


def test_greedy_guided_response_is_most_probable_allowed_text(model):
    greedy = replace(OPTIONS, greedy=True, temperature=1.0)
    grammar = 'start: "yes" | "no"'
    (sample,) = generate(make_engine(model), [grammar], greedy)
    assert Tokenizer(model).decode(sample.response[:-1]) in ("yes", "no")
    torch.testing.assert_close(
        sample.engine_logprobs, reference_logprobs(model, sample, 1.0), rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("steps", [1, 5, 12])
def test_interrupted_guided_responses_continue_their_text(model, steps):
    grammars = draw_grammars(9, 6)
    expected = generate(make_engine(model, batch_size=8), grammars, OPTIONS)
    engine = make_engine(model, batch_size=8)
    requests = [
        GenerationRequest(Prompt(index, "", torch.tensor([40, 50 + index])), 0)
        for index in range(len(grammars))
    ]
    loop = EngineLoop(engine)
    found: dict[int, Sample] = {}
    for index, request in enumerate(requests):
        options = replace(OPTIONS, grammar=grammars[index])
        loop.spawn(index, complete_response(loop, request, options))
    for _ in range(steps):
        found |= dict(loop.step())
    found |= dict(loop.interrupt())
    partial = {index: one for index, one in found.items() if one.finish_reason == "unfinished"}
    assert partial
    # Partial samples are sent between ranks, and stored in checkpoints.
    sent = samples_from_tensors(samples_to_tensors(list(partial.values())))
    loop.close()

    loop = EngineLoop(engine)
    for index, sample in zip(partial, sent, strict=True):
        request = replace(requests[index], partial_sample=sample)
        options = replace(OPTIONS, grammar=grammars[index])
        loop.spawn(index, complete_response(loop, request, options))
    while not loop.is_done:
        found |= dict(loop.step())
    loop.close()
    samples = [found[index] for index in range(len(grammars))]
    assert [one.tokens.tolist() for one in samples] == [one.tokens.tolist() for one in expected]
    assert [one.grammar_spans for one in samples] == [one.grammar_spans for one in expected]
    assert_exact(model, samples)


def test_weight_sync_within_guided_response_continues_its_text(model):
    engine = make_engine(model, in_flight="interrupt")
    grammars = draw_grammars(9, 3)[:2]
    loop = EngineLoop(engine)
    for index, grammar in enumerate(grammars):
        request = GenerationRequest(Prompt(index, "", torch.tensor([40, 50 + index])), 0)
        options = replace(OPTIONS, grammar=grammar)
        loop.spawn(index, complete_response(loop, request, options))
    found = dict(loop.step())
    begin(engine, model, 1, "interrupt").commit()
    while not loop.is_done:
        found |= dict(loop.step())
    loop.close()
    assert any(len(sample.weight_versions.unique()) == 2 for sample in found.values())
    assert_exact(model, list(found.values()))


def test_samples_with_branches_keep_their_grammars_in_messages(model):
    samples = generate(make_engine(model), draw_grammars(4, 4), OPTIONS)
    with_branches = [replace(samples[0], branches=(samples[1],)), *samples[2:]]
    assert samples_from_tensors(samples_to_tensors(with_branches))[0].branches[0].grammar_spans
    requested = [
        replace(create_unfinished_sample(GenerationRequest(Prompt(at, "", one.initial_prompt), 0)))
        for at, one in enumerate(with_branches)
    ]
    received = responses_from_tensors(requested, responses_to_tensors(with_branches))
    for one, sent in zip(received, with_branches, strict=True):
        assert one.grammar_spans == sent.grammar_spans
    assert received[0].branches[0].grammar_spans == samples[1].grammar_spans
    assert samples[0].truncate(2, "length").grammar_spans[0].end == 2


def test_tokens_that_a_grammar_forbids_are_an_error_of_training(pool, model):
    with pytest.raises(AssertionError, match="a response does not follow its grammar"):
        pool.run(score_wrong_grammar, 1, str(model))


def score_wrong_grammar(directory: str) -> None:
    samples = generate(make_engine(Path(directory)), [OBJECT], OPTIONS)
    (span,) = samples[0].grammar_spans
    wrong = replace(span, grammar=replace(span.grammar, text='start: "no"'))
    batch = collate([replace(samples[0], grammar_spans=(wrong,))], pad_token_id=0)
    try:
        jobs.policy(directory, {}, {"micro_batch_tokens": 130}).logprobs(
            batch.tokens, batch.lengths, guided_tokens=batch.guided_tokens
        )
    finally:
        worlds.shutdown()


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ('start: %json {"type": "array", "uniqueItems": true}', "Unimplemented keys"),
        ("start: other(", "Expected token"),
        ("start: %json false", "Unsatisfiable schema"),
    ],
)
def test_invalid_grammar_fails_only_its_request(model, grammar, problem):
    engine = make_engine(model)
    tokens, options = torch.tensor([40, 50]), replace(OPTIONS, grammar=grammar)
    request = engine.submit(tokens, options, RequestKey(0, 0, 2))
    with pytest.raises(AlignerError, match=problem):
        request.future.result(0)
    assert not engine.has_work
    generate(engine, [OBJECT], OPTIONS)


def letters_tokenizer() -> str:
    """Return a tokenizer that can write nothing but lower-case letters."""
    words = ["<s>", "</s>", "<|end|>", *string.ascii_lowercase]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({word: index for index, word in enumerate(words)}, [])
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(words[:3])
    text: str = tokenizer.to_str()
    return text


def check_dead_end(engine: GenerationEngine, caplog: pytest.LogCaptureFixture) -> None:
    """Check that a response whose text needs a digit ends, with one warning, if the tokenizer of
    `letters_tokenizer` has no digits."""
    caplog.clear()
    (sample,) = generate(engine, ['start: "a" /[0-9]/'], OPTIONS)
    assert sample.finish_reason == "stop" and len(sample.response) == 2
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "prompt 0, sample 0: the response ended before its text was complete" in warning
    assert "the model's vocabulary has no tokens for such a text" in warning


def test_response_without_allowed_token_ends_with_one_warning(tmp_path, caplog):
    check_dead_end(make_engine(save_model(tmp_path, letters_tokenizer())), caplog)


def test_tensorrt_llm_refuses_grammars_and_scoring(tmp_path):
    directory = save_tiny(tmp_path, seed=0)
    with engine_of("tensorrt_llm", directory) as engine:
        options = SamplingOptions(4, stop_token_ids=(1,), grammar='start: "a"')
        request = engine.submit(torch.tensor([3]), options, RequestKey(0, 0, 1))
        with pytest.raises(UnsupportedError, match=r"set engine\.kind=embedded or vllm"):
            request.future.result(0)
        scoring_request = engine.submit_scoring(torch.tensor([3, 4]))
        with pytest.raises(UnsupportedError, match=r"set engine\.kind=embedded or vllm"):
            scoring_request.future.result(0)
        assert not engine.has_work
