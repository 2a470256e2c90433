"""The teacher: a frozen language model that the policy is distilled from."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.options import option, section
from aligner.schema.server import PortsConfig
from aligner.schema.trained_model import MegatronModelConfig

HAS_TEACHER = "algorithm.trainer=online and teacher.path!=null or algorithm.trainer=online and teacher.sources!={}"
"""When there is a teacher."""


@dataclass
class TeacherConfig(MegatronModelConfig):
    """A frozen language model with the policy's tokenizer, a server on its own devices (docs/distillation.md)."""

    path: str | None = option(
        None,
        "model directory of the teacher; no teacher when null, or those of sources",
        read="algorithm.trainer=online",
    )
    sources: dict[str, Any] = option(
        {},
        "name to path, weight (its share beside a sample's other teachers, 1) and tasks (it is for prompts of which `task` is"
        " one of these; for all where there are none): several teachers instead of teacher.path",
        read="algorithm.trainer=online",
    )
    weight: float = option(
        1.0,
        "of the distillation term: each token's advantage gets this times the teacher's log-prob less the policy's",
        above=0,
    )
    logprob_chunk_tokens: int = option(1024, "logits exist for so many tokens at a time", minimum=1)
    replicas: int = option(1, "servers with the same teacher; a request goes to the one with the fewest under way", minimum=1)
    ports: PortsConfig = section(PortsConfig)
