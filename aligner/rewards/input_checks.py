"""Checks of records and reward functions that `aligner validate` makes without importing torch.

`prepare` checks all records before a run, and imports the functions.
"""

import ast
import difflib
import itertools
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from aligner.data.record_sources import is_blank
from aligner.data.records import BadRecord, Record, open_source, to_record
from aligner.errors import ConfigError
from aligner.models.model_source import ExpectedInputs, is_expected
from aligner.rewards.verifiers import CHECKED_VERIFIERS, require_fields
from aligner.schema import Config
from aligner.schema.data_sources import DataSource, parse_data_sources
from aligner.schema.evaluation_suites import parse_evaluation_suites
from aligner.schema.reward_sources import FunctionSource, parse_reward_sources
from aligner.schema.scoring_functions import FUNCTIONS, RULES
from aligner.values import split_callable_name

_MAX_RECORDS = 1_000


def check_inputs(config: Config, expected: ExpectedInputs) -> list[str]:
    """Check the first records of each training source, and that custom functions exist.

    Args:
        config: The configuration of a run.
        expected: Paths that need not exist yet; their records are not checked.

    Returns:
        A notice for each source of which only the first records were checked.

    Raises:
        ConfigError: A record is malformed, or lacks a field that the run requires; or a reward
            function does not exist.
    """
    functions = _get_reward_functions(config)
    suites = parse_evaluation_suites(config)
    names = {f"{source.key}.function": source.function for source in functions}
    names |= {f"{suite.key}.function": suite.settings.function or "" for suite in suites}
    for key, name in names.items():
        if problem := find_missing_function(name):
            raise ConfigError(f"{key}={name}: {problem}")

    notices = []
    for source in parse_data_sources(config.data):
        # Reading a function's records would run the user's code.
        if source.is_function or is_expected(source.path, expected):
            continue
        records, has_more = _read_first_records(config, source)
        for function in functions:
            if function.function in CHECKED_VERIFIERS:
                scored = [
                    (record.origin, record.values)
                    for record in records
                    if function.should_score(record.values)
                ]
                key = f"{function.key}.function={function.function}"
                require_fields(function.function, key, scored)
        if has_more:
            notices.append(
                f"{source.setting_text}: checked the first {_MAX_RECORDS:,} records; `aligner"
                " prepare` checks all records"
            )
    return notices


def _get_reward_functions(config: Config) -> list[FunctionSource]:
    """Return the functions that score the responses of a run; none without generated responses."""
    if not config.algorithm.generates_samples:
        return []
    sources = parse_reward_sources(config.reward)
    return [source for source in sources if isinstance(source, FunctionSource)]


def _read_first_records(config: Config, source: DataSource) -> tuple[list[Record], bool]:
    """Return the first records of a source, and whether the source has more records.

    Raises:
        BadRecord: A record is malformed, and `data.skip_bad_records` is false.
    """
    records = []
    raw_records = (record for record in open_source(source).read() if not is_blank(record))
    for raw_record in itertools.islice(raw_records, _MAX_RECORDS):
        try:
            record = to_record(raw_record, source.fields)
            if config.algorithm.generates_samples:
                _require_prompt(record)
        except BadRecord:
            if not config.data.skip_bad_records:
                raise
            continue
        records.append(record)
    return records, next(raw_records, None) is not None


def _require_prompt(record: Record) -> None:
    """Raise BadRecord if a record has neither a text nor messages as its prompt."""
    if record.has_messages:
        record.get_list("prompt" if "prompt" in record.values else "messages")
    else:
        record.get_text("prompt")


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
        tree = ast.parse(Path(spec.origin).read_bytes(), spec.origin)
    except SyntaxError as error:
        return f"{spec.origin}:{error.lineno}: SyntaxError: {error.msg}"

    names = set(_iterate_defined_names(tree))
    if attribute in names or names & {"*", "__getattr__"}:
        return None
    close_names = difflib.get_close_matches(attribute, names, n=1)
    hint = f"; did you mean {module}:{close_names[0]}?" if close_names else ""
    return f"{spec.origin} defines no {attribute!r}{hint}"


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
