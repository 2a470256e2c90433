"""What scores the samples."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.options import option, section
from aligner.schema.server import PortsConfig
from aligner.schema.trained_model import MegatronModelConfig

OWN_SERVER = (
    "critic.with_reward=false or algorithm.with_critic=false or algorithm.advantage!=gae|*:* or algorithm.trainer=preferences"
)
"""When the reward has a server of its own: where no critic serves it."""


@dataclass
class RewardConfig(MegatronModelConfig):
    """What scores the samples; the Megatron keys speak of a reward model (kind=model). Several sources are `sources`."""

    kind: str = option(
        "function",
        "function: a Python function; model: a Megatron reward model; remote: an HTTP scorer; combined: the weighted sum of"
        " `sources`",
        choices=("function", "model", "remote", "combined"),
    )
    function: str = option("digit_fraction", "a built-in scorer's name, or module:callable", read=".kind=function")
    function_timeout_s: float = option(
        240.0,
        "deadline of a call of a function of the user's own, which has a process of its own; below"
        " server.request_timeout_s, so that it is told by name",
        minimum=0.1,
        read=".kind=function",
    )
    path: str | None = option(None, "reward model directory", read=".kind=model")
    config: dict[str, Any] = option(
        {},
        "its config.json as YAML, which `aligner validate` goes by while there is no such directory; what it does not say is"
        " as in model.config, all of it when empty",
        read=".kind=model",
    )
    url: str | None = option(
        None, "address that takes queries and answers rewards, as OpenRLHF's remote_rm_url", read=".kind=remote"
    )
    timeout_s: float = option(
        60.0, "deadline of a request to the remote scorer, retries included", minimum=0.1, read=".kind=remote"
    )
    skip_special_tokens: bool = option(
        False,
        "leave special tokens out of the texts that the remote scorer gets; a chat reward model needs them, to tell the turns",
        read=".kind=remote",
    )
    gain: float = option(
        1.0, "scores are multiplied by it: normalization to a mean and deviation is gain and bias", read=".kind!=combined"
    )
    bias: float = option(0.0, "and this is added", read=".kind!=combined")
    sources: dict[str, Any] = option(
        {},
        "name to kind, weight, gain, bias and function and function_timeout_s, path, or url, timeout_s and"
        " skip_special_tokens",
        read=".kind=combined",
    )
    missing_end_score: float | None = option(
        None, "score of a response without an end, an end-of-sequence token or rollout.truncate_token; its own when null"
    )
    replicas: int = option(
        1, "servers with the same scorer; a request goes to the one with the fewest under way", minimum=1, read=OWN_SERVER
    )
    ports: PortsConfig = section(PortsConfig, read=OWN_SERVER)
