"""The engine of `aligner_examples.transformers_engine`, and `engine.kind=module:Class`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from aligner.checks.check import check
from aligner.config.compose import compose_config
from aligner.data.types import Prompt
from aligner.engines.build import build_engine
from aligner.engines.engine_protocol import GenerationEngine, GenerationRequest, SamplingOptions
from aligner.errors import AlignerError, ConfigError
from aligner.observability.trace import read_spans
from aligner.schema import EngineConfig
from aligner_examples.transformers_engine import TransformersEngine
from benchmarks.runs import Launch
from tests.engines import engines
from tests.rounds import slow

pytest.importorskip("transformers")
KIND = "aligner_examples.transformers_engine:TransformersEngine"
SETTINGS = EngineConfig(
    kind=KIND, precision="fp32", update="in_place", parallel=engines.SETTINGS.parallel
)


class IncompleteEngine(GenerationEngine):
    """An engine without methods."""


class UnverifiableEngine(TransformersEngine):
    """An engine that does not return its parameters."""

    held_weights = GenerationEngine.held_weights  # type: ignore[assignment]


def build(directory: Path, **changes: object) -> GenerationEngine:
    """Return an engine of the user."""
    settings = dataclasses.replace(SETTINGS, **changes)  # type: ignore[arg-type]
    return build_engine(engines.shape_of(directory), settings, directory, seed=7)


def test_samples_depend_on_their_key_and_have_exact_logprobs(tmp_path: Path) -> None:
    directory = engines.save_tiny(tmp_path, seed=0)
    engine = build(directory, arguments={"attention": "eager"})
    engines.publish(engine, directory, 3)
    options = SamplingOptions(6, temperature=0.7)
    requests = [
        GenerationRequest(Prompt(prompt, "", torch.arange(2, 6 + prompt)), index)
        for prompt in range(2)
        for index in range(2)
    ]
    samples = engines.generate(engine, requests, options)
    alone = engines.generate(engine, requests[3:], options)
    assert samples[3].tokens.tolist() == alone[0].tokens.tolist()
    assert len({tuple(sample.response.tolist()) for sample in samples[:2]}) == 2

    model = engines.reference_model(directory)
    for sample in samples:
        with torch.no_grad():
            logits = model(sample.tokens[None]).logits[0, sample.prompt_length - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1).gather(1, sample.response[:, None])[:, 0]
        torch.testing.assert_close(sample.engine_logprobs, expected, atol=1e-5, rtol=0)
        assert sample.weight_versions.tolist() == [3] * 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"arguments": {"atention": "eager"}},
            "engine.arguments.atention: TransformersEngine has no such argument; allowed:"
            " attention",
        ),
        ({"kind": "aligner_examples.missing:Engine"}, "No module named 'aligner_examples.missing'"),
        ({"kind": "json:loads"}, "engine.kind=json:loads: is not a subclass of aligner.engines"),
        (
            {"kind": f"{__name__}:IncompleteEngine"},
            "IncompleteEngine: does not define begin_update, has_work, interrupt, release,",
        ),
        (
            {"kind": f"{__name__}:UnverifiableEngine"},
            "UnverifiableEngine: does not define held_weights, which engine.verify=sync requires;",
        ),
        ({"update": "shared"}, "engine.update=shared: is not supported with your own engine"),
    ],
)
def test_unsuitable_engine_class_is_refused(tmp_path: Path, changes, message: str) -> None:
    directory = engines.save_tiny(tmp_path, seed=0)
    with pytest.raises(ConfigError) as error:
        build(directory, **changes)
    assert message in str(error.value)


def test_engine_refuses_unsupported_sampling(tmp_path: Path) -> None:
    engine = build(engines.save_tiny(tmp_path, seed=0))
    with pytest.raises(AlignerError, match=r"does not support rollout\.renormalize=true"):
        engine.check_sampling(SamplingOptions(4, top_p=0.5, renormalize=True))


def test_check_reports_missing_engine_class(tmp_path: Path) -> None:
    overrides = ["experiment=tiny_ppo", "engine.kind=missing_module:Engine"]
    with pytest.raises(ConfigError, match=r"engine\.kind=missing_module:Engine: No module named"):
        check(compose_config([*overrides, f"run.dir={tmp_path / 'run'}"]))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("placement", ["colocated", slow("server")])
def test_run_trains_with_own_engine(tmp_path: Path, placement: str) -> None:
    overrides = (
        f"engine.kind={KIND}",
        "engine.update=in_place",
        f"engine.placement={placement}",
        "engine.parallel.data=1",
        "logging.tensorboard=false",
        "rollout.max_response_tokens=6",
        "run.stop_after=2",
    )
    with Launch(tmp_path / "run", *overrides) as launch:
        run = launch.finish(400)
    assert run.code == 0, run.report()
    assert [step["mismatch/logprob_abs"] < 1e-5 for step in run.metrics] == [True] * 2
    assert [step["verify/version"] for step in run.metrics] == [0, 1]
    for step in run.metrics:
        assert step["verify/logprob_abs"] < 1e-4
        assert step["verify/checksum_seconds"] > 0
        assert step["verify/probe_seconds"] > 0
    spans = {span.name for span in read_spans(run.paths) if span.rank == 0}
    assert {"verify", "probe"} <= spans
    assert run.metrics[-1]["policy/grad_norm"] > 0
