"""Arguments and environment variables of the configuration reach the installed vLLM."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

from aligner.data.types import Prompt
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.engines.vllm.program_client import Request, VLLMClient
from aligner.engines.vllm.vllm_engine import VLLMEngine
from aligner.errors import AlignerError
from tests.engines import engines
from tests.engines.vllm.shared_clients import NEEDED

pytestmark = [*NEEDED, pytest.mark.timeout(600)]


def make_engine(directory: Path, **vllm: object) -> VLLMEngine:
    """Start vLLM with further arguments or environment variables."""
    settings = dataclasses.replace(
        engines.SETTINGS,
        kind="vllm",
        sleep=False,
        vllm=dataclasses.replace(engines.SETTINGS.vllm, **vllm),  # type: ignore[arg-type]
    )
    return VLLMEngine(directory, engines.shape_of(directory), settings, 0, seed=7)


def record(generate: Callable[..., Request], started: list[Request]) -> Callable[..., Request]:
    """Return a function that also appends the requests to a list."""

    def generate_and_record(*arguments: object) -> Request:
        started.append(generate(*arguments))
        return started[-1]

    return generate_and_record


@pytest.mark.promise("vllm-arguments-are-checked")
def test_arguments_and_variables_reach_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefix cache reuses full blocks only: none of 128 tokens fits into the tiny model."""
    started: list[Request] = []
    directory = engines.save_tiny(tmp_path, seed=0, head_dim=32)
    engine = make_engine(
        directory,
        args={"block_size": 32, "compilation_config": {"max_cudagraph_capture_size": 4}},
        env={"VLLM_RINGBUFFER_WARNING_INTERVAL": 61, "VLLM_LOG_MODEL_INSPECTION": False},
    )
    try:
        program = cast("VLLMClient", engine._client)._program
        monkeypatch.setattr(program, "generate", record(program.generate, started))
        variables = Path(f"/proc/{program.process.pid}/environ").read_bytes().split(b"\0")
        assert b"VLLM_RINGBUFFER_WARNING_INTERVAL=61" in variables
        assert b"VLLM_LOG_MODEL_INSPECTION=0" in variables

        engines.publish(engine, directory, 0)
        prompt = Prompt(0, "", torch.arange(2, 42))
        options = SamplingOptions(4)
        for _ in range(2):
            engines.generate(engine, [GenerationRequest(prompt, 0)], options)
        assert [request.outputs[0].cached_tokens for request in started] == [0, 32]
    finally:
        engine.shutdown()


def test_error_of_vllm_names_the_arguments(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = engines.save_tiny(tmp_path, seed=0, head_dim=32)
    caplog.set_level(logging.ERROR)
    message = r"(?s)vLLM did not start: .*; check engine\.vllm\.args\.max_num_batched_tokens$"
    with pytest.raises(AlignerError, match=message):
        # Fewer tokens than the longest sequence, which vLLM refuses without chunked prefill.
        make_engine(directory, args={"max_num_batched_tokens": 8})
