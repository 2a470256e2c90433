"""The generator's endpoint: samples, refused requests, and weight sync during generation."""

from __future__ import annotations

import dataclasses
import json
import time

import numpy as np
import pytest
import torch

from aligner.config.compose import compose_config
from aligner.data.model_directory import prepare_model, read_shape
from aligner.data.types import Prompt, create_empty_samples
from aligner.engines.build import build_engine
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.engines.replicas import EarlyStopCondition
from aligner.errors import AlignerError
from aligner.models.model_source import model_directory
from aligner.servers.generator_client import GeneratorClient, build_generate_request
from aligner.servers.generator_server import GeneratorRank, build_weight_receiver
from aligner.servers.remote_client import RemoteError
from aligner.servers.validation import Limits, parse_control_request, validate
from aligner.servers.wire_protocol import (
    GENERATE,
    RequestError,
    WeightsError,
    responses_from_tensors,
)
from tests.engines.engines import generate, load_directory
from tests.servers.generator_jobs import (
    Trainer,
    request_one_replica_refuses,
    run_generator,
    sync_between_requests,
    sync_during_generation,
    sync_with_probe,
    weights_of,
)
from tests.servers.roles import RunningRole

PROMPTS = [Prompt(7, "", torch.tensor([5, 6, 9])), Prompt(2**40, "", torch.tensor([8]))]
OPTIONS = SamplingOptions(max_new_tokens=4, temperature=0.7, stop_token_ids=(1,))


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    config = compose_config(
        [
            "experiment=tiny_ppo",
            "engine.placement=server",
            f"run.dir={tmp_path_factory.mktemp('run') / 'run'}",
        ]
    )
    directory = prepare_model(config)
    shape = read_shape(directory)
    built = build_engine(shape, config.engine, directory, seed=config.seed)
    built.config, built.shape, built.directory = config, shape, directory
    return built


def serving(engine):
    receiver = build_weight_receiver(engine.config, engine.shape, engine, 0, torch.device("cpu"))
    generator = GeneratorRank(engine.config, engine, receiver, rank=0)

    def call(op, tensors=None, **arguments):
        return generator.handlers[op](**(tensors or {}), **arguments)

    return call, generator.create_endpoints(call)[GENERATE]


def test_engine_without_weights_refuses_generate_and_receive(engine):
    call, serve = serving(engine)
    assert call("version")["version"] == -1
    with pytest.raises(AlignerError, match="no weight sync has completed yet"):
        serve(build_generate_request(create_empty_samples(PROMPTS, 2), 2, OPTIONS))
    with pytest.raises(AlignerError, match="call connect first"):
        call("receive", version=1)


def test_samples_from_endpoint_equal_engine_samples(engine):
    load_directory(engine, engine.directory, version=3)
    call, serve = serving(engine)
    arrays = build_generate_request(create_empty_samples(PROMPTS, 2), 2, OPTIONS)
    validate(GENERATE, arrays, Limits(engine.shape.vocab_size, engine.shape.max_positions))
    got = responses_from_tensors(
        create_empty_samples(PROMPTS, 2),
        {name: torch.tensor(array) for name, array in serve(arrays).items()},
    )
    expected = generate(
        engine,
        [GenerationRequest(prompt, index) for prompt in PROMPTS for index in range(2)],
        OPTIONS,
    )
    assert call("version")["version"] == 3
    for one, other in zip(got, expected, strict=True):
        assert (one.prompt_id, one.sample_index, one.finish_reason) == (
            other.prompt_id,
            other.sample_index,
            other.finish_reason,
        )
        for name in ("tokens", "engine_logprobs", "weight_versions"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"options": "{"}, "options: not valid JSON"),
        ({"options": "[]"}, "options: got list, allowed: a JSON object with the keys"),
        (
            {"options": '{"max_new_tokens": 2, "topk": 1}'},
            "options: got topk, allowed: a JSON object with the keys .*top_k",
        ),
        ({"options": "{}"}, "options: .*max_new_tokens"),
        ({"options": '{"max_new_tokens": 2, "temperature": 0}'}, "temperature=0: must be above 0"),
        ({"options": '{"max_new_tokens": "2"}'}, "options: "),
        ({"samples_per_prompt": 0}, "samples_per_prompt: got 0, allowed: at least 1"),
        ({"enough": 3}, r"enough: got 3, allowed: 1 to 2 \(1 to B\)"),
        (
            {"stopped": None},
            "missing tensor stopped; a partial rollout requires all of responses, ",
        ),
        (
            {"samples_per_prompt": 1},
            r"responses: got shape \[4, 1\], allowed: \[N, R\] with N=2 \(B x samples_per_prompt\)",
        ),
        ({"stopped": [[2]] * 4}, "stopped: got 2, allowed: -1 to 1"),
        ({"stopped": [[0]] * 4}, "response_lengths: got 0 for a finished response"),
        ({"responses": [[64]] * 4}, "responses: got 64, allowed: 0 to 63"),
    ],
)
def test_invalid_generate_request_is_refused(engine, changed, message):
    _, serve = serving(engine)
    arrays = build_generate_request(
        create_empty_samples(PROMPTS, 2), 2, OPTIONS, EarlyStopCondition(2)
    )
    for name, value in changed.items():
        arrays[name] = np.array(
            value
            if isinstance(value, list)
            else [value.encode() if isinstance(value, str) else value]
        )
        if value is None:
            del arrays[name]
    with pytest.raises(AlignerError, match=message):
        validate(GENERATE, arrays, Limits(engine.shape.vocab_size, engine.shape.max_positions))
        serve(arrays)


def test_request_for_newer_weight_version_is_refused(engine):
    call, serve = serving(engine)
    served = call("version")["version"]
    with pytest.raises(
        WeightsError,
        match=(
            f"has weight version {served}, but the request requires version {served + 1} or newer"
        ),
    ):
        serve(
            build_generate_request(
                create_empty_samples(PROMPTS, 2), 2, OPTIONS, weight_version=served + 1
            )
        )
    assert (
        len(
            serve(
                build_generate_request(
                    create_empty_samples(PROMPTS, 2), 2, OPTIONS, weight_version=served
                )
            )["responses"]
        )
        == 4
    )


GREEDY = SamplingOptions(max_new_tokens=24, greedy=True)
SERVER = (
    *(
        "experiment=tiny_ppo",
        "algorithm=ppo_decoupled",
        "engine.placement=server",
        "rollout.max_staleness=1",
    ),
    "model.initializer_std=0.3",
)


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    chosen = [*SERVER, f"run.dir={tmp_path_factory.mktemp('moving') / 'run'}"]
    prepare_model(compose_config(chosen))
    return chosen


@pytest.fixture(scope="module")
def drawn_by(overrides):
    """Return (tokens, log-probs) of greedy responses of a separate engine with weights 1 or 2."""
    config = compose_config(overrides)
    shape = read_shape(model_directory(config))
    engines = {
        version: build_engine(shape, config.engine, model_directory(config), seed=config.seed)
        for version in (1, 2)
    }
    for version, engine in engines.items():
        update, tensors = engine.begin_update(version), weights_of(config, version)
        for name, view in update.views(list(tensors)).items():
            view.copy_(tensors[name])
        update.load(list(tensors))
        update.commit()

    def drawn(version, tokens, options):
        sample = generate(engines[version], [GenerationRequest(Prompt(0, "", tokens), 0)], options)[
            0
        ]
        return sample.response.tolist(), sample.engine_logprobs

    return drawn


LAYOUTS = {
    "TP2": ("engine.parallel.tensor=2", "engine.parallel.data=1"),
    "DP2": ("engine.parallel.data=2",),
}


@pytest.mark.parametrize(("layout", "kind"), [("TP2", "atomic"), ("DP2", "in_place")])
@pytest.mark.slow
def test_interrupted_responses_continue_with_new_weights(pool, overrides, drawn_by, layout, kind):
    # The first replica has finished when the weights arrive.
    stop = drawn_by(1, PROMPTS[0].tokens, GREEDY)[0][3]
    options = dataclasses.replace(GREEDY, stop_token_ids=(stop,))
    chosen = (*overrides, *LAYOUTS[layout], "engine.in_flight=interrupt", f"engine.update={kind}")
    (short, long), version = pool.run(
        run_generator, 2, chosen, sync_during_generation, PROMPTS, options
    )[0]
    assert version == 2
    assert short.response.tolist() == drawn_by(1, PROMPTS[0].tokens, options)[0]
    assert set(short.weight_versions.tolist()) == {1}
    versions = long.weight_versions.tolist()
    kept = versions.count(1)
    assert kept and versions == [1] * kept + [2] * (len(versions) - kept)
    old, new = long.response[:kept], long.response[kept:].tolist()
    before, old_logprobs = drawn_by(1, PROMPTS[1].tokens, options)
    assert old.tolist() == before[:kept]
    assert new != before[kept:]
    rest = dataclasses.replace(options, max_new_tokens=options.max_new_tokens - kept)
    after, new_logprobs = drawn_by(2, torch.cat([PROMPTS[1].tokens, old]), rest)
    assert new == after
    logprobs = torch.cat([old_logprobs[:kept], new_logprobs])
    torch.testing.assert_close(long.engine_logprobs, logprobs, atol=1e-4, rtol=0)


def test_weight_sync_waits_for_responses_in_flight(pool, overrides, drawn_by):
    chosen = (*overrides, *LAYOUTS["DP2"])
    samples, version = pool.run(run_generator, 2, chosen, sync_during_generation, PROMPTS, GREEDY)[
        0
    ]
    assert version == 2
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        assert sample.response.tolist() == drawn_by(1, prompt.tokens, GREEDY)[0]
        assert set(sample.weight_versions.tolist()) == {1}


def test_unfinished_responses_resume_in_next_request(pool, overrides):
    """Two replicas share five prompts of three samples, and one prompt's samples are split between
    the replicas. The second prompt is long, and is not due."""
    prompts = [Prompt(number, "", torch.tensor([5 + number])) for number in range(5)]
    options, enough = (
        SamplingOptions(60, stop_token_ids=tuple(range(8, 16))),
        EarlyStopCondition(2, required_prompts=(4,)),
    )
    chosen = (*overrides, *LAYOUTS["DP2"])
    first, again, last, changed = pool.run(
        run_generator, 2, chosen, sync_between_requests, prompts, 3, options, enough
    )[0]
    config = compose_config(overrides)
    engine = build_engine(
        read_shape(model_directory(config)),
        config.engine,
        model_directory(config),
        seed=config.seed,
    )
    load_directory(engine, model_directory(config), version=1)
    whole = generate(
        engine,
        [GenerationRequest(prompt, index) for prompt in prompts for index in range(3)],
        options,
    )
    longest = [
        max(len(sample.response) for sample in whole[place : place + 3])
        for place in range(0, 15, 3)
    ]
    steps = next(
        n
        for n in range(8, 61, 8)
        if longest[4] <= n and sum(length <= n for length in longest) >= 2
    )
    assert steps < max(longest)
    for drawn, repeated, end, other, expected in zip(
        first, again, last, changed, whole, strict=True
    ):
        length = len(drawn.response)
        assert (
            drawn.response.tolist()
            == repeated.response.tolist()
            == expected.response[:steps].tolist()
        )
        assert (drawn.finish_reason == "unfinished") == (len(expected.response) > steps)
        assert (
            end.response.tolist() == expected.response.tolist()
            and end.finish_reason == expected.finish_reason
        )
        assert other.response[:length].tolist() == drawn.response.tolist()
        assert other.weight_versions.tolist() == [1] * length + [2] * (len(other.response) - length)
        torch.testing.assert_close(end.engine_logprobs, expected.engine_logprobs, atol=1e-4, rtol=0)


@pytest.mark.promise("weight-sync-is-verified")
def test_probe_of_every_version_is_compared_with_its_snapshot(pool, overrides):
    chosen = (*overrides, *LAYOUTS["DP2"])
    config = compose_config(chosen)
    stats, error = pool.run(run_generator, 2, chosen, sync_with_probe, config, 3)[0]
    assert [each.version for each in stats] == [1, 2]
    for each in stats:
        assert each.probe_logprob_abs == 2, "both replicas"
        assert each.probe_seconds > 0
        assert each.verify_seconds > 0
    assert "position " in error
    assert "; the tolerance is 0.0001" in error


def test_error_on_one_replica_refuses_request_on_all_replicas(pool, overrides, drawn_by):
    prompts = [PROMPTS[1], PROMPTS[0]]
    error, samples = pool.run(
        run_generator,
        2,
        (*overrides, *LAYOUTS["DP2"]),
        request_one_replica_refuses,
        prompts,
        GREEDY,
    )[0]
    assert "prompt 7 has 300 tokens" in error
    assert [sample.response.tolist() for sample in samples] == [
        drawn_by(1, one.tokens, GREEDY)[0] for one in prompts
    ]


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    """The client of a server with two replicas, and a function that syncs weights to the server."""
    directory = tmp_path_factory.mktemp("server")
    chosen = (*SERVER, *LAYOUTS["DP2"], "engine.in_flight=interrupt")
    config = compose_config([*chosen, f"run.dir={directory}"])
    prepare_model(config)
    server = RunningRole("generator", directory, ranks=2, OVERRIDES=" ".join(chosen)).wait_ready()
    client = GeneratorClient(server.endpoint, server.access, timeout_s=30.0, update_timeout_s=30.0)
    trainer = Trainer(config, client.connect)

    def update(version):
        received = client.receive(version)
        trainer.publish(version)
        received.result()

    update(1)
    yield client, update
    client.close()
    server.stop()


@pytest.mark.slow
def test_server_carries_long_responses_over_to_next_request(generator):
    client, _ = generator
    prompts = [Prompt(number, "", torch.tensor([5])) for number in range(6)]
    options = SamplingOptions(200, stop_token_ids=(8, 9, 10))
    whole = client.generate(create_empty_samples(prompts, 2), 2, options).result()
    samples, rounds = create_empty_samples(prompts, 2), []
    for complete in (2, 4, 6):
        samples = client.generate(samples, 2, options, EarlyStopCondition(complete)).result()
        rounds.append([len(sample.response) for sample in samples])
    assert rounds[0] < rounds[1] < rounds[2]
    assert [sample.response.tolist() for sample in samples] == [
        sample.response.tolist() for sample in whole
    ]


@pytest.mark.slow
def test_server_syncs_weights_during_generation(generator):
    client, update = generator
    prompts, options = (
        [Prompt(number, "", torch.tensor([5])) for number in range(48)],
        SamplingOptions(250),
    )
    started = client.query_instance()
    assert client.control("version")["version"] == 1
    with pytest.raises(RemoteError) as refused:
        client.generate(create_empty_samples(prompts, 1), 1, options, weight_version=99).result()
    assert refused.value.kind == "WeightsError"
    for version in range(2, 12):  # on a busy machine, the weights may arrive before the request
        drawn = client.generate(
            create_empty_samples(prompts, 1), 1, options, weight_version=version - 1
        )
        time.sleep(0.1)
        update(version)
        found = {
            tuple(sample.weight_versions.unique_consecutive().tolist()) for sample in drawn.result()
        }
        assert client.control("version")["version"] == version
        if found != {(version,)}:
            break
    assert found == {(version - 1, version)}
    assert client.query_instance() == started


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"op": "receive"}, "receive: got keys op, expected: op, version"),
        (
            {"op": "receive", "version": -1},
            "receive: version: got -1, allowed: an integer from 0 to",
        ),
        (
            {"op": "connect", "host": 3, "port": 1, "generation": 0},
            "connect: host: got 3, allowed: a string",
        ),
        (
            {"op": "connect", "host": "a", "port": 0, "generation": 0},
            "connect: port: got 0, allowed: an integer from 1 to",
        ),
        ({"op": ["connect"]}, r"got op \['connect'\], allowed: "),
    ],
)
def test_invalid_weight_transfer_request_is_refused(request_, message):
    generator = object.__new__(GeneratorRank)
    with pytest.raises(RequestError, match=message):
        parse_control_request(
            json.dumps(request_), {"connect": generator._connect, "receive": generator._receive}
        )
