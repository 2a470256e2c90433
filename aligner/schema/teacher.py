"""The teacher: a frozen language model that the policy is distilled from."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.options import option, section
from aligner.schema.server import PortsConfig
from aligner.schema.trained_model import MegatronModelConfig

_AS_ROLE = (
    "algorithm.trainer=online and teacher.path!=null",
    "algorithm.trainer=online and teacher.sources!={}",
)
HAS_TEACHER = " or ".join(_AS_ROLE)
"""When there is a teacher."""
_FROM_SCORES = "algorithm.trainer=sft and teacher.scores!=null"
_LEARNS = f"{HAS_TEACHER} or {_FROM_SCORES}"


@dataclass
class TeacherConfig(MegatronModelConfig):
    """Teacher: a frozen language model with the policy's tokenizer, as a server on separate
    devices or as stored scores."""

    path: str | None = option(
        None,
        "Teacher model: directory, name on the Hugging Face Hub, or `experiment:NAME`. Null"
        " means no teacher, or those of `teacher.sources`.",
        read="algorithm.trainer=online",
    )
    sources: dict[str, Any] = option(
        {},
        "Several teachers instead of `teacher.path`: a mapping from each name to `path`,"
        " `weight` (share among the teachers of a sample, default 1) and `tasks` (values of the"
        " prompt's `task` for which it is used, default all).",
        read="algorithm.trainer=online",
    )
    scores: str | None = option(
        None,
        "Stored teacher scores of the demonstrations, from a run with"
        " `algorithm=teacher_scores`: its directory `teacher_scores`, or `experiment:NAME`. The"
        " policy learns from them instead of the demonstrations' tokens.",
        read="algorithm.trainer=sft",
    )
    imitation_weight: float = option(
        0.0,
        "Weight of the demonstrations' cross-entropy, in addition to the divergence.",
        minimum=0,
        read=_FROM_SCORES,
    )
    loss: str = option(
        "advantage",
        "`advantage`: teacher's minus policy's log-prob of each generated token, added to its"
        " advantage. Divergences in the loss, over the teacher's top-k tokens: `forward_kl`,"
        " KL(teacher ‖ policy); `reverse_kl`, KL(policy ‖ teacher); `jensen_shannon`, generalized"
        " Jensen-Shannon.",
        choices=("advantage", "forward_kl", "reverse_kl", "jensen_shannon"),
        read=_LEARNS,
    )
    top_k: int = option(
        64,
        "Number of the teacher's most probable tokens that are used, with all other tokens as"
        " one further outcome; the whole vocabulary if it is smaller.",
        minimum=1,
        read=" or ".join(
            (
                *(f"{each} and .loss!=advantage" for each in _AS_ROLE),
                "algorithm.trainer=teacher_scores",
            )
        ),
    )
    beta: float = option(
        0.5,
        "Weight of the teacher in the mixture of the Jensen-Shannon divergence; near 0 it"
        " approaches the forward KL, near 1 the reverse KL.",
        above=0,
        below=1,
        read=".loss=jensen_shannon",
    )
    weight: float = option(
        1.0,
        "Weight of the distillation term: of the log-prob difference in the advantages, or of"
        " the divergence in the loss.",
        above=0,
        read=_LEARNS,
    )
    logprob_chunk_tokens: int = option(
        1024, "Number of tokens whose logits are in memory at the same time.", minimum=1
    )
    replicas: int = option(
        1,
        "Number of servers with the same teacher; each request goes to the one with the fewest"
        " requests in flight.",
        minimum=1,
    )
    ports: PortsConfig = section(PortsConfig)

    @property
    def asked_tokens(self) -> int:
        """How many of its most probable tokens the teacher is asked for; 0: for none."""
        return 0 if self.loss == "advantage" else self.top_k
