"""Keys of the value model and its server: section `critic`."""

from dataclasses import dataclass

from aligner.schema.options import option, section
from aligner.schema.server import PortsConfig
from aligner.schema.trained_model import TrainedModelConfig

HAS_CRITIC = "algorithm.with_critic=true or algorithm.advantage=gae"
"""Condition of a run with a critic."""


@dataclass
class CriticConfig(TrainedModelConfig):
    """Value model (critic), a server on separate devices."""

    path: str | None = option(
        None,
        "Model for the critic's initial weights, such as a reward model; same values as"
        " `model.path`. If all layers are used, the model's scalar head is used too, scaled to"
        " the units of the rewards. Null means the policy's weights and a head of zeros.",
    )
    num_layers: int | None = option(
        None,
        "Number of layers that the critic (or the trained reward model) uses, counted from the"
        " first layer of the initial model. Null means all layers.",
        minimum=1,
        read_if=f"{HAS_CRITIC} or algorithm.trainer=reward_model",
    )
    head_learning_rate: float | None = option(
        None,
        "Peak learning rate of the scalar head, with the schedule and warm-up of"
        " `critic.optimizer`; null means the learning rate of the other weights.",
        minimum=0,
    )
    with_reward: bool = option(
        False,
        "Whether the critic's processes also serve the reward, so that the run has no reward"
        " role. If the reward is a model too, each of the two models is offloaded to host memory"
        " while the other model computes.",
    )
    ports: PortsConfig = section(PortsConfig)
