"""Prerequisites of a run: the experiments whose results its paths refer to, and their own
prerequisites in turn.

A result is stored in the cache under a hash of everything it is made from, so that each result is
made only once:

    experiments/<experiment>-<hash>/run/      run directory of the experiment
    experiments/<experiment>-<hash>/result/   the result, which exists once it is complete
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aligner.checks.check import check
from aligner.config.compose import compose_config
from aligner.config.resume import resume_problems
from aligner.errors import ConfigError
from aligner.models.model_source import NOTHING_EXPECTED, ExpectedInputs, first_layers, read_shape
from aligner.models.shape import ModelShape
from aligner.paths import PREFERENCES, RESPONSES, TEACHER_SCORES, cache_directory
from aligner.schema import Config
from aligner.schema.references import Reference, map_paths, parse_reference
from aligner.version import __version__

_FILES = {PREFERENCES: "preferences", RESPONSES: "responses", TEACHER_SCORES: "teacher scores"}
"""Contents of the result files of a run that trains nothing."""
_NOT_MADE_FROM = ("run", "cluster", "server", "checkpoint", "evaluation", "logging", "dry_run")
"""Sections that are not part of a result's hash, except for `run.steps`, `run.stop_after` and the
keys that end a run early."""


@dataclass(frozen=True)
class Prerequisite:
    """An experiment whose result is needed."""

    name: str
    """The name of the experiment."""
    config: Config
    """Its configuration, with paths instead of references and a run directory in the cache."""
    entry: Path
    """Its directory in the cache."""

    @property
    def result(self) -> Path:
        """Directory of the result: a Hugging Face model directory if the experiment trains a model,
        otherwise a directory with `files`."""
        return self.entry / "result"

    @property
    def is_complete(self) -> bool:
        """Whether the result exists."""
        return self.result.is_dir()

    @property
    def files(self) -> tuple[str, ...]:
        """The files of the result; empty if it is a model directory. A reference without a file
        means the first one."""
        if self.config.algorithm.learns:
            return ()
        if self.config.algorithm.trainer == "teacher_scores":
            return (TEACHER_SCORES,)
        return (RESPONSES,) if self.config.algorithm.pairs == "none" else (PREFERENCES, RESPONSES)

    @property
    def gives(self) -> str:
        """The kind of the result, for messages."""
        if self.files:
            return _FILES[self.files[0]]
        return "a reward model" if self.config.algorithm.trainer == "reward_model" else "a policy"

    def path(self, file: str | None) -> Path:
        """Return the path that a reference to this experiment, or to a file of its result, stands
        for."""
        return self.result.joinpath(*([file] if file else self.files[:1]))


@dataclass(frozen=True)
class RunPlan:
    """A run and its prerequisites."""

    config: Config
    """Configuration of the run with paths instead of references, which `run.inputs` records."""
    prerequisites: tuple[Prerequisite, ...]
    """In the order in which they run, complete ones included. Prerequisites of a complete result
    are left out."""

    @property
    def missing(self) -> tuple[Prerequisite, ...]:
        """The prerequisites that have not run to completion yet."""
        return tuple(first for first in self.prerequisites if not first.is_complete)

    def results(self) -> ExpectedInputs:
        """Return the directories of the missing results, with the shapes of those that are
        models."""
        expected: dict[str, ModelShape | None] = {}
        for first in self.missing:
            expected[str(first.result)] = _result_shape(first.config, expected)
        return expected

    def check(self, absent: ExpectedInputs = NOTHING_EXPECTED) -> ModelShape:
        """Check the run, its missing prerequisites and its run directory before anything starts.

        Args:
            absent: Model directories that need not exist.

        Returns:
            The shape of the run's policy.

        Raises:
            ConfigError: As `aligner.checks.check.check` does.
        """
        return check(self.config, self.expected_inputs(absent), resume_problems(self.config))

    def expected_inputs(self, absent: ExpectedInputs = NOTHING_EXPECTED) -> ExpectedInputs:
        """Check the missing prerequisites; return `absent` together with their results."""
        expected = dict(absent)
        for first in self.missing:
            try:
                if first.config.run.stop_after is not None:
                    raise ConfigError(
                        f"run.stop_after={first.config.run.stop_after}: must be null in an"
                        " experiment whose result another experiment uses"
                    )
                check(first.config, expected)
                expected[str(first.result)] = _result_shape(first.config, expected)
            except ConfigError as error:
                raise ConfigError(f"prerequisite experiment {first.name}: {error}") from error
        return expected


def plan_run(config: Config, config_directory: Path | None = None) -> RunPlan:
    """Resolve the references of a configuration and find all prerequisites.

    Args:
        config: The configuration of a run, whose paths may be references.
        config_directory: Directory of the user's own experiments, in addition to the built-in ones.

    Raises:
        ConfigError: A reference to an experiment that does not exist, has a result of the wrong
            kind, or depends on itself.
    """
    planner = _Planner(config_directory)
    resolved = planner.resolve(config, ())
    return RunPlan(resolved, tuple(planner.needed(resolved)))


class _Planner:
    def __init__(self, config_directory: Path | None) -> None:
        self._config_directory = config_directory
        self._known: dict[str, Prerequisite] = {}
        """Resolved experiments by name."""

    def resolve(self, config: Config, dependents: tuple[str, ...]) -> Config:
        """Return the configuration with paths instead of references.

        `dependents` are the experiments that need this one, outermost first.
        """
        inputs: dict[str, str] = {}

        def path(key: str, text: str) -> str:
            reference = parse_reference(key, text)
            if reference is None:
                return text
            first = self._prerequisite(reference, config, dependents)
            inputs[key] = text
            return str(first.path(reference.file))

        resolved = map_paths(config, path)
        # The configuration of a resumed run has paths already; run.inputs has their references.
        run = dataclasses.replace(resolved.run, inputs={**resolved.run.inputs, **inputs})
        return dataclasses.replace(resolved, run=run)

    def needed(self, config: Config) -> Iterator[Prerequisite]:
        """Yield the prerequisites of a resolved configuration, each once and after its own."""
        found: dict[Path, Prerequisite] = {}

        def visit(inputs: Config) -> None:
            for key, text in inputs.run.inputs.items():
                reference = parse_reference(key, str(text))
                first = self._known.get(reference.experiment) if reference else None
                if first is None or first.entry in found:
                    continue
                if not first.is_complete:
                    visit(first.config)
                found[first.entry] = first

        visit(config)
        yield from found.values()

    def _prerequisite(
        self, reference: Reference, user: Config, dependents: tuple[str, ...]
    ) -> Prerequisite:
        """Resolve the experiment that `user`, a configuration, refers to; check the kind of its
        result."""
        where, name = f"{reference.key}={reference.text}", reference.experiment
        if name in dependents:
            cycle = (*dependents[dependents.index(name) :], name)
            raise ConfigError(
                f"{where}: circular dependency between experiments: {' -> '.join(cycle)}"
            )

        if name not in self._known:
            try:
                config = compose_config([f"experiment={name}"], self._config_directory)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error
            if config.run.automatic:
                raise ConfigError(
                    f"{where}: run.automatic=true is not supported in an experiment whose result"
                    " another experiment uses; set run.automatic=false and all values in its file"
                )
            self._known[name] = self._entry(name, config, (*dependents, name))

        first = self._known[name]
        kind, allowed = _kind(reference, first), _allowed_kinds(reference.key, user)
        if kind not in allowed:
            raise ConfigError(
                f"{where}: expected {' or '.join(allowed)}, got {kind}"
                f" (experiment {name} has algorithm.trainer={first.config.algorithm.trainer})"
            )
        return first

    def _entry(self, experiment: str, config: Config, dependents: tuple[str, ...]) -> Prerequisite:
        """Resolve an experiment and find its directory in the cache."""
        resolved = self.resolve(config, dependents)
        made_from = dataclasses.asdict(map_paths(config, self._identity))
        content = {
            section: made_from[section] for section in made_from if section not in _NOT_MADE_FROM
        }
        content["steps"] = [config.run.steps, config.run.stop_after]
        if config.run.ends:  # the last step then depends on the evaluation, too
            kept = config.checkpoint
            content["ends"] = [
                config.run.ends,
                kept.every,
                kept.best_metric,
                made_from["evaluation"],
            ]
        content["aligner"] = __version__
        for role in ("critic", "engine", "reward", "teacher"):
            del content[role]["ports"]

        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
        entry = cache_directory().absolute() / "experiments" / f"{experiment}-{digest}"
        run = dataclasses.replace(resolved.run, name=entry.name, dir=str(entry / "run"))
        return Prerequisite(experiment, dataclasses.replace(resolved, run=run), entry)

    def _identity(self, key: str, text: str) -> str:
        """Return what a path contributes to the hash: for a reference, the cache entry and the
        file; otherwise the place, sizes and times of the files."""
        reference = parse_reference(key, text)
        if reference is not None:
            return f"{self._known[reference.experiment].entry.name}/{reference.file}"

        path = Path(text).absolute()
        if not path.exists():
            return text
        files = (
            sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        )
        stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return json.dumps([str(path), stats])


def _kind(reference: Reference, first: Prerequisite) -> str:
    """Return the kind of data that a reference stands for.

    Raises:
        ConfigError: The result has no such file.
    """
    if reference.file is None:
        return first.gives
    where = f"{reference.key}={reference.text}"
    if not first.files:
        raise ConfigError(
            f"{where}: the result is {first.gives}, but a single file of this result cannot be"
            f" selected; use experiment:{first.name}"
        )
    if reference.file not in first.files:
        raise ConfigError(
            f"{where}: no such file in the result of experiment {first.name};"
            f" its files: {', '.join(first.files)}"
        )
    return _FILES[reference.file]


def _allowed_kinds(key: str, config: Config) -> tuple[str, ...]:
    """Return the kinds of results that a path key accepts. Prompts are read from preferences and
    from responses."""
    section, trainer = key.partition(".")[0], config.algorithm.trainer
    if key == "teacher.scores":
        return ("teacher scores",)
    if section == "critic":
        return ("a reward model", "a policy")
    if section in ("model", "teacher", "reward"):
        return ("a reward model",) if section == "reward" else ("a policy",)
    if key == "data.normalization" or (section == "data" and trainer in ("sft", "teacher_scores")):
        return ("responses",)
    if section == "data" and trainer in ("dpo", "reward_model"):
        return ("preferences",)
    return ("preferences", "responses")


def _result_shape(config: Config, expected: ExpectedInputs) -> ModelShape | None:
    """Return the shape of the model that an experiment trains; None if it trains none."""
    if not config.algorithm.learns:
        return None
    shape = read_shape(config, expected)
    return first_layers(config, shape) if config.algorithm.trainer == "reward_model" else shape
