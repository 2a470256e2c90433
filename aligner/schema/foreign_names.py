"""Names of settings in TRL, verl and OpenRLHF, for the suggestions in errors about unknown keys.

docs/migrating.md lists the same names with notes about their units and defaults.
"""

from collections.abc import Mapping

TRL: Mapping[str, tuple[str, ...]] = {
    "reward_funcs": ("reward.function", "reward.sources"),
    "reward_weights": ("reward.sources",),
    "generation_batch_size": ("rollout.prompts_per_step",),
    "num_generations": ("rollout.samples_per_prompt",),
    "max_completion_length": ("rollout.max_response_tokens",),
    "beta": ("algorithm.kl_coefficient", "algorithm.preference.beta"),
    "num_iterations": ("algorithm.epochs",),
    "steps_per_generation": ("algorithm.minibatches",),
    "epsilon": ("algorithm.clip_low",),
    "epsilon_high": ("algorithm.clip_high",),
    "delta": ("algorithm.dual_clip",),
    "importance_sampling_level": ("algorithm.ratio_level",),
    "loss_type": ("algorithm.aggregation", "algorithm.loss", "algorithm.preference.kind"),
    "scale_rewards": ("algorithm.advantage",),
    "mask_truncated_completions": ("algorithm.overlong_filter",),
    "vllm_mode": ("engine.placement",),
    "vllm_enable_sleep_mode": ("engine.sleep",),
    "max_grad_norm": ("actor.optimizer.clip_grad_norm",),
    "max_steps": ("run.steps",),
    "per_device_train_batch_size": ("actor.micro_batch_tokens",),
    "label_smoothing": ("algorithm.preference.label_smoothing",),
    "simpo_gamma": ("algorithm.preference.target_margin",),
    "desirable_weight": ("algorithm.preference.desirable_weight",),
    "lora_r": ("actor.lora.rank",),
    "lora_alpha": ("actor.lora.alpha",),
    "lora_target_modules": ("actor.lora.targets",),
    "model_name_or_path": ("model.path",),
    "dataset_name": ("data.path",),
    "output_dir": ("run.dir",),
    "save_steps": ("checkpoint.every",),
    "eval_steps": ("evaluation.every",),
}
"""aligner's keys by the names of TRL's `GRPOConfig`, `DPOConfig` and `ModelConfig`."""

VERL: Mapping[str, tuple[str, ...]] = {
    "actor_rollout_ref.model.path": ("model.path",),
    "actor_rollout_ref.model.lora_rank": ("actor.lora.rank",),
    "actor_rollout_ref.model.lora_alpha": ("actor.lora.alpha",),
    "data.train_files": ("data.path",),
    "data.val_files": ("evaluation.path",),
    "data.max_prompt_length": ("data.max_prompt_tokens",),
    "data.max_response_length": ("rollout.max_response_tokens",),
    "data.filter_overlong_prompts": ("data.long_prompts",),
    "data.truncation": ("data.long_prompts",),
    "data.train_batch_size": ("rollout.prompts_per_step",),
    "actor_rollout_ref.rollout.n": ("rollout.samples_per_prompt",),
    "actor_rollout_ref.rollout.temperature": ("rollout.temperature",),
    "actor_rollout_ref.rollout.top_k": ("rollout.top_k",),
    "actor_rollout_ref.rollout.top_p": ("rollout.top_p",),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": ("engine.parallel.tensor",),
    "actor_rollout_ref.rollout.free_cache_engine": ("engine.sleep",),
    "actor_rollout_ref.actor.ppo_mini_batch_size": ("algorithm.minibatches",),
    "actor_rollout_ref.actor.ppo_epochs": ("algorithm.epochs",),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": ("actor.micro_batch_tokens",),
    "actor_rollout_ref.actor.clip_ratio_low": ("algorithm.clip_low",),
    "actor_rollout_ref.actor.clip_ratio_high": ("algorithm.clip_high",),
    "actor_rollout_ref.actor.clip_ratio_c": ("algorithm.dual_clip",),
    "actor_rollout_ref.actor.loss_agg_mode": ("algorithm.aggregation",),
    "actor_rollout_ref.actor.use_kl_loss": ("algorithm.kl_placement",),
    "actor_rollout_ref.actor.kl_loss_coef": ("algorithm.kl_coefficient",),
    "actor_rollout_ref.actor.kl_loss_type": ("algorithm.kl_estimator",),
    "actor_rollout_ref.actor.entropy_coeff": ("algorithm.entropy_coefficient",),
    "actor_rollout_ref.actor.optim.lr": ("actor.optimizer.learning_rate",),
    "critic.optim.lr": ("critic.optimizer.learning_rate",),
    "algorithm.adv_estimator": ("algorithm.advantage",),
    "algorithm.norm_adv_by_std_in_grpo": ("algorithm.advantage",),
    "algorithm.use_kl_in_reward": ("algorithm.kl_placement",),
    "algorithm.kl_ctrl.kl_coef": ("algorithm.kl_coefficient",),
    "algorithm.kl_ctrl.target_kl": ("algorithm.kl_target",),
    "algorithm.kl_ctrl.horizon": ("algorithm.kl_horizon",),
    "critic.model.path": ("critic.path",),
    "critic.cliprange_value": ("algorithm.value_clip",),
    "custom_reward_function.path": ("reward.function",),
    "reward_model.enable": ("reward.kind",),
    "reward_model.model.path": ("reward.path",),
    "trainer.critic_warmup": ("algorithm.critic_warmup_steps",),
    "trainer.total_training_steps": ("run.steps",),
    "trainer.save_freq": ("checkpoint.every",),
    "trainer.test_freq": ("evaluation.every",),
    "trainer.resume_mode": ("run.resume",),
    "trainer.default_local_dir": ("run.dir",),
    "trainer.experiment_name": ("run.name",),
    "trainer.n_gpus_per_node": ("cluster.devices_per_node",),
}
"""aligner's keys by the names of verl's `ppo_trainer.yaml`."""

OPENRLHF: Mapping[str, tuple[str, ...]] = {
    "pretrain": ("model.path",),
    "reward_pretrain": ("reward.path",),
    "critic_pretrain": ("critic.path",),
    "remote_rm_url": ("reward.url",),
    "agent_func_path": ("environment.agent",),
    "prompt_data": ("data.path",),
    "prompt_data_probs": ("data.sources",),
    "input_key": ("data.fields",),
    "label_key": ("data.fields",),
    "prompt_max_len": ("data.max_prompt_tokens",),
    "generate_max_len": ("rollout.max_response_tokens",),
    "rollout_batch_size": ("rollout.prompts_per_step",),
    "n_samples_per_prompt": ("rollout.samples_per_prompt",),
    "train_batch_size": ("algorithm.minibatches",),
    "max_epochs": ("algorithm.epochs",),
    "micro_train_batch_size": ("actor.micro_batch_tokens",),
    "advantage_estimator": ("algorithm.advantage",),
    "eps_clip": ("algorithm.clip_low", "algorithm.clip_high"),
    "eps_clip_low_high": ("algorithm.clip_low", "algorithm.clip_high"),
    "lambd": ("algorithm.lam",),
    "init_kl_coef": ("algorithm.kl_coefficient",),
    "use_kl_loss": ("algorithm.kl_placement",),
    "entropy_loss_coef": ("algorithm.entropy_coefficient",),
    "dynamic_filtering": ("algorithm.dynamic_sampling_rounds",),
    "overlong_buffer_len": ("algorithm.overlong_fraction",),
    "freezing_actor_steps": ("algorithm.critic_warmup_steps",),
    "actor_learning_rate": ("actor.optimizer.learning_rate",),
    "critic_learning_rate": ("critic.optimizer.learning_rate",),
    "colocate_all_models": ("engine.placement",),
    "vllm_tensor_parallel_size": ("engine.parallel.tensor",),
    "vllm_enable_sleep": ("engine.sleep",),
    "async_train": ("rollout.max_staleness",),
    "lora_rank": ("actor.lora.rank",),
    "save_path": ("run.dir",),
}
"""aligner's keys by the names of OpenRLHF's `train_ppo_ray`."""

SYSTEMS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "TRL": TRL,
    "verl": VERL,
    "OpenRLHF": OPENRLHF,
}
"""Names of settings of each system."""


def describe_foreign_name(name: str, *, is_exact: bool = False) -> str | None:
    """Return a hint with aligner's keys for a setting of another system; None if it has none.

    The name may lack its first parts: `kl_coef` is found as verl's `algorithm.kl_ctrl.kl_coef`.
    A name without its middle parts is found, too: `actor.lr` as `actor_rollout_ref.actor.optim.lr`.

    Args:
        name: Name of the setting.
        is_exact: Whether to find only complete names.

    Example:
        `describe_foreign_name("num_generations")` returns "in aligner, TRL's num_generations is
        rollout.samples_per_prompt (docs/migrating.md)".
    """
    # An exact name is certain, so that it hides the abbreviations.
    for matches in (_is_equal,) if is_exact else (_is_equal, _is_end, _is_abbreviation):
        found = [
            (system, foreign_name, keys)
            for system, names in SYSTEMS.items()
            for foreign_name, keys in names.items()
            if matches(name, foreign_name)
        ]
        if found:
            descriptions = " and ".join(
                f"{system}'s {foreign_name} is {' or '.join(keys)}"
                for system, foreign_name, keys in found
            )
            return f"in aligner, {descriptions} (docs/migrating.md)"
    return None


def _is_equal(name: str, foreign_name: str) -> bool:
    """Return whether both names are equal."""
    return name == foreign_name


def _is_end(name: str, foreign_name: str) -> bool:
    """Return whether a name is another one without its first parts."""
    return foreign_name.endswith(f".{name}")


def _is_abbreviation(name: str, foreign_name: str) -> bool:
    """Return whether a dotted name lacks some parts of another one, but not the last part."""
    parts = name.split(".")
    foreign_parts = iter(foreign_name.split("."))
    return (
        len(parts) > 1
        and name.rpartition(".")[2] == foreign_name.rpartition(".")[2]
        and all(part in foreign_parts for part in parts)
    )
