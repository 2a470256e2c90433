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
    """A frozen language model with the policy's tokenizer: a server on its own devices, or its
    scores in files."""

    path: str | None = option(
        None,
        "model directory of the teacher; no teacher when null, or those of sources",
        read="algorithm.trainer=online",
    )
    sources: dict[str, Any] = option(
        {},
        "name to path, weight (its share beside a sample's other teachers, 1) and tasks (it is for"
        " prompts of which `task` is one of these; for all where there are none): several teachers"
        " instead of teacher.path",
        read="algorithm.trainer=online",
    )
    scores: str | None = option(
        None,
        "what a teacher has said of the demonstrations, as algorithm=teacher_scores keeps it: a"
        " run's directory teacher_scores, or experiment:NAME; the policy learns from it instead of"
        " the demonstrations' tokens",
        read="algorithm.trainer=sft",
    )
    imitation_weight: float = option(
        0.0,
        "of the demonstrations' cross entropy, beside the divergence",
        minimum=0,
        read=_FROM_SCORES,
    )
    loss: str = option(
        "advantage",
        "what is learned from it: the log-prob of each drawn token, less the policy's, is an"
        " advantage; or the policy's loss gets a divergence of the two at each prefix, over the"
        " teacher's most probable tokens: forward_kl is KL(teacher ‖ policy), reverse_kl KL(policy"
        " ‖ teacher), and jensen_shannon the generalized one between",
        choices=("advantage", "forward_kl", "reverse_kl", "jensen_shannon"),
        read=_LEARNS,
    )
    top_k: int = option(
        64,
        "so many of the teacher's most probable tokens, and all others as one; the whole vocabulary"
        " where it has no more",
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
        "the teacher's share of the mixture that both are compared with: towards 0 the forward KL,"
        " towards 1 the reverse",
        above=0,
        below=1,
        read=".loss=jensen_shannon",
    )
    weight: float = option(
        1.0,
        "of the distillation term: of the teacher's log-prob less the policy's in each token's"
        " advantage, or of the divergence in the loss",
        above=0,
        read=_LEARNS,
    )
    logprob_chunk_tokens: int = option(1024, "logits exist for so many tokens at a time", minimum=1)
    replicas: int = option(
        1,
        "servers with the same teacher; a request goes to the one with the fewest under way",
        minimum=1,
    )
    ports: PortsConfig = section(PortsConfig)

    @property
    def asked_tokens(self) -> int:
        """How many of its most probable tokens the teacher is asked for; 0: for none."""
        return 0 if self.loss == "advantage" else self.top_k
