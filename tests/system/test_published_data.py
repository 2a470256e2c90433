"""Published data sets go from their file to the first step with the keys of model, algorithm, data
and reward alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from aligner.config.compose import compose_config, load_config
from aligner.data.data_statistics import measure_data
from aligner.data.examples import Demonstration, Preference, open_run_data
from aligner.data.tokenizer import build_run_tokenizer
from aligner.schema import Config
from benchmarks.data_files import CHAT_TEMPLATE
from benchmarks.runs import python_path
from tests.byte_model import write_byte_model
from tests.data.published_data import ALPACA, DAPO, GSM8K, write_published_data

_LAUNCH_S = 500


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the data sets, and a small model with and without a chat template."""
    place = tmp_path_factory.mktemp("published")
    write_published_data(place)
    write_byte_model(place / "base", None)
    write_byte_model(place / "chat", CHAT_TEMPLATE)
    return place


def launch_to_first_step(place: Path, work: Path, *keys: str) -> tuple[Path, str]:
    """Launch a run in an empty directory, and stop it after its first step.

    Returns:
        The run directory, and the output of the launch.
    """
    for entry in place.iterdir():
        (work / entry.name).symlink_to(entry)
    environment = {**os.environ, "PYTHONPATH": python_path(), "COLUMNS": "200"}
    output = work / "output.txt"
    with output.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "aligner", "launch", *keys],
            cwd=work,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    deadline = time.monotonic() + _LAUNCH_S
    try:
        while process.poll() is None and not _find_first_step(work):
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.2)
    finally:
        process.terminate()
        process.wait(60)
    metrics = _find_first_step(work)
    assert metrics is not None, output.read_text()
    return metrics.parent, output.read_text()


def _find_first_step(work: Path) -> Path | None:
    """Return the metrics file of a run that has completed a step."""
    files = work.glob("runs/*/metrics.jsonl")
    return next((file for file in files if '"step": 1' in file.read_text()), None)


def _read_sampled_prompts(run: Path) -> set[str]:
    lines = (run / "samples.jsonl").read_text().splitlines()
    return {json.loads(line)["prompt"] for line in lines}


def _render(*turns: str) -> str:
    """Return a conversation as the chat template renders it, up to the next turn's role."""
    roles = ("user", "assistant")
    text = "".join(
        f"<|im_start|>{roles[index % 2]}\n{turn}<|im_end|>\n" for index, turn in enumerate(turns)
    )
    return f"{text}<|im_start|>assistant\n"


def _list_trained_texts(config: Config) -> set[tuple[str, ...]]:
    """Return the prompt and the response, or the two responses, of each record of a run."""
    directory = Path(config.model.path or "")
    byte_tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer = build_run_tokenizer(config, directory)
    examples = open_run_data(config, tokenizer).examples
    texts = set()
    for example in examples.take(0, len(examples)):
        answers = (
            (example.chosen, example.rejected) if isinstance(example, Preference) else (example,)
        )
        assert all(isinstance(answer, Demonstration) for answer in answers)
        length = answers[0].prompt_length
        parts = [answers[0].tokens[:length], *(answer.tokens[length:] for answer in answers)]
        texts.add(
            tuple(byte_tokenizer.decode(part.tolist(), skip_special_tokens=False) for part in parts)
        )
    return texts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "prompts", "printed"),
    [
        (
            ["model.path=base", "data.path=gsm8k.parquet", "reward.function=gsm8k"],
            {record["question"] for record in GSM8K},
            "data.fields={prompt: question}",
        ),
        (
            ["model.path=chat", "data.path=dapo-math-17k.parquet", "reward.function=math"],
            {_render(record["prompt"][0]["content"]) for record in DAPO},
            "data.format=verl",
        ),
    ],
    ids=["gsm8k", "dapo_math_17k"],
)
def test_published_prompts_reach_the_first_step(
    place: Path, tmp_path: Path, keys: list[str], prompts: set[str], printed: str
) -> None:
    run, output = launch_to_first_step(place, tmp_path, "algorithm=grpo", *keys)
    assert printed in output
    assert _read_sampled_prompts(run) == prompts


EGG = ("How do I boil an egg?", "In water. How soft do you like it?", "Very soft.")
EGG_ANSWERS = ("Boil it for four minutes.", "Eggs come from hens.")
EGG_DIALOGUE = (
    f"\n\nHuman: {EGG[0]}\n\nAssistant: {EGG[1]}\n\nHuman: {EGG[2]}\n\nAssistant:",
    *(f" {answer}<|im_end|>" for answer in EGG_ANSWERS),
)
EGG_CHAT = (_render(*EGG), *(f"{answer}<|im_end|>" for answer in EGG_ANSWERS))
RIVER = (
    _render("Name a river in Egypt."),
    "The Nile is a river in Egypt.<|im_end|>",
    "I like rivers.<|im_end|>",
)
BANANA = (f"{ALPACA[1]['instruction']}\n\n{ALPACA[1]['input']}", "Yellow<|im_end|>")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "algorithm", "data", "texts", "printed"),
    [
        ("chat", "dpo", "ultrafeedback.parquet", RIVER, "data.format=ultrafeedback"),
        ("chat", "reward_model", "ultrafeedback.parquet", RIVER, "data.format=ultrafeedback"),
        ("base", "dpo", "hh_rlhf.jsonl.gz", EGG_DIALOGUE, "has no chat template, so they remain"),
        ("chat", "reward_model", "hh_rlhf.jsonl.gz", EGG_CHAT, "data.format=hh_rlhf\n"),
        ("base", "sft", "alpaca_data.json", BANANA, "response: output}"),
    ],
)
def test_published_responses_reach_the_first_step(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    algorithm: str,
    data: str,
    texts: tuple[str, ...],
    printed: str,
) -> None:
    run, output = launch_to_first_step(
        place, tmp_path, f"model.path={model}", f"algorithm={algorithm}", f"data.path={data}"
    )
    assert output.count(printed) == 1
    monkeypatch.chdir(tmp_path)
    trained_texts = _list_trained_texts(load_config(run / "config.yaml"))
    assert texts in trained_texts and len(trained_texts) == 2


@pytest.mark.parametrize(
    ("keys", "layout", "fields"),
    [
        (
            ["algorithm=grpo", "data.path=gsm8k.jsonl", "reward.function=gsm8k"],
            "",
            {"prompt": "question"},
        ),
        (
            ["algorithm=sft", "data.path=alpaca.parquet"],
            "",
            {"prompt": "{instruction}\n\n{input?}", "response": "output"},
        ),
        (["algorithm=sft", "data.path=alpaca.parquet", "data.format=alpaca"], "", {}),
        (
            [
                *("algorithm=grpo", "data.path=dapo-math-17k.parquet", "data.format=verl"),
                "reward.function=math",
            ],
            "",
            {},
        ),
        (["algorithm=dpo", "data.path=hh_rlhf.jsonl.gz"], "hh_rlhf", {}),
    ],
)
def test_form_of_published_data_is_chosen(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    keys: list[str],
    layout: str,
    fields: dict[str, str],
) -> None:
    monkeypatch.chdir(place)
    found = measure_data(compose_config(["experiment=tiny_ppo", *keys]), place / "chat")
    assert found is not None and found.longest_answer > 0
    assert (found.layout, dict(found.fields)) == (layout, fields)
