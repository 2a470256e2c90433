"""The command `aligner generate`: output compared with transformers, repeatability, and errors."""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aligner import cli
from aligner.agents import generate
from aligner.data.examples import open_demonstrations
from aligner.data.export import export, find_source
from aligner.data.model_directory import read_shape
from aligner.data.records import Record
from aligner.data.tokenizer import Tokenizer, build_character_tokenizer
from aligner.engines.build import build_engine
from aligner.schema import Config, DataConfig, EngineConfig, RunConfig
from aligner.training.run_checkpoints import RunCheckpoints, TrainingState
from tests.agents.calling_model import saved
from tests.agents.openai_agents import TOOLS
from tests.megatron import checkpoint_jobs, families

PROMPTS = [
    {"prompt": "hello", "answer": 42},
    {"prompt": "a b"},
    {"prompt": "2+2=", "answer": "4", "tags": ["sum"]},
]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A function that saves a family's model with a tokenizer, once per family.

    The tensor names of a family that ends in `-bare` lack the prefix `transformer.`.
    """

    def make(family: str) -> Path:
        directory = families.save(family.removesuffix("-bare"), tmp_path_factory.mktemp(family))
        build_character_tokenizer(read_shape(directory)).save(str(directory / "tokenizer.json"))
        if family.endswith("-bare"):
            file = directory / "model.safetensors"
            save_file(
                {
                    name.removeprefix("transformer."): tensor
                    for name, tensor in load_file(file).items()
                },
                file,
            )
        return directory

    return functools.cache(make)


@pytest.fixture
def prompts(tmp_path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return file


@pytest.fixture
def aligner_generate(tmp_path, capsys):
    """A function that runs the command in this process; it returns exit code, stdout, stderr."""
    before = signal.getsignal(signal.SIGTERM)

    def run(*arguments: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["generate", *map(str, arguments)])
        out, error = capsys.readouterr()
        return ended.value.code, out, error

    yield run
    signal.signal(signal.SIGTERM, before)


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@torch.no_grad()
def greedily(
    directory: Path, text: str, count: int, stop: int | None = None
) -> tuple[list[int], list[float]]:
    """Return greedy tokens and their log-probs, from full forward passes of transformers."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokens, logprobs = Tokenizer(directory).encode(text)[None], []
    prompt = tokens.shape[1]
    while len(logprobs) < count and (not logprobs or tokens[0, -1] != stop):
        scores = network(tokens).logits[0, -1].log_softmax(-1)
        logprobs.append(float(scores.max()))
        tokens = torch.cat((tokens, scores.argmax().view(1, 1)), 1)
    return tokens[0, prompt:].tolist(), logprobs


def assert_transformers_wrote(found: list[dict[str, Any]], directory: Path, count: int) -> None:
    for record, prompt in zip(found, PROMPTS, strict=True):
        tokens, logprobs = greedily(directory, prompt["prompt"], count)
        assert record["tokens"] == tokens
        assert record["logprobs"] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("family", ["llama3", "gpt2-bare", "pythia"])
def test_greedy_output_of_directory_equals_transformers(
    model, prompts, tmp_path, aligner_generate, family
):
    output = tmp_path / "out.jsonl"
    arguments = (
        "--prompts",
        prompts,
        "--output",
        output,
        "--max-new-tokens",
        9,
        "--greedy",
        "--no-stop-at-eos",
    )
    code, out, error = aligner_generate(model(family), *arguments)
    assert (code, out) == (0, f"{output}\n")
    assert error.startswith("3 samples, 27 tokens at ")
    found = records(output)
    directory = model(family.removesuffix("-bare"))
    assert_transformers_wrote(found, directory, 9)
    for place, (record, prompt) in enumerate(zip(found, PROMPTS, strict=True)):
        assert record["prompt"] == prompt["prompt"]
        assert record["response"] == Tokenizer(directory).decode(record["tokens"])
        assert (record["prompt_index"], record["sample_index"], record["finish_reason"]) == (
            place,
            0,
            "length",
        )
        assert record["weight_version"] == 0
        assert record["metadata"] == {
            key: value for key, value in prompt.items() if key != "prompt"
        }


@pytest.mark.parametrize(
    ("family", "lora"), [("llama3", {}), ("pythia", {"rank": 4, "alpha": 6.0})]
)
def test_output_of_last_checkpoint_equals_its_export(
    pool, model, prompts, tmp_path, aligner_generate, family, lora
):
    run, options = (
        tmp_path / "run",
        (
            "--prompts",
            prompts,
            "--max-new-tokens",
            9,
            "--greedy",
            "--no-stop-at-eos",
        ),
    )
    settings = {"parallel": {"tensor": 2}, "lora": lora, "optimizer": {"learning_rate": 0.02}}
    step = run / "checkpoints" / "step_7"
    pool.run(checkpoint_jobs.save, 2, str(model(family)), settings, str(step / "policy"), 3)
    RunCheckpoints(Config(run=RunConfig(dir=str(run)))).commit(TrainingState(7, 0.0, 0, 0))
    export(find_source(run), tmp_path / "export")
    outputs = []
    for number, source in enumerate((run, step, step / "policy")):
        outputs.append(tmp_path / f"{number}.jsonl")
        assert aligner_generate(source, *options, "--output", outputs[-1])[0] == 0
    found = records(outputs[0])
    assert {record["weight_version"] for record in found} == {7}
    assert_transformers_wrote(found, tmp_path / "export", 9)
    assert len({output.read_bytes() for output in outputs}) == 1
    untrained = [greedily(model(family), prompt["prompt"], 1)[1][0] for prompt in PROMPTS]
    assert (
        max(
            abs(record["logprobs"][0] - logprob)
            for record, logprob in zip(found, untrained, strict=True)
        )
        > 0.01
    )


def test_episodes_above_min_score_are_read_as_demonstrations(
    model, prompts, tmp_path, aligner_generate
):
    directory, tokenizer = model("llama3"), Tokenizer(model("llama3"))
    teller = (
        "environment.target=tests.agents.teller:Teller",
        "+environment.arguments.turns=2",
        'environment.turn_end="]"',
    )
    options = ("--prompts", prompts, "--samples", 32, "--max-new-tokens", 40, "--batch-size", 96)
    outputs = [tmp_path / name for name in ("all.jsonl", "good.jsonl", "said.jsonl")]
    for output, more in zip(
        outputs, ((), ("--min-score", 3), ("--min-score", 3, "--as-messages")), strict=True
    ):
        code, _, error = aligner_generate(directory, *options, "--output", output, *more, *teller)
        assert code == 0 and "mean score" in error and "; episodes that failed: 0" in error
    every, good, conversations = map(records, outputs)
    better = [record["tokens"] for record in every if record["score"] >= 3]
    assert (
        len(every) == 96 and [record["tokens"] for record in good] == better and 0 < len(good) < 96
    )
    # A turn that consists only of the end token has no text, so the record has fewer turns.
    pairs = [pair for pair in zip(good, conversations, strict=True) if len(pair[0]["turns"]) == 4]
    assert pairs
    for record, conversation in pairs:
        assert [who for turn in record["turns"] for who in turn] == ["environment", "policy"] * 2
        texts = [text for turn in record["turns"] for text in turn.values()]
        assert texts[::2] == ["s", "n1;"] and record["response"] == "".join(texts)
        assert [logprob == 0 for logprob in record["logprobs"]] == [
            mark == 0 for mark in record["drawn"]
        ]
        assert conversation["messages"] == [
            {"role": role, "content": text}
            for role, text in zip(
                ("user", "assistant") * 2, (record["prompt"] + "s", *texts[1:]), strict=True
            )
        ]
    data = DataConfig(
        path=str(outputs[1]), shuffle=False, max_prompt_tokens=40, max_response_tokens=40
    )
    for record, found in zip(
        good, open_demonstrations(data, tokenizer, 1).take(0, len(good)), strict=True
    ):
        assert found.tokens.tolist() == record["prompt_tokens"] + record["tokens"]
        assert (
            found.response_mask is not None
            and found.response_mask[found.prompt_length :].int().tolist() == record["drawn"]
        )


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> Path:
    """A model that calls a tool, which the agents of `openai_agents` have."""
    return saved(tmp_path_factory.mktemp("chat"), "qwen")


@pytest.fixture
def tasks(tmp_path) -> Path:
    file = tmp_path / "tasks.jsonl"
    log = str(tmp_path / "log")
    lines = [{"prompt": "task", "at": at, "asked": f"why {at}?", "log": log} for at in range(2)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_episodes_of_agent_have_the_tokens_of_its_answers(
    chat_model, tasks, tmp_path, aligner_generate
):
    output = tmp_path / "out.jsonl"
    options = ("--prompts", tasks, "--samples", 2, "--max-new-tokens", 100, "--output", output)
    agent = "environment.agent=tests.agents.openai_agents:looks"
    code, _, error = aligner_generate(chat_model, *options, agent)
    assert code == 0 and "mean score 0.5; episodes that failed: 0" in error
    found = records(output)
    main = {(record["prompt_index"], record["sample_index"]): record for record in found}
    assert len(main) == 4 and {record["score"] for record in found} == {0.5}
    tokenizer = Tokenizer(chat_model)
    for (prompt_index, _), record in main.items():
        # The agent's own request is the prompt, not the text of the record.
        assert record["prompt"] == tokenizer.decode(
            record["prompt_tokens"], skip_special_tokens=False
        )
        assert f"why {prompt_index}?" in record["prompt"]
        assert record["metadata"]["asked"] == f"why {prompt_index}?"
        assert [mark == 0 for mark in record["drawn"]] == [
            logprob == 0 for logprob in record["logprobs"]
        ]
    # Each of the three answers of an episode is generated in exactly one of its lines.
    answers = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    logged = sorted(round(value, 4) for answer in answers for value in answer["logprobs"])
    written = sorted(
        round(value, 4)
        for record in found
        for value, mark in zip(record["logprobs"], record["drawn"], strict=True)
        if mark
    )
    assert len(answers) == 12 and written == logged


def test_ignored_parameter_of_agent_names_the_option(
    chat_model, tasks, tmp_path, aligner_generate, caplog
):
    options = ("--prompts", tasks, "--max-new-tokens", 100, "--output", tmp_path / "out.jsonl")
    agent = "environment.agent=tests.agents.openai_agents:looks"
    assert aligner_generate(chat_model, *options, agent)[0] == 0
    warning = "agent requests set temperature, which is ignored; set --temperature instead"
    assert warning in caplog.text


@pytest.mark.parametrize("options", [(), ("--as-messages",)])
def test_episodes_of_agent_have_failures_and_metrics(
    chat_model, tasks, tmp_path, aligner_generate, options
):
    output = tmp_path / "out.jsonl"
    lines = [
        json.loads(line) | {"turn_reward": 0.5, fails: [1]}
        for line, fails in zip(
            tasks.read_text().splitlines(), ("failed_attempts", "lost_attempts"), strict=True
        )
    ]
    tasks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ("--prompts", tasks, "--max-new-tokens", 100, "--output", output, *options)
    agent = "environment.agent=tests.agents.crediting_agents:reports"
    assert aligner_generate(chat_model, *arguments, agent)[0] == 0
    names = ("score", "failure", "retries", "metrics")
    assert [[record[name] for name in names] for record in records(output)] == [
        [0.5, "error", [], {"attempts": 1.0, "only/1": 1.5}],
        [0.5, None, ["infrastructure"], {"attempts": 2.0, "only/2": 1.5}],
    ]


def test_episodes_of_agent_are_written_as_its_messages(
    chat_model, tasks, tmp_path, aligner_generate
):
    output = tmp_path / "out.jsonl"
    options = ("--prompts", tasks, "--max-new-tokens", 100, "--output", output, "--as-messages")
    command = f"environment.agent_command=[{sys.executable},-m,tests.agents.openai_agents]"
    assert aligner_generate(chat_model, *options, command)[0] == 0
    found = records(output)
    assert {record["prompt_index"] for record in found} == {0, 1}
    for record in found:
        roles = [message["role"] for message in record["messages"]]
        assert (roles[0], roles[-1]) == ("user", "assistant") and record["tools"] == TOOLS
        assert record["messages"][0]["content"] == f"why {record['prompt_index']}?"
    calls = [
        message for record in found for message in record["messages"] if "tool_calls" in message
    ]
    assert calls and calls[0]["tool_calls"][0]["function"]["name"] == "look"
    data = DataConfig(
        path=str(output), shuffle=False, max_prompt_tokens=400, max_response_tokens=400
    )
    assert open_demonstrations(data, Tokenizer(chat_model), 1).take(0, len(found))


def test_text_completions_of_agent_are_written_as_messages(chat_model, tmp_path, aligner_generate):
    tasks, output = tmp_path / "tasks.jsonl", tmp_path / "out.jsonl"
    task = {"prompt": "task", "requests": ["1+1="], "with": {"max_tokens": 3}}
    tasks.write_text(json.dumps(task))
    options = ("--prompts", tasks, "--max-new-tokens", 100, "--output", output, "--as-messages")
    agent = "environment.agent=tests.agents.openai_agents:steps"
    assert aligner_generate(chat_model, *options, agent)[0] == 0
    (record,) = records(output)
    assert [message["role"] for message in record["messages"]] == ["user", "assistant"]
    assert record["messages"][0]["content"] == "1+1="


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["engine.exact=true"],
            "engine.exact: is not supported by `aligner generate`; allowed: environment.KEY=VALUE",
        ),
        (["--min-score", "1"], "--min-score and --as-messages: require an environment or an agent"),
        (["environment.max_turns=2"], "environment.max_turns=2"),
        (
            ["environment.agent=tests.agents.openai_agents"],
            "environment.agent=tests.agents.openai_agents: must be module:function, or null",
        ),
        (
            ["environment.agent=tests.agents.openai_agents:absent"],
            "module 'tests.agents.openai_agents' has no attribute 'absent'",
        ),
        (["environment.agent=a:b", "environment.target=a:B"], "only one of these keys can be set"),
        (["environment.agent=a:b", "--chat"], "--chat: is not supported with an agent"),
        (["environment.agent=a:b", "--no-stop-at-eos"], "no token would end a turn"),
        (
            ["environment.target=tests.agents.teller:Nobody"],
            "environment.target: module 'tests.agents.teller' has no attribute 'Nobody'",
        ),
    ],
)
def test_invalid_environment_settings_exit_2(
    model, prompts, tmp_path, aligner_generate, arguments, message
):
    output = tmp_path / "out.jsonl"
    options = ("--prompts", prompts, "--output", output, "--max-new-tokens", 9)
    code, _, error = aligner_generate(model("llama3"), *options, *arguments)
    assert code == 2 and message in error and not output.exists()


def test_samples_are_ordered_and_do_not_depend_on_batch(model, prompts, tmp_path, aligner_generate):
    def run(name: str, *more: Any) -> list[dict[str, Any]]:
        options = ("--samples", 4, "--max-new-tokens", 12, "--output", tmp_path / name)
        assert aligner_generate(model("llama3"), "--prompts", prompts, *options, *more)[0] == 0
        return records(tmp_path / name)

    found = run("first")
    assert [(record["prompt_index"], record["sample_index"]) for record in found] == [
        (p, s) for p in range(3) for s in range(4)
    ]
    # Some end early, and are complete before earlier samples.
    assert {len(record["tokens"]) for record in found} > {12}
    assert all(
        (record["tokens"][-1] == 1) == (record["finish_reason"] == "stop") for record in found
    )
    for start in (0, 4, 8):
        assert len({tuple(record["tokens"]) for record in found[start : start + 4]}) == 4
    run("second")
    assert (tmp_path / "second").read_bytes() == (tmp_path / "first").read_bytes()
    assert [record["tokens"] for record in run("small", "--batch-size", 2)] == [
        record["tokens"] for record in found
    ]
    assert [record["tokens"] for record in run("other", "--seed", 2)] != [
        record["tokens"] for record in found
    ]


def test_response_ends_with_the_token_that_completes_a_stop_string(
    model, prompts, tmp_path, aligner_generate
):
    def run(name, *more):
        options = ("--max-new-tokens", 12, "--greedy", "--output", tmp_path / name)
        assert aligner_generate(model("llama3"), "--prompts", prompts, *options, *more)[0] == 0
        return [record["response"] for record in records(tmp_path / name)]

    whole = run("whole")
    stop = whole[1][4:7]
    assert run("stopped", "--stop", "absent", f"--stop={stop}") == [
        text[: text.index(stop) + len(stop)] if stop in text else text for text in whole
    ]


def test_every_sampling_option_reaches_the_engine(model, prompts, tmp_path, aligner_generate):
    common = ("--prompts", prompts, "--samples", 5, "--max-new-tokens", 12)
    expected = [
        greedily(model("llama3"), prompt["prompt"], 12, stop=1)[0]
        for prompt in PROMPTS
        for _ in range(5)
    ]
    for name, option in enumerate(
        (("--top-k", 1), ("--top-p", 1e-6), ("--min-p", 1.0), ("--temperature", 1e-3))
    ):
        output = tmp_path / str(name)
        assert aligner_generate(model("llama3"), *common, *option, "--output", output)[0] == 0
        assert [record["tokens"] for record in records(output)] == expected
    output = tmp_path / "long"
    assert (
        aligner_generate(model("llama3"), *common, "--min-new-tokens", 12, "--output", output)[0]
        == 0
    )
    assert all(
        1 not in record["tokens"][:11] and len(record["tokens"]) == 12 for record in records(output)
    )


def test_prompts_are_read_from_stdin_and_output_overwritten(
    model, tmp_path, aligner_generate, monkeypatch
):
    output = tmp_path / "out.jsonl"
    options = ("--prompts", "-", "--output", output, "--max-new-tokens", 2)
    for more, text in (
        ((), "one\ntwo\r\n"),
        (("--overwrite", "--prompts-format", "jsonl"), '{"prompt": "three"}'),
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert aligner_generate(model("llama3"), *options, *more)[0] == 0
    assert [record["prompt"] for record in records(output)] == ["three"]


def save_critic(source: Path, directory: str) -> None:
    """Save a value model: the source's trunk with a scalar head."""
    shutil.copytree(source, directory)
    file = Path(directory, "config.json")
    config = json.loads(file.read_text())
    file.write_text(
        json.dumps(config | {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1})
    )
    weights = load_file(Path(directory, "model.safetensors"))
    save_file(weights | {"score.weight": torch.ones(1, 64)}, Path(directory, "model.safetensors"))


@pytest.mark.parametrize(
    ("source", "content", "options", "told"),
    [
        ("absent", "hi\n", (), "absent: no such directory"),
        ("empty", "hi\n", (), "expected a run directory"),
        (
            "critic",
            "hi\n",
            (),
            "SOURCE=critic: is a value or reward model, which does not generate text",
        ),
        (
            "without tokenizer",
            "hi\n",
            (),
            "tokenizer.json, or vocab.json with merges.txt, is missing; generation requires",
        ),
        ("damaged config", "hi\n", (), "SOURCE=damaged config: config.json is not valid JSON"),
        ("damaged tokenizer", "hi\n", (), "tokenizer.json: not a valid tokenizer file: "),
        ("model", None, (), "cannot be read: "),
        ("model", "", (), "the file is empty"),
        ("model", "hi\n\nho\n", (), "prompts.txt:2: field `prompt` is empty"),
        (
            "model",
            "hi\nÿ~€\n",
            (),
            "prompts.txt:2: 'ÿ~€' cannot be tokenized: the vocabulary lacks",
        ),
        (
            "model",
            f"hi\n{'x' * 57}\n",
            (),
            "prompts.txt:2: the prompt has 57 tokens, allowed: 1 to 56, the model's 64 positions",
        ),
        ("model", "hi\n{}\n", ("--prompts-format", "jsonl"), "prompts.txt:1: not valid JSON"),
        (
            "model",
            '{"text": "hi"}\n',
            ("--prompts-format", "jsonl"),
            "prompts.txt:1: record lacks field `prompt` (a string); fields of the record: text",
        ),
        (
            "model",
            '{"prompt": "a"}\n{"prompt": "b \\ud83d"}\n',
            ("--prompts-format", "jsonl"),
            "prompts.txt:2: 'b \\ud83d' cannot be tokenized: it is not valid UTF-8",
        ),
        (
            "model",
            "hi\n",
            ("--max-new-tokens", 64),
            "max_new_tokens=64: must be less than the model's 64 positions, which include the prompt",
        ),
        (
            "model",
            "hi\n",
            ("--max-new-tokens", 0),
            "--max-new-tokens: 0: must be an integer >= 1",
        ),
        (
            "model",
            "hi\n",
            ("--samples", "two"),
            "--samples: two: must be an integer >= 1",
        ),
        (
            "model",
            "hi\n",
            ("--min-new-tokens", 9),
            "min_new_tokens=9: must be between 0 and max_new_tokens=8",
        ),
        ("model", "hi\n", ("--temperature", 0), "temperature=0.0: must be above 0"),
        ("model", "hi\n", ("--top-k", -1), "top_k=-1: must be at least 0"),
        ("model", "hi\n", ("--top-p", 1.5), "top_p=1.5: must be above 0 and at most 1"),
        (
            "model",
            "hi\n",
            ("--greedy", "--samples", 2),
            "2 samples per prompt with greedy decoding would be identical",
        ),
        ("model", "hi\n", ("--output", "taken.jsonl"), "taken.jsonl: already exists"),
        ("model", "hi\n", ("--output", "taken", "--overwrite"), "taken: is a directory"),
        (
            "model",
            "hi\n",
            ("--output", "absent/out.jsonl"),
            "out.jsonl: cannot be written: No such file or directory",
        ),
        (
            "model",
            "hi\n",
            ("--engine", "tensorrt_llm", "--precision", "fp32"),
            "fp32: must be auto or bf16 with engine.kind=tensorrt_llm, which computes in bf16",
        ),
        ("model", "hi\n", ("--samplse", 2), "unknown option --samplse"),
    ],
)
def test_invalid_arguments_exit_2_without_output(
    model, tmp_path, aligner_generate, monkeypatch, source, content, options, told
):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("taken").mkdir()
    Path("taken.jsonl").write_text("kept")
    if source == "without tokenizer":
        shutil.copytree(model("llama3"), source)
        Path(source, "tokenizer.json").unlink()
    if source.startswith("damaged"):
        shutil.copytree(model("llama3"), source)
        Path(source, f"{source.removeprefix('damaged ')}.json").write_text("{")
    if source == "critic":
        save_critic(model("llama3"), source)
    if content is not None:
        Path("prompts.txt").write_text(content)
    before = sorted(tmp_path.rglob("*"))
    path = model("llama3") if source == "model" else source
    arguments = (
        "--prompts",
        "prompts.txt",
        "--output",
        "out.jsonl",
        "--max-new-tokens",
        8,
        *options,
    )
    code, out, error = aligner_generate(path, *arguments)
    assert (code, out) == (2, "")
    assert told in error and "Traceback" not in error
    assert sorted(tmp_path.rglob("*")) == before
    assert Path("taken.jsonl").read_text() == "kept"


def test_failed_generation_keeps_existing_output(model, tmp_path):
    source, output = find_source(model("llama3")), tmp_path / "out.jsonl"
    output.write_text("kept")
    job = generate.plan_job(
        source,
        [Record({"prompt": "hi"}, "here")],
        samples=3,
        seed=1,
        stop_at_eos=False,
        max_new_tokens=4,
        temperature=1.0,
    )

    def fail(done: generate.Progress) -> None:
        assert len(list(tmp_path.iterdir())) == 2
        raise RuntimeError("on its way")

    with pytest.raises(RuntimeError, match="on its way"):
        generate.generate(job, EngineConfig(), output, overwrite=True, progress=fail)
    assert output.read_text() == "kept" and list(tmp_path.iterdir()) == [output]


def test_incomplete_weights_leave_engine_without_version(model, tmp_path):
    shutil.copytree(model("llama3"), tmp_path / "model")
    source = find_source(tmp_path / "model")
    engine = build_engine(
        read_shape(tmp_path / "model"), EngineConfig(update="in_place"), tmp_path / "model", seed=1
    )
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.3.mlp.down_proj.weight"]
    save_file(weights, file)
    with pytest.raises(Exception, match=r"model\.layers\.3\.mlp\.down_proj\.weight"):
        generate.load_weights(engine, source)
    assert engine.version is None
    engine.begin_update(version=0).abort()  # the failed update is closed


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_interrupted_command_exits_130_without_output(model, tmp_path, number):
    command = [
        sys.executable,
        "-m",
        "aligner",
        "generate",
        str(model("llama3")),
        "--prompts",
        "-",
        "--output",
        "out.jsonl",
    ]
    command += [
        "--samples",
        "5000",
        "--max-new-tokens",
        "60",
        "--no-stop-at-eos",
        "--batch-size",
        "4",
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes) as process:
        try:
            process.stdin.write("hi")
            process.stdin.close()
            deadline = time.monotonic() + 60
            # The command writes samples as they complete.
            while not any(file.stat().st_size for file in tmp_path.iterdir()):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(number)
            error = process.stderr.read()
            assert process.wait(30) == 130
        finally:
            process.kill()
    assert error == "aligner: error: interrupted; out.jsonl was not written\n"
    assert list(tmp_path.iterdir()) == []
