"""Schema of the configuration: names, types, defaults, bounds and help texts of all keys.

Every key that a user may set is a dataclass field. The metadata of a field contains its help text,
its `choices`, its bounds (`minimum`, `above`, `maximum`, `below`), and the condition under which a
run reads the key. `schema.key_validation` validates configurations, and `docs/configuration.md`
lists all keys.
"""

from dataclasses import dataclass

from aligner.schema.actor import ActorConfig, LoraConfig
from aligner.schema.algorithm import AlgorithmConfig, PreferenceConfig
from aligner.schema.checkpoint import CheckpointConfig
from aligner.schema.cluster import ClusterConfig, SlurmRoleConfig
from aligner.schema.critic import HAS_CRITIC, CriticConfig
from aligner.schema.data import CurriculumConfig, DataConfig
from aligner.schema.dry_run import DryRunConfig
from aligner.schema.engine import (
    EngineConfig,
    EngineParallelConfig,
    SpeculationConfig,
    TensorRTLLMConfig,
    VLLMConfig,
)
from aligner.schema.environment import EnvironmentConfig
from aligner.schema.evaluation import EvaluationConfig
from aligner.schema.job_roles import NodeRoleConfig
from aligner.schema.kubernetes import KubernetesConfig, KubernetesRoleConfig
from aligner.schema.logging import LoggingConfig
from aligner.schema.model import ModelConfig
from aligner.schema.options import option, section
from aligner.schema.profile import ProfileConfig
from aligner.schema.reward import RewardConfig
from aligner.schema.rollout import RolloutConfig
from aligner.schema.run import RunConfig
from aligner.schema.server import PortsConfig, ServerConfig, TLSConfig
from aligner.schema.skypilot import SkyPilotConfig
from aligner.schema.teacher import HAS_TEACHER, TeacherConfig
from aligner.schema.trained_model import (
    MegatronModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainedModelConfig,
)


@dataclass
class Config:
    """All configuration keys of a run."""

    seed: int = option(
        1,
        "Random seed of the run, used for the order of the data, for sampling and for random"
        " initial weights.",
        minimum=0,
    )
    run: RunConfig = section(RunConfig)
    model: ModelConfig = section(ModelConfig)
    data: DataConfig = section(DataConfig)
    rollout: RolloutConfig = section(RolloutConfig, read_if="algorithm.trainer=online|preferences")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, read_if=".trainer=online")
    # Only these trainers compute log-probs over the policy's vocabulary.
    actor: ActorConfig = section(
        ActorConfig, logprob_chunk_tokens="algorithm.trainer=online|sft|dpo|teacher_scores"
    )
    critic: CriticConfig = section(CriticConfig, read_if=HAS_CRITIC)
    # Only reward models compute in Megatron; functions and HTTP services do not.
    reward: RewardConfig = section(
        RewardConfig,
        read_if="algorithm.trainer=online|preferences",
        micro_batch_tokens=".kind=model|combined",
        precision=".kind=model|combined",
    )
    teacher: TeacherConfig = section(TeacherConfig, read_if=HAS_TEACHER)
    environment: EnvironmentConfig = section(EnvironmentConfig, read_if="algorithm.trainer=online")
    engine: EngineConfig = section(EngineConfig, read_if="algorithm.trainer=online|preferences")
    server: ServerConfig = section(ServerConfig, read_if="algorithm.trainer=online|preferences")
    cluster: ClusterConfig = section(ClusterConfig)
    checkpoint: CheckpointConfig = section(
        CheckpointConfig, read_if="algorithm.trainer!=preferences|teacher_scores"
    )
    evaluation: EvaluationConfig = section(
        EvaluationConfig, read_if="algorithm.trainer=online and evaluation.every>0"
    )
    logging: LoggingConfig = section(LoggingConfig)
    profile: ProfileConfig = section(ProfileConfig)
    dry_run: DryRunConfig = section(DryRunConfig, read_if=".scale=tiny")

    @property
    def critic_serves_reward(self) -> bool:
        """Whether the critic's processes also serve the reward."""
        return self.algorithm.has_critic and self.critic.with_reward

    @property
    def has_teacher(self) -> bool:
        """Whether the run has teacher servers that score the policy's samples."""
        return self.algorithm.trainer == "online" and (
            self.teacher.path is not None or bool(self.teacher.sources)
        )
