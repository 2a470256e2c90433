"""`make gpu-check` without a GPU; its checks run on the CPU, so none runs first on a GPU."""

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


def run_checks(output: Path, **environment: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Run the checks; return the exit code and each check's outcome by name."""
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
def test_every_check_is_absent_without_gpu(tmp_path: Path) -> None:
    code, outcomes = run_checks(tmp_path / "results.jsonl")
    assert code == 0 and len(outcomes) == 14
    assert {(each["result"], each["seconds"]) for each in outcomes.values()} == {("absent", 0.0)}
    assert all("GPU" in each["why"] for each in outcomes.values())
    assert "tensorrt_llm" in outcomes["interfaces of TensorRT-LLM"]["why"]


def test_timed_out_check_reports_its_output(
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
@pytest.mark.timeout(900)
def test_checks_pass_on_cpu_and_passed_checks_are_not_rerun(tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    code, outcomes = run_checks(output, ALIGNER_DEVICE="cpu")
    assert code == 0, outcomes
    results = {name: each["result"] for name, each in outcomes.items()}
    assert [*results.values()].count("pass") == 10 and "fail" not in results.values()
    assert outcomes["speed: decode"]["figures"][0]["tokens_per_s"] > 0  # type: ignore[index]
    before = output.read_text()
    run_checks(output, ALIGNER_DEVICE="cpu")
    again = [
        json.loads(line)["name"] for line in output.read_text().removeprefix(before).splitlines()
    ]
    assert again == [name for name, result in results.items() if result == "absent"], (
        "what has passed is not run again"
    )


@pytest.mark.parametrize("model", ["tiny", "llama_3m"])
def test_step_flops_equal_torch_flop_counter(model: str) -> None:
    """torch counts all attention scores; `step_flops` counts only the causal half."""
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
