"""`make gpu-check` where there is no GPU, and its checks on the CPU, so that none runs for the
first time on a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.device import product_weights, step_flops
from benchmarks.models import MODELS, shape_of
from benchmarks.runs import REPOSITORY


def checked(output: Path, **environment: str) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit code, and what each check came to."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", "--output", str(output)],
        cwd=REPOSITORY,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert "Traceback" not in done.stderr, done.stderr
    outcomes = [json.loads(line) for line in output.read_text().splitlines()]
    return done.returncode, {each["name"]: each for each in outcomes}


@pytest.mark.promise("gpu-check-without-gpu")
def test_without_a_gpu_everything_is_absent_by_name_and_nothing_runs(tmp_path: Path) -> None:
    code, outcomes = checked(tmp_path / "results.jsonl")
    assert code == 0 and len(outcomes) == 14
    assert {(each["result"], each["seconds"]) for each in outcomes.values()} == {("absent", 0.0)}
    assert all("GPU" in each["why"] for each in outcomes.values())
    assert "tensorrt_llm" in outcomes["interfaces of TensorRT-LLM"]["why"]


def test_of_a_check_whose_time_is_over_it_is_told_what_it_had_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "TIMEOUT_S", 2)
    waits = (sys.executable, "-uc", "import time; print('half of it'); time.sleep(60)")
    outcome = gpu_check.carry_out(gpu_check.Check("one that waits", waits))
    assert (outcome.result, outcome.why.split("\n")) == (
        "fail",
        ["half of it", "", "", "timed out after 2 s"],
    )
    assert "half of it" in capsys.readouterr().err


@pytest.mark.promise("gpu-check-without-gpu")
@pytest.mark.slow
def test_on_the_cpu_every_check_passes_once(tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    code, outcomes = checked(output, ALIGNER_DEVICE="cpu")
    assert code == 0, outcomes
    results = {name: each["result"] for name, each in outcomes.items()}
    assert [*results.values()].count("pass") == 10 and "fail" not in results.values()
    assert outcomes["speed: decode"]["figures"][0]["tokens_per_s"] > 0  # type: ignore[index]
    before = output.read_text()
    checked(output, ALIGNER_DEVICE="cpu")
    again = [
        json.loads(line)["name"] for line in output.read_text().removeprefix(before).splitlines()
    ]
    assert again == [name for name, result in results.items() if result == "absent"], (
        "what has passed is not run again"
    )


@pytest.mark.parametrize("model", ["tiny", "llama_3m"])
def test_what_a_step_has_to_compute_is_what_torch_counts(model: str) -> None:
    """Of a pass that computes the whole square of attention's scores, of which the causal half
    counts."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM

    rows, tokens, shape = 2, 48, shape_of(model)
    peer = LlamaForCausalLM(LlamaConfig(**MODELS[model], attn_implementation="eager"))
    with FlopCounterMode(display=False) as counter:
        peer(torch.randint(0, shape.vocab_size, (rows, tokens))).logits.sum().backward()
    causal = step_flops(shape, rows, tokens)
    attention = causal - 6 * rows * tokens * product_weights(shape)
    assert counter.get_total_flops() == pytest.approx(causal + attention, rel=1e-3)
