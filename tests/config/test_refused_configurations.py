"""Typical user mistakes: `launch` refuses them with the key and a fix, and creates no files.

To add a case, append to `WRONG`: the overrides after `aligner launch experiment=tiny_ppo`, and
the parts that the error must contain. The working directory contains the files of the fixture
`place`, and the experiments of `_EXPERIMENTS` in `mine/experiment`.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aligner.cli import main
from tests.config.test_command_line import aligner, error_in, expect_launch_error

WRONG: tuple[tuple[str, ...], ...] = (
    # Unknown keys and group options.
    ("run.step=3", "run.step: unknown key; did you mean run.steps?"),
    ("learning_rate=1", "learning_rate: unknown key", "critic.optimizer.learning_rate?"),
    (
        "+run.color=red",
        (
            "run.color: unknown key; allowed in run: automatic, changes, chosen, command, date,"
            " dir, end_at"
        ),
    ),
    ("algorithm=grop", "algorithm=grop: no such algorithm; did you mean algorithm=grpo?", "rloo"),
    (
        "experiment=tiny_pop",
        "experiment=tiny_pop",
        "did you mean experiment=tiny_ppo?",
        "arithmetic",
    ),
    ("tiny_ppo", "tiny_ppo: expected an override key=value; did you mean experiment=tiny_ppo?"),
    ("~run.steps", "~run.steps: keys cannot be deleted; set another value"),
    # Values of a wrong type, or with invalid Hydra syntax.
    ("run.steps=ten", "run.steps=ten: expected int"),
    ("run.steps=null", "run.steps=null: expected int"),
    ("run.dir=???", "run.dir=???: requires a value; set run.dir=VALUE"),
    ("run.steps=1,2", "run.steps=1,2: expected one value", "run.steps=[a,b]"),
    ("data.prompts=hello", "data.prompts=hello: expected list[str]", "write data.prompts=[hello]"),
    ("actor.parallel=2", "actor.parallel=2: is a section", "actor.parallel.tensor="),
    ("model.config=tiny", "model.config=tiny: expected a mapping", "+model.config.NAME=VALUE"),
    ("data.prompts=[a,b", "data.prompts=[a,b", "quote values that contain special characters"),
    ("run.name=${nope}", "run.name: Interpolation key 'nope' not found", "\\${"),
    # Bounds and choices.
    ("run.steps=0", "run.steps=0: must be at least 1"),
    ("run.date=tomorrow", "run.date=tomorrow: expected a date such as 2026-11-23"),
    (
        "run.steps=999999999999999999999999",
        "run.steps=999999999999999999999999: must be at most 1000000000",
    ),
    ("algorithm.clip_low=2", "algorithm.clip_low=2.0: must be at most 1"),
    (
        "engine=tensorrt_llm engine.tensorrt_llm.free_memory_fraction=1.5",
        "free_memory_fraction=1.5: must be at most 1",
    ),
    (
        "engine=tensorrt_llm engine.tensorrt_llm.free_memory_fraction=0",
        "free_memory_fraction=0.0: must be at least 0.01",
    ),
    ("engine.kind=sglang", "engine.kind=sglang: allowed: embedded, tensorrt_llm, vllm"),
    ("run.name=a/b", "run.name=a/b: must consist of letters, digits"),
    # Incompatible layouts and sizes.
    (
        "actor.parallel.pipeline=5",
        "actor.parallel.pipeline=5",
        "must be at most the model's 4 layers",
    ),
    (
        "actor.parallel.pipeline=2 actor.parallel.stage_layers=[5]",
        "actor.parallel.stage_layers=[5]",
        "must have 2 numbers, for 2 stages",
    ),
    (
        "actor.parallel.tensor=3",
        "actor.parallel.tensor=3",
        "must divide the model's 4 attention heads",
    ),
    ("actor.parallel.sequence=true", "actor.parallel.sequence=true", "tensor"),
    (
        "actor.parallel.data=2 engine.parallel.data=1",
        (
            "engine.parallel: tensor=1 x data=1 is 1 ranks, but a colocated engine must use all 2"
            " ranks"
        ),
        "tensor x data can be 1x2 or 2x1",
    ),
    ("rollout.micro_batches=3", "rollout.prompts_per_step=16", "rollout.micro_batches=3"),
    (
        "actor.micro_batch_tokens=10",
        "actor.micro_batch_tokens=10: must be at least 32",
        "to hold the longest",
    ),
    (
        "server.max_sequence_length=31",
        "server.max_sequence_length=31: must be at least 32, the longest sequence",
        "set a larger value or null",
    ),
    (
        "server.max_request_tokens=1000 server.max_batch_size=8",
        (
            "server.max_request_tokens=1000: too small for a request for a critic update with 32"
            " sequences of up to 32 tokens"
        ),
        "set 1024 or more, or increase algorithm.minibatches",
    ),
    (
        "server.max_request_tokens=1000",
        "a request for scores or values of 32 sequences",
        "or reduce server.max_batch_size",
    ),
    (
        "server.max_request_tokens=100 engine.placement=server rollout.prompts_per_step=32",
        "a request to generate from 16 sequences of up to 16 tokens",
        "set 256 or more, or increase rollout.micro_batches",
    ),
    (
        (
            "server.max_request_tokens=2000 engine.placement=server evaluation.every=1"
            " evaluation.path=a.txt evaluation.count=200"
        ),
        "a request to generate for an evaluation from 200 sequences of up to 16 tokens",
        "set 3200 or more, or reduce evaluation.count",
    ),
    (
        (
            "server.max_request_tokens=2000 evaluation.every=1 evaluation.path=a.txt"
            " evaluation.samples=70"
        ),
        "a request for evaluation scores of 256 sequences of up to 32 tokens",
        "or reduce server.max_batch_size",
    ),
    (
        "reward.kind=model reward.path=short",
        "reward.path=short: the model has 31 positions, but the longest sequence has 32 tokens",
    ),
    (
        "reward.kind=model reward.path=narrow",
        (
            "reward.path=narrow: the model has 32 tokens in its vocabulary, but the policy"
            " generates 64; set a model"
        ),
    ),
    ("critic.path=nowhere", "critic.path=nowhere: no such model directory"),
    (
        "critic.path=narrow",
        (
            "critic.path=narrow: the model has 32 tokens in its vocabulary, but the policy"
            " generates 64; set a model"
        ),
    ),
    # Keys that contradict each other.
    ("rollout.max_staleness=1", "rollout.max_staleness=1", "set engine.placement=server"),
    (
        "engine.in_flight=interrupt",
        "engine.in_flight=interrupt: has no effect",
        "engine.placement=server",
    ),
    ("engine.placement=server engine.sleep=true", "engine.placement=server", "engine.sleep=false"),
    (
        "engine=tensorrt_llm engine.placement=server engine.sleep=false",
        (
            "server.start_timeout_s=180: must be at least 900, because the generator becomes"
            " healthy only after its engine has started"
        ),
        "which may take engine.tensorrt_llm.timeout_s=900 s",
    ),
    (
        (
            "engine=tensorrt_llm engine.parallel.tensor=2 actor.parallel.data=2"
            " cluster.collective_timeout_s=900"
        ),
        (
            "cluster.collective_timeout_s=900: must be above 900, because the other ranks of a"
            " replica wait for its engine to start"
        ),
        "which may take engine.tensorrt_llm.timeout_s=900 s",
    ),
    (
        "server.start_timeout_s=240",
        (
            "server.request_timeout_s=300: must be above 310, because a request waits until its"
            " server has restarted"
        ),
        (
            "server.health_timeout_s=60 s + cluster.stop_timeout_s=10 s +"
            " server.start_timeout_s=240 s. Set a larger value"
        ),
        "server.max_restarts=0",
    ),
    (
        "critic.parallel.data=2 cluster.collective_timeout_s=100",
        (
            "cluster.collective_timeout_s=100: must be at least server.start_timeout_s=180,"
            " because the other ranks of the critic"
        ),
        "server wait for its rank 0 to start",
    ),
    (
        "critic.ports.http=29991 reward.ports.http=29991",
        "reward.ports.http=29991: critic.ports.http is the same port",
    ),
    (
        "critic.ports.http={port}",
        "critic.ports.http={port}: the port is in use",
        "0 for a free port",
    ),
    ("server.interface=eth99", "server.interface=eth99", "lo (127.0.0.1)"),
    ("evaluation.every=2", "evaluation.every=2", "set evaluation.path=FILE"),
    # Models, data and scorers that are missing or broken.
    ("model.source=directory model.path=gone", "model.path=gone: no such model directory"),
    ("model.source=directory model.path=empty", "model.path=empty: has no config.json"),
    ("model.source=directory model.path=broken", "model.path=broken: config.json is not"),
    (
        "model.source=directory model.path=listed",
        "model.path=listed: config.json must be a JSON object, got list",
    ),
    ("model.source=directory model.path=bert", "model.path=bert", "BertForMaskedLM", "Llama"),
    ("model.config.hidden_size=big", "model.config: hidden_size='big'", "an integer > 0"),
    (
        "model.config.num_attention_heads=5",
        "the hidden size, 64, must be a multiple of the number of attention heads, 5",
    ),
    ("data.path=gone.txt", "data.path=gone.txt: no such file"),
    (
        "data.path=prompts.tsv",
        "data.path=prompts.tsv: must be a .jsonl, .json, .jsonl.gz, .json.gz, .csv, .parquet or .txt file",
    ),
    ("data.path=empty.txt", "data.path=empty.txt: the prompt file is empty"),
    ("data.path=experiment:tiny_ppo", "data.path=experiment:tiny_ppo: expected preferences"),
    (
        "actor.frozen=[head.*]",
        "actor.frozen: the pattern 'head.*' matches no weight; examples of weight names: ",
    ),
    (
        "reward.function=digits",
        "reward.function=digits: must be one of digit_fraction, ",
        "or module:callable",
    ),
    # The run directory.
    (
        "run.dir=full",
        "full: exists, but is not the directory of a run (no config.yaml)",
        "set another run.dir",
    ),
    ("run.dir=/proc/run", "run.dir=/proc/run: is not writable", "choose another run.dir"),
    (f"run.name={'x' * 300}", "File name too long; choose another run.dir"),
    ("run.resume=true run.dir=gone", "run.resume=true: no run found in", "leave run.resume out"),
    (
        "run.resume=auto",
        (
            "run.resume=auto: requires the directory or name of the run to resume; set"
            " run.dir=DIRECTORY or run.name=NAME"
        ),
    ),
    # Config files of the user.
    ("--config-dir mine experiment=typo", "did you mean run.steps? (in experiment/typo.yaml)"),
    (
        "--config-dir mine experiment=type",
        "run.steps=many: expected int",
        "(in experiment/type.yaml)",
    ),
    ("--config-dir mine experiment=broken", "experiment/broken.yaml", "line 2", "',' or ']'"),
    ("--config-dir mine experiment=bare", "`# @package _global_`", "(in experiment/bare.yaml)"),
    ("--config-dir mine experiment=choice", "'algorithm/nope'", "grpo"),
    ("--config-dir mine experiment=circle", "experiment=circle: circular defaults"),
    (
        "--config-dir mine experiment=number",
        "experiment=number: Unsupported type in defaults : int",
    ),
    (
        "--config-dir latin experiment=latin",
        "latin/experiment/latin.yaml: 'utf-8' codec can't decode byte 0xe9",
    ),
    ("--config-dir mine experiment=twice", "duplicate key run", "experiment/twice.yaml"),
    # Invalid Slurm jobs.
    (
        "cluster=slurm cluster.slurm.time=5",
        "cluster.slurm.time=5: must be longer than cluster.slurm.grace_s=",
        "because Slurm sends the stop signal",
    ),
    (
        "cluster=slurm checkpoint.every_minutes=0",
        "cluster.slurm.requeue=true: with checkpoint.every=0",
        "with checkpoint.every=0 and checkpoint.every_minutes=0",
        "set checkpoint.every_minutes=MINUTES",
    ),
    (
        "cluster.kind=slurm",
        (
            "server.interface=127.0.0.1: must be 0.0.0.0 with cluster=slurm, because clients"
            " connect to"
        ),
        "each server at the address of its node",
    ),
    (
        "cluster=slurm cluster.slurm.roles.reward.nodes=3 reward.replicas=2",
        "cluster.slurm.roles.reward.nodes=3: 2 replicas of 1 ranks cannot be distributed evenly",
    ),
)

_EXPERIMENTS = {
    "typo": "run: {step: 3}",
    "type": "run: {steps: many}",
    "broken": "run: {steps: [3",
    "circle": "defaults: [circle]",
    "number": "defaults: [3]",
    "choice": "defaults: [{override /algorithm: nope}]",
    "twice": "run: {steps: 3}\nrun: {name: x}",
}


_JUDGE = {
    "architectures": ["LlamaForSequenceClassification"],
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 1,
    "intermediate_size": 16,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("place")
    files: dict[str, str | bytes] = {
        "bert/config.json": '{"architectures": ["BertForMaskedLM"]}',
        "broken/config.json": "{",
        "listed/config.json": "[]",
        "empty/README": "no model",
        "short/config.json": json.dumps(_JUDGE | {"max_position_embeddings": 31}),
        "narrow/config.json": json.dumps(_JUDGE | {"vocab_size": 32}),
        "full/thesis.tex": "not to be written over",
        "prompts.tsv": "prompt",
        "empty.txt": "",
        "mine/experiment/bare.yaml": "run: {steps: 3}\n",
        "latin/experiment/latin.yaml": b"# @package _global_\nrun: {name: caf\xe9}\n",
    }
    files |= {
        f"mine/experiment/{name}.yaml": f"# @package _global_\n{text}\n"
        for name, text in _EXPERIMENTS.items()
    }
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return directory


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Port that is in use."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.promise("wrong-configuration-is-refused")
@pytest.mark.parametrize(
    ("typed", "parts"), [pytest.param(typed, parts, id=typed[:60]) for typed, *parts in WRONG]
)
def test_wrong_configuration_is_refused_with_a_fix(
    place: Path,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    typed: str,
    parts: list[str],
) -> None:
    """`tests/config/test_command_line.py` tests the command in a process of its own."""
    monkeypatch.chdir(place)
    before, began = sorted(place.rglob("*")), time.process_time()
    with pytest.raises(SystemExit) as ended:
        main(["launch", "experiment=tiny_ppo", *typed.replace("{port}", str(port)).split(" ")])
    error = error_in(capsys.readouterr().err)
    assert ended.value.code == 2 and time.process_time() - began < 5
    assert sorted(place.rglob("*")) == before
    for part in parts:
        assert part.replace("{port}", str(port)) in error, error


def test_validate_and_launch_report_the_same_error(place: Path) -> None:
    done, _ = aligner(place, "validate", "experiment=tiny_ppo", "actor.parallel.tensor=3")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr == expect_launch_error(
        place, "experiment=tiny_ppo", "actor.parallel.tensor=3"
    )
