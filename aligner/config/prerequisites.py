"""Prerequisites of a run: the experiments whose results the run's paths refer to, recursively.

A result is stored in the cache under a hash of all its inputs, so that each result is computed only
once:

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

# Contents of the result files of a run that does not train a model.
_FILES = {PREFERENCES: "preferences", RESPONSES: "responses", TEACHER_SCORES: "teacher scores"}
# Sections that are not part of a result's hash, except for `run.steps`, `run.stop_after` and the
# keys that end a run early.
_NOT_MADE_FROM = ("run", "cluster", "server", "checkpoint", "evaluation", "logging", "dry_run")


@dataclass(frozen=True)
class Prerequisite:
    """An experiment whose result a run, or another prerequisite, uses."""

    name: str
    """Name of the experiment."""
    config: Config
    """Configuration of the experiment, with paths instead of references and a run directory in the
    cache."""
    entry: Path
    """Directory of the experiment in the cache."""

    @property
    def result(self) -> Path:
        """Directory of the result.

        It is a Hugging Face model directory if the experiment trains a model, otherwise a directory
        with `files`.
        """
        return self.entry / "result"

    @property
    def is_complete(self) -> bool:
        """Whether the result exists."""
        return self.result.is_dir()

    @property
    def files(self) -> tuple[str, ...]:
        """File names of the result; empty for a model directory.

        A reference without a file stands for the first file.
        """
        if self.config.algorithm.learns:
            return ()
        if self.config.algorithm.trainer == "teacher_scores":
            return (TEACHER_SCORES,)
        return (RESPONSES,) if self.config.algorithm.pairs == "none" else (PREFERENCES, RESPONSES)

    @property
    def gives(self) -> str:
        """Kind of the result, for messages."""
        if self.files:
            return _FILES[self.files[0]]
        return "a reward model" if self.config.algorithm.trainer == "reward_model" else "a policy"

    def path(self, file: str | None) -> Path:
        """Return the path of a file of the result.

        None stands for the first of `files`, or for the model directory.
        """
        return self.result.joinpath(*([file] if file else self.files[:1]))


@dataclass(frozen=True)
class RunPlan:
    """A run and its prerequisites."""

    config: Config
    """Configuration of the run with paths instead of references, which `run.inputs` records."""
    prerequisites: tuple[Prerequisite, ...]
    """Prerequisites in the order in which they run, including complete ones. The prerequisites of
    a complete result are omitted."""

    @property
    def missing(self) -> tuple[Prerequisite, ...]:
        """Prerequisites without a complete result."""
        return tuple(
            prerequisite for prerequisite in self.prerequisites if not prerequisite.is_complete
        )

    def results(self) -> ExpectedInputs:
        """Return the shape of each missing result by its directory; None unless it is a model."""
        expected: dict[str, ModelShape | None] = {}
        for prerequisite in self.missing:
            expected[str(prerequisite.result)] = _result_shape(prerequisite.config, expected)
        return expected

    def check(self, absent: ExpectedInputs = NOTHING_EXPECTED) -> ModelShape:
        """Check the run, its missing prerequisites and its run directory before anything starts.

        Args:
            absent: Model directories that need not exist.

        Returns:
            The shape of the run's policy.

        Raises:
            ConfigError: The run or a prerequisite has problems. The message of the run has one line
                for each problem, see `aligner.checks.check.check`.
        """
        return check(self.config, self.expected_inputs(absent), resume_problems(self.config))

    def expected_inputs(self, absent: ExpectedInputs = NOTHING_EXPECTED) -> ExpectedInputs:
        """Check the missing prerequisites, and return `absent` together with their results.

        Raises:
            ConfigError: A prerequisite has problems, or its `run.stop_after` is not null.
        """
        expected = dict(absent)
        for prerequisite in self.missing:
            try:
                if prerequisite.config.run.stop_after is not None:
                    raise ConfigError(
                        f"run.stop_after={prerequisite.config.run.stop_after}: must be null in an"
                        " experiment whose result another experiment uses"
                    )
                check(prerequisite.config, expected)
                # Prerequisites that run later may use this result.
                expected[str(prerequisite.result)] = _result_shape(prerequisite.config, expected)
            except ConfigError as error:
                raise ConfigError(
                    f"prerequisite experiment {prerequisite.name}: {error}"
                ) from error
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
    resolved_config = planner.resolve(config, ())
    return RunPlan(resolved_config, tuple(planner.needed(resolved_config)))


class _Planner:
    """Resolves references recursively; each experiment is composed only once."""

    def __init__(self, config_directory: Path | None) -> None:
        self._config_directory = config_directory
        self._known: dict[str, Prerequisite] = {}
        """Resolved experiments by name."""

    def resolve(self, config: Config, dependents: tuple[str, ...]) -> Config:
        """Return the configuration with paths instead of references.

        Args:
            config: Configuration of a run or of a prerequisite.
            dependents: Experiments that depend on this one, outermost first.
        """
        inputs: dict[str, str] = {}

        def path(key: str, text: str) -> str:
            reference = parse_reference(key, text)
            if reference is None:
                return text
            prerequisite = self._prerequisite(reference, config, dependents)
            inputs[key] = text
            return str(prerequisite.path(reference.file))

        resolved_config = map_paths(config, path)
        # The configuration of a resumed run already has paths; run.inputs has their references.
        run = dataclasses.replace(
            resolved_config.run, inputs={**resolved_config.run.inputs, **inputs}
        )
        return dataclasses.replace(resolved_config, run=run)

    def needed(self, config: Config) -> Iterator[Prerequisite]:
        """Yield the prerequisites of a resolved configuration in a topological order.

        Each prerequisite occurs once, after its own prerequisites.
        """
        ordered: dict[Path, Prerequisite] = {}

        def visit(inputs: Config) -> None:
            for key, text in inputs.run.inputs.items():
                reference = parse_reference(key, str(text))
                prerequisite = self._known.get(reference.experiment) if reference else None
                if prerequisite is None or prerequisite.entry in ordered:
                    continue
                if not prerequisite.is_complete:
                    visit(prerequisite.config)
                ordered[prerequisite.entry] = prerequisite

        visit(config)
        yield from ordered.values()

    def _prerequisite(
        self, reference: Reference, user: Config, dependents: tuple[str, ...]
    ) -> Prerequisite:
        """Resolve the experiment of a reference, and check the kind of its result.

        Args:
            reference: Reference to the experiment's result.
            user: Configuration that contains the reference.
            dependents: Experiments that depend on the experiment, outermost first.

        Raises:
            ConfigError: The experiment is invalid, has automatic values, depends on itself, or has
                a result of a kind that the key does not accept.
        """
        setting = f"{reference.key}={reference.text}"
        name = reference.experiment
        if name in dependents:
            cycle = (*dependents[dependents.index(name) :], name)
            raise ConfigError(
                f"{setting}: circular dependency between experiments: {' -> '.join(cycle)}"
            )

        if name not in self._known:
            try:
                config = compose_config([f"experiment={name}"], self._config_directory)
            except ConfigError as error:
                raise ConfigError(f"{setting}: {error}") from error
            if config.run.automatic:
                raise ConfigError(
                    f"{setting}: run.automatic=true is not supported in an experiment whose result"
                    " another experiment uses; set run.automatic=false and all values in its file"
                )
            self._known[name] = self._entry(name, config, (*dependents, name))

        prerequisite = self._known[name]
        kind = _kind(reference, prerequisite)
        allowed = _allowed_kinds(reference.key, user)
        if kind not in allowed:
            raise ConfigError(
                f"{setting}: expected {' or '.join(allowed)}, got {kind} (experiment {name} has"
                f" algorithm.trainer={prerequisite.config.algorithm.trainer})"
            )
        return prerequisite

    def _entry(self, experiment: str, config: Config, dependents: tuple[str, ...]) -> Prerequisite:
        """Resolve an experiment and find its directory in the cache."""
        resolved_config = self.resolve(config, dependents)
        values = dataclasses.asdict(map_paths(config, self._identity))
        content = {section: values[section] for section in values if section not in _NOT_MADE_FROM}
        content["steps"] = [config.run.steps, config.run.stop_after]
        if config.run.ends:  # the last step then depends on the evaluation, too
            checkpoint = config.checkpoint
            content["ends"] = [
                config.run.ends,
                checkpoint.every,
                checkpoint.best_metric,
                values["evaluation"],
            ]
        content["aligner"] = __version__
        for role in ("critic", "engine", "reward", "teacher"):
            del content[role]["ports"]

        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
        entry = cache_directory().absolute() / "experiments" / f"{experiment}-{digest}"
        run = dataclasses.replace(resolved_config.run, name=entry.name, dir=str(entry / "run"))
        return Prerequisite(experiment, dataclasses.replace(resolved_config, run=run), entry)

    def _identity(self, key: str, text: str) -> str:
        """Return the text with which a path enters the hash of a result.

        The text of a reference names the cache entry and the file. The text of an ordinary path
        contains the absolute path, and the path, size and modification time of each file.
        """
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
    """Return the kind of the model or file that a reference stands for.

    Raises:
        ConfigError: The result has no such file.
    """
    if reference.file is None:
        return first.gives
    setting = f"{reference.key}={reference.text}"
    if not first.files:
        raise ConfigError(
            f"{setting}: the result is {first.gives}, but a single file of this result cannot be"
            f" selected; use experiment:{first.name}"
        )
    if reference.file not in first.files:
        raise ConfigError(
            f"{setting}: no such file in the result of experiment {first.name};"
            f" its files: {', '.join(first.files)}"
        )
    return _FILES[reference.file]


def _allowed_kinds(key: str, config: Config) -> tuple[str, ...]:
    """Return the kinds of results that a path key accepts.

    Prompts can be read both from preferences and from responses.
    """
    section = key.partition(".")[0]
    trainer = config.algorithm.trainer
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
    """Return the shape of the model that an experiment trains; None if it trains no model."""
    if not config.algorithm.learns:
        return None
    shape = read_shape(config, expected)
    return first_layers(config, shape) if config.algorithm.trainer == "reward_model" else shape
