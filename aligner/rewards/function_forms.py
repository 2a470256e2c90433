"""Forms of custom scoring functions: aligner's own, and those of TRL's and verl's documentation.

The form follows from the names of a function's parameters, so that reward functions written for TRL
or verl run unchanged.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from aligner.errors import ConfigError


@dataclass(frozen=True)
class ScoringRequest:
    """One response to score, with its prompt."""

    prompt: str
    """Text of the prompt; for an episode, the conversation before the model's last turn. Empty for
    a text that arrived without its prompt."""
    response: str
    """Text of the response; for an episode, the model's last turn."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the prompt's record."""

    @property
    def prompt_messages(self) -> list[Any] | None:
        """Chat messages of the prompt; None for a plain text."""
        return self.metadata.get("messages")


# Arguments that TRL passes in addition to the fields of the data set. aligner scores texts, so that
# a function that reads token ids cannot run.
_TRL_ARGUMENTS: Mapping[str, Any] = {
    "trainer_state": None,
    "log_extra": lambda *values, **named: None,
    "log_metric": lambda *values, **named: None,
}
_TRL_TEXTS = ("prompts", "completions")
# Fields that are the prompt, and the values of TRL's `prompts`.
_PROMPT_FIELDS = ("messages", "tools", "chat_template_kwargs")
_VERL_PARAMETERS = ("solution_str", "ground_truth")
# Fields of a record that are verl's `ground_truth`, most preferred first.
_VERL_ANSWERS = ("reward_model.ground_truth", "answer")
_FORMS = (
    "aligner's (requests), TRL's (prompts, completions, **kwargs), or verl's (data_source,"
    " solution_str, ground_truth, extra_info)"
)


@dataclass(frozen=True)
class FunctionForm:
    """The form of a custom scoring function."""

    description: str
    """Whose form it is, with the parameters of the function."""
    required_fields: Sequence[Sequence[str]] = ()
    """Fields that every record must have. Each entry lists the alternatives, of which a record
    needs one; a name may be the path of an entry, such as `reward_model.ground_truth`."""

    def find_missing_field(self, record: Mapping[str, Any]) -> str | None:
        """Return the required field that a record lacks, with its alternatives; None if there is
        none."""
        for alternatives in self.required_fields:
            if not any(_has_field(record, name) for name in alternatives):
                return " or ".join(f"`{name}`" for name in alternatives)
        return None


def _has_field(record: Mapping[str, Any], name: str) -> bool:
    """Return whether a record has a field, or an entry of an object field."""
    value: Any = record
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True


def describe_form(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the attributes of the FunctionForm of a function, as JSON.

    Raises:
        ConfigError: The function has none of the three forms. Without this check, a run would
            generate samples before its first call of the function fails.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return asdict(FunctionForm("aligner's form"))
    return asdict(find_form(name, signature))


def find_form(name: str, signature: inspect.Signature) -> FunctionForm:
    """Return the form of a function with a signature.

    Raises:
        ConfigError: The signature has none of the three forms.
    """
    parameters = signature.parameters
    text = f"{name}({', '.join(map(str, parameters.values()))})"
    required = [each for each, parameter in parameters.items() if _is_required(parameter)]
    if "completions" in parameters:
        if "completion_ids" in required:
            raise ConfigError(
                f"{text}: aligner passes texts but no `completion_ids`; remove this parameter, or"
                " give it a default value"
            )
        provided = {*_TRL_TEXTS, *_TRL_ARGUMENTS}
        fields = [[each] for each in required if each not in provided]
        return FunctionForm(f"TRL's form {text}", fields)

    is_verl = all(each in parameters for each in _VERL_PARAMETERS)
    known = ("data_source", "extra_info", *_VERL_PARAMETERS)
    if is_verl and all(each in known for each in required):
        return FunctionForm(f"verl's form {text}", [_VERL_ANSWERS])
    try:
        signature.bind(None)
    except TypeError:
        raise ConfigError(f"{text}: the parameters must be {_FORMS}") from None
    return FunctionForm(f"aligner's form {text}")


def call_in_form(function: Callable[..., Any], requests: Sequence[ScoringRequest]) -> Any:
    """Call a custom scoring function with the arguments of its form.

    Args:
        function: The function; `describe_form` has accepted it.
        requests: The responses to score.

    Returns:
        The function's result, in which awaitables are not resolved; for verl's form, the list of
        the results of one call for each request.

    Raises:
        LookupError: A record lacks a field that the function requires.
    """
    parameters = _get_parameters(function) or {}
    if "completions" in parameters:
        return function(**_build_trl_arguments(parameters, requests))
    if all(name in parameters for name in _VERL_PARAMETERS):
        return [function(**_build_verl_arguments(parameters, request)) for request in requests]
    return function(requests)


def extract_score(result: Any) -> Any:
    """Return the score of a result; verl's functions may return a mapping with a `score`."""
    return result["score"] if isinstance(result, Mapping) and "score" in result else result


def _get_parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of a function by name; None if they are unknown, as for some functions
    that are not written in Python."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def _is_required(parameter: inspect.Parameter | None) -> bool:
    """Return whether a parameter exists, is no `*args` or `**kwargs`, and has no default value."""
    if parameter is None or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return False
    return parameter.default is parameter.empty


def _build_trl_arguments(
    parameters: Mapping[str, inspect.Parameter], requests: Sequence[ScoringRequest]
) -> dict[str, Any]:
    """Return the keyword arguments of a function of TRL's form.

    As in TRL's GRPOTrainer, the fields of the records are lists, and for a prompt of chat messages,
    `prompts` contains these messages and `completions` a list of one message of the assistant.
    """
    prompts: list[Any] = []
    completions: list[Any] = []
    for request in requests:
        messages = request.prompt_messages
        is_chat = messages is not None
        prompts.append(messages if is_chat else request.prompt)
        completions.append(
            [{"role": "assistant", "content": request.response}] if is_chat else request.response
        )
    arguments: dict[str, Any] = {"prompts": prompts, "completions": completions}
    names = {name for request in requests for name in request.metadata}
    for name in sorted(names - {*_PROMPT_FIELDS, *_TRL_TEXTS}):
        arguments[name] = [request.metadata.get(name) for request in requests]
    arguments |= {name: _TRL_ARGUMENTS[name] for name in _TRL_ARGUMENTS if name in parameters}

    takes_all = any(each.kind == each.VAR_KEYWORD for each in parameters.values())
    if not takes_all:
        arguments = {name: value for name, value in arguments.items() if name in parameters}
    for name, parameter in parameters.items():
        if _is_required(parameter) and name not in arguments:
            raise LookupError(f"no record has the field `{name}`, which the function requires")
    return arguments


def _build_verl_arguments(
    parameters: Mapping[str, inspect.Parameter], request: ScoringRequest
) -> dict[str, Any]:
    """Return the keyword arguments of a function of verl's form for one response."""
    metadata = request.metadata
    reward_model = metadata.get("reward_model")
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        ground_truth = reward_model["ground_truth"]
    elif "answer" in metadata:
        ground_truth = metadata["answer"]
    else:
        raise LookupError(
            "the record lacks `reward_model.ground_truth` or `answer`, which the function receives"
            " as `ground_truth`"
        )
    arguments = {
        "data_source": metadata.get("data_source"),
        "solution_str": request.response,
        "ground_truth": ground_truth,
        "extra_info": metadata.get("extra_info"),
    }
    takes_all = any(each.kind == each.VAR_KEYWORD for each in parameters.values())
    return {name: value for name, value in arguments.items() if takes_all or name in parameters}
