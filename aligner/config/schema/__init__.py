"""The schema of every file under `conf/`: names, types, defaults, bounds and meaning.

Every key a user may write is a field here; a field's metadata holds its help text and, where it has them, the allowed
`choices` or the smallest allowed value (`minimum`). `checks.py` enforces both, and `docs/configuration.md` lists them.
"""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.schema.algorithm import Algorithm, Preference
from aligner.config.schema.cluster import Cluster, Slurm, SlurmRole, SlurmRoles
from aligner.config.schema.data import Data, Evaluation, Model
from aligner.config.schema.dry_run import DryRun
from aligner.config.schema.generation import Engine, EngineParallel, Rollout, TensorRTLLM
from aligner.config.schema.models import Actor, Lora, MegatronModel, Optimizer, Parallel, TrainedModel
from aligner.config.schema.options import option, section
from aligner.config.schema.run import Checkpoint, Logging, Mlflow, Run, Wandb
from aligner.config.schema.servers import TLS, Critic, Ports, Reward, Server

__all__ = [
    "TLS",
    "Actor",
    "Algorithm",
    "Checkpoint",
    "Cluster",
    "Config",
    "Critic",
    "Data",
    "DryRun",
    "Engine",
    "EngineParallel",
    "Evaluation",
    "Logging",
    "Lora",
    "MegatronModel",
    "Mlflow",
    "Model",
    "Optimizer",
    "Parallel",
    "Ports",
    "Preference",
    "Reward",
    "Rollout",
    "Run",
    "Server",
    "Slurm",
    "SlurmRole",
    "SlurmRoles",
    "TensorRTLLM",
    "TrainedModel",
    "Wandb",
]


@dataclass
class Config:
    """The whole configuration of a run."""

    seed: int = option(1, "the run's one seed", minimum=0)
    run: Run = section(Run)
    model: Model = section(Model)
    data: Data = section(Data)
    rollout: Rollout = section(Rollout)
    algorithm: Algorithm = section(Algorithm)
    actor: Actor = section(Actor)
    critic: Critic = section(Critic)
    reward: Reward = section(Reward)
    engine: Engine = section(Engine)
    server: Server = section(Server)
    cluster: Cluster = section(Cluster)
    checkpoint: Checkpoint = section(Checkpoint)
    evaluation: Evaluation = section(Evaluation)
    logging: Logging = section(Logging)
    dry_run: DryRun = section(DryRun)
