"""Objects and settings that the sessions of agents share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from aligner.data.chat_turns import ChatTurns
from aligner.data.tokenizer import Tokenizer
from aligner.schema.environment import EnvironmentConfig


@dataclass(frozen=True)
class SessionContext:
    """Objects and settings that all sessions share."""

    tokenizer: Tokenizer
    get_chat: Callable[[], ChatTurns]
    """Function that returns the chat template. Raises ConfigError if the model has none."""
    settings: EnvironmentConfig
    """The section `environment` of the configuration."""
    max_sequence_length: int
    """Maximum number of input and generated tokens of one sequence."""
    sampling_settings: Mapping[str, str] = field(default_factory=dict)
    """Names of the user's settings of the sampling parameters, by the name of the parameter in a
    request; a parameter that the user cannot set is absent."""
    logged_messages: set[str] = field(default_factory=set)
    """Ignored parameters and branch reasons that have been logged; each is logged only once."""
