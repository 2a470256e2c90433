"""Checks of records and of the user's functions, which `aligner validate` makes without importing
torch.

`prepare` checks all records before a run, and imports the functions.
"""

import ast
import difflib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from aligner.data.record_fields import require_exchange, require_prompt, require_trainer_fields
from aligner.data.record_sources import is_blank
from aligner.data.records import BadRecord, Record, has_steps, open_source, to_record
from aligner.errors import ConfigError
from aligner.models.model_source import ExpectedInputs, is_expected
from aligner.rewards.function_forms import FunctionForm, find_form
from aligner.rewards.verifiers import CHECKED_VERIFIERS, require_fields, require_form_fields
from aligner.schema import Config
from aligner.schema.data_sources import FUNCTION, DataSource, parse_data_sources
from aligner.schema.evaluation_suites import Suite, get_active_suites, parse_evaluation_suites
from aligner.schema.keys import with_unread_defaults
from aligner.schema.reward_sources import FunctionSource, parse_reward_sources
from aligner.schema.scoring_functions import FUNCTIONS, RULES
from aligner.values import split_callable_name

_MAX_RECORDS = 1_000


def check_inputs(config: Config, expected: ExpectedInputs) -> list[str]:
    """Check the first records of all data, and that the user's functions exist.

    Args:
        config: The configuration of a run.
        expected: Paths that need not exist yet; their records are not checked.

    Returns:
        A notice for each source of which only the first records were checked.

    Raises:
        ConfigError: A record is malformed, or lacks a field that the run requires; or a function
            does not exist.
    """
    # A key that the run does not read must not cause an error.
    config = with_unread_defaults(config)
    for key, name in _list_function_names(config).items():
        if problem := find_missing_function(name):
            raise ConfigError(f"{key}={name}: {problem}")

    notices = []
    reward_functions = _get_reward_functions(config)
    for source in parse_data_sources(config.data):
        check = _make_training_check(config, source, expected)
        if check is not None:
            notices += _check_source(config, source, check, reward_functions, expected)
    if config.data.normalization is not None:
        path = Path(config.data.normalization)
        # These records have aligner's own field names.
        source = DataSource("data.normalization", path)
        check = partial(require_exchange, answer="response")
        notices += _check_source(config, source, check, [], expected)
    for suite in get_active_suites(config):
        notices += _check_suite(config, suite, reward_functions, expected)
    return notices


@dataclass(frozen=True)
class _CheckedFunction:
    """A scoring function whose required fields are known without an import."""

    key: str
    """Configuration key that names the function."""
    name: str
    """Built-in name, or `module:callable`."""
    source: FunctionSource | None = None
    """Reward source of the function; None for the function of an evaluation suite."""

    def check(self, records: Sequence[Record]) -> None:
        """Raise ConfigError if a record lacks a field that the function requires."""
        scored = [
            (record.origin, record.values)
            for record in records
            if self.source is None or self.source.should_score(record.values)
        ]
        setting_text = f"{self.key}={self.name}"
        if self.name in CHECKED_VERIFIERS:
            require_fields(self.name, setting_text, scored)
        elif split_callable_name(self.name) is not None and self.name not in {*FUNCTIONS, *RULES}:
            try:
                form = read_form(self.name)
            except ConfigError as error:
                raise ConfigError(f"{setting_text}: {error}") from error
            if form is not None:
                require_form_fields(form, setting_text, scored)


def _list_function_names(config: Config) -> dict[str, str]:
    """Return the names of all functions and classes of the configuration, by their keys."""
    algorithm = config.algorithm
    names = {}
    # In an environment of the servers' own, `prepare` imports the functions of the reward there.
    if config.server.python is None:
        names = {function.key: function.name for function in _get_reward_functions(config)}
    names |= {
        f"{suite.key}.function": suite.settings.function or ""
        for suite in parse_evaluation_suites(config)
    }
    names |= {
        f"{source.key}.path": str(source.path).removeprefix(FUNCTION)
        for source in parse_data_sources(config.data)
        if source.is_function
    }
    names |= {
        "algorithm.advantage": algorithm.advantage,
        "algorithm.loss": algorithm.loss,
        "algorithm.train_on": algorithm.train_on,
    }
    environments = {suite.environment_key: suite.environment for suite in get_active_suites(config)}
    for key, environment in {**environments, "environment": config.environment}.items():
        names |= {
            f"{key}.target": environment.target or "",
            f"{key}.agent": environment.agent or "",
        }
        names |= {f"{key}.tools[{index}]": tool for index, tool in enumerate(environment.tools)}
    return names


def _get_reward_functions(config: Config) -> list[_CheckedFunction]:
    """Return the functions that score the responses of a run; none without generated responses."""
    if not config.algorithm.generates_samples:
        return []
    return [
        _CheckedFunction(f"{source.key}.function", source.function, source)
        for source in parse_reward_sources(config.reward)
        if isinstance(source, FunctionSource)
    ]


def _make_training_check(
    config: Config, source: DataSource, expected: ExpectedInputs
) -> Callable[[Record], None] | None:
    """Return the check of the training records of a source; None if they cannot be read yet."""
    # Reading a function's records would run the user's code.
    if source.is_function or is_expected(source.path, expected):
        return None
    is_reward_model = config.algorithm.trainer == "reward_model"
    return partial(
        require_trainer_fields,
        config=config,
        has_labeled_steps=is_reward_model and has_steps(config.data),
    )


def _check_suite(
    config: Config,
    suite: Suite,
    reward_functions: Sequence[_CheckedFunction],
    expected: ExpectedInputs,
) -> list[str]:
    """Check the records of an evaluation suite; see `_check_source`."""
    settings = suite.settings
    functions = reward_functions
    if settings.function is not None:
        functions = [_CheckedFunction(f"{suite.key}.function", settings.function)]
    if settings.path is not None:
        source = DataSource(suite.key, Path(settings.path), fields=settings.fields)
        return _check_source(config, source, require_prompt, functions, expected, skip=False)
    records = [
        Record({"prompt": prompt}, f"{suite.key}.prompts[{index}]")
        for index, prompt in enumerate(settings.prompts)
    ]
    for function in functions:
        function.check(records)
    return []


def _check_source(
    config: Config,
    source: DataSource,
    check: Callable[[Record], None],
    functions: Sequence[_CheckedFunction],
    expected: ExpectedInputs,
    *,
    skip: bool | None = None,
) -> list[str]:
    """Check the first records of a source.

    Args:
        config: The configuration of a run.
        source: The source.
        check: Function that raises BadRecord if a record lacks a field.
        functions: The functions that score responses to the source's prompts.
        expected: See `check_inputs`.
        skip: Whether bad records are skipped; None means `data.skip_bad_records`.

    Returns:
        A notice if only the first records were checked.

    Raises:
        ConfigError: A record is malformed, or lacks a required field.
    """
    if source.is_function or is_expected(source.path, expected):
        return []
    should_skip = config.data.skip_bad_records if skip is None else skip
    records = []
    raw_records = (record for record in open_source(source).read() if not is_blank(record))
    for raw_record in itertools.islice(raw_records, _MAX_RECORDS):
        try:
            record = to_record(raw_record, source.fields, source.layout)
            check(record)
        except BadRecord:
            if not should_skip:
                raise
            continue
        records.append(record)
    for function in functions:
        function.check(records)
    if next(raw_records, None) is None:
        return []
    return [
        f"{source.setting_text}: checked the first {_MAX_RECORDS:,} records; `aligner prepare`"
        " checks all records"
    ]


def find_missing_function(name: str) -> str | None:
    """Return why a custom function `module:callable` does not exist; None if it may exist.

    The module's file is parsed but not imported, because an import may take long and runs the
    user's code. Names that a module creates dynamically count as existing.
    """
    location = split_callable_name(name)
    if location is None or name in {*FUNCTIONS, *RULES}:
        return None
    module, attribute = location
    spec = _find_module(module)
    if spec is None:
        return (
            f"no module named {module!r}; the module must be importable from the working directory"
            " or PYTHONPATH"
        )
    if spec.origin is None or Path(spec.origin).suffix != ".py":
        return None
    try:
        tree = _parse_file(spec.origin)
    except SyntaxError as error:
        return f"{spec.origin}:{error.lineno}: SyntaxError: {error.msg}"

    names = set(_iterate_defined_names(tree))
    if attribute in names or names & {"*", "__getattr__"}:
        return None
    close_names = difflib.get_close_matches(attribute, names, n=1)
    hint = f"; did you mean {module}:{close_names[0]}?" if close_names else ""
    return f"{spec.origin} defines no {attribute!r}{hint}"


def read_form(name: str) -> FunctionForm | None:
    """Return the form of a custom scoring function `module:callable` without an import.

    The result is None if its parameters are not known, for example because a decorator may change
    them, or because the module imports the function from another one.

    Raises:
        ConfigError: The function has none of the supported forms.
    """
    module, attribute = split_callable_name(name) or ("", "")
    spec = _find_module(module)
    if spec is None or spec.origin is None or Path(spec.origin).suffix != ".py":
        return None
    definitions = [
        node for node in _parse_file(spec.origin).body if getattr(node, "name", None) == attribute
    ]
    if len(definitions) != 1:
        return None
    (definition,) = definitions
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    if definition.decorator_list:
        return None
    return find_form(attribute, _make_signature(definition.args))


def _make_signature(arguments: ast.arguments) -> inspect.Signature:
    """Return the signature of a function definition; the default values are None."""
    kind = inspect.Parameter
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    parameters = []
    for index, argument in enumerate(positional):
        is_unnamed = index < len(arguments.posonlyargs)
        parameters.append(
            kind(
                argument.arg,
                kind.POSITIONAL_ONLY if is_unnamed else kind.POSITIONAL_OR_KEYWORD,
                default=kind.empty if index < first_default else None,
            )
        )
    if arguments.vararg is not None:
        parameters.append(kind(arguments.vararg.arg, kind.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        has_default = default is not None
        parameters.append(
            kind(argument.arg, kind.KEYWORD_ONLY, default=None if has_default else kind.empty)
        )
    if arguments.kwarg is not None:
        parameters.append(kind(arguments.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(parameters)


@lru_cache(maxsize=8)
def _parse_file(file: str) -> ast.Module:
    """Return the syntax tree of a Python file; raise SyntaxError if it is not valid."""
    return ast.parse(Path(file).read_bytes(), file)


def _find_module(module: str) -> ModuleSpec | None:
    """Return the specification of a module without importing its packages."""
    path: Sequence[str] | None = None
    spec = None
    parts = module.split(".")
    for index in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: index + 1]), path)
        if spec is None:
            return None
        path = spec.submodule_search_locations or []
    return spec


def _iterate_defined_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that are defined anywhere in a file; `*` for an import of all names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0]
