"""The value model and its server."""

from dataclasses import dataclass

from aligner.schema.options import option, section
from aligner.schema.server import PortsConfig
from aligner.schema.trained_model import TrainedModelConfig

TRAINED = "algorithm.with_critic=true or algorithm.advantage=gae"
"""When there is a critic."""


@dataclass
class CriticConfig(TrainedModelConfig):
    """The value model, a server on its own devices."""

    path: str | None = option(
        None,
        "Hugging Face model directory whose weights the critic begins with, and whose scalar head"
        " where it has one and all layers are taken, scaled to the rewards' units: a reward"
        " model's; the policy's and a head of zeros when null",
    )
    num_layers: int | None = option(
        None,
        "build the critic, or the reward model that is trained, from the model's first layers; all"
        " of them when null",
        minimum=1,
        read=f"{TRAINED} or algorithm.trainer=reward_model",
    )
    head_learning_rate: float | None = option(
        None,
        "peak learning rate of the scalar head, on the schedule of critic.optimizer and with its"
        " warm-up; that of the other weights when null",
        minimum=0,
    )
    with_reward: bool = option(
        False,
        "serve the reward from the critic's processes too: no reward role, and where both are"
        " models each waits in host memory while the other works",
    )
    ports: PortsConfig = section(PortsConfig)
