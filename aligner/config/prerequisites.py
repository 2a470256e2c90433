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
from aligner.config.resume import find_resume_problems
from aligner.errors import ConfigError
from aligner.models.model_source import NOTHING_EXPECTED, ExpectedInputs, first_layers, read_shape
from aligner.models.shape import ModelShape
from aligner.paths import PREFERENCES, RESPONSES, TEACHER_SCORES, get_cache_directory
from aligner.schema import Config
from aligner.schema.references import Reference, map_paths, parse_reference
from aligner.version import __version__

# Contents of the result files of a run that does not train a model.
_RESULT_KINDS = {
    PREFERENCES: "preferences",
    RESPONSES: "responses",
    TEACHER_SCORES: "teacher scores",
}
# Sections that are not part of a result's hash, except for `run.steps`, `run.stop_after` and the
# keys that end a run early.
_UNHASHED_SECTIONS = (
    "run",
    "cluster",
    "server",
    "checkpoint",
    "evaluation",
    "logging",
    "profile",
    "dry_run",
)


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
        if self.config.algorithm.trains_model:
            return ()
        if self.config.algorithm.trainer == "teacher_scores":
            return (TEACHER_SCORES,)
        return (RESPONSES,) if self.config.algorithm.pairs == "none" else (PREFERENCES, RESPONSES)

    @property
    def result_kind(self) -> str:
        """Kind of the result, for messages."""
        if self.files:
            return _RESULT_KINDS[self.files[0]]
        return "a reward model" if self.config.algorithm.trainer == "reward_model" else "a policy"

    def get_path(self, file: str | None) -> Path:
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
    def missing_prerequisites(self) -> tuple[Prerequisite, ...]:
        """Prerequisites without a complete result."""
        return tuple(
            prerequisite for prerequisite in self.prerequisites if not prerequisite.is_complete
        )

    def get_result_shapes(self) -> ExpectedInputs:
        """Return the shape of each missing result by its directory; None unless it is a model."""
        expected: dict[str, ModelShape | None] = {}
        for prerequisite in self.missing_prerequisites:
            expected[str(prerequisite.result)] = _get_result_shape(prerequisite.config, expected)
        return expected

    def check(self, expected: ExpectedInputs = NOTHING_EXPECTED) -> ModelShape:
        """Check the run, its missing prerequisites and its run directory before anything starts.

        Args:
            expected: Model directories that need not exist.

        Returns:
            The shape of the run's policy.

        Raises:
            ConfigError: The run or a prerequisite has problems. The message of the run has one line
                for each problem, see `aligner.checks.check.check`.
        """
        return check(
            self.config, self.check_prerequisites(expected), find_resume_problems(self.config)
        )

    def check_prerequisites(self, expected: ExpectedInputs = NOTHING_EXPECTED) -> ExpectedInputs:
        """Check the missing prerequisites, and return `expected` together with their results.

        Raises:
            ConfigError: A prerequisite has problems, or its `run.stop_after` is not null.
        """
        all_expected = dict(expected)
        for prerequisite in self.missing_prerequisites:
            try:
                if prerequisite.config.run.stop_after is not None:
                    raise ConfigError(
                        f"run.stop_after={prerequisite.config.run.stop_after}: must be null in an"
                        " experiment whose result another experiment uses"
                    )
                check(prerequisite.config, all_expected)
                # Prerequisites that run later may use this result.
                all_expected[str(prerequisite.result)] = _get_result_shape(
                    prerequisite.config, all_expected
                )
            except ConfigError as error:
                raise ConfigError(
                    f"prerequisite experiment {prerequisite.name}: {error}"
                ) from error
        return all_expected


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
    return RunPlan(resolved_config, tuple(planner.order_prerequisites(resolved_config)))


class _Planner:
    """Resolves references recursively; each experiment is composed only once."""

    def __init__(self, config_directory: Path | None) -> None:
        self._config_directory = config_directory
        self._prerequisites_by_name: dict[str, Prerequisite] = {}
        """Resolved experiments by name."""

    def resolve(self, config: Config, dependents: tuple[str, ...]) -> Config:
        """Return the configuration with paths instead of references.

        Args:
            config: Configuration of a run or of a prerequisite.
            dependents: Experiments that depend on this one, outermost first.
        """
        inputs: dict[str, str] = {}

        def replace_reference(key: str, text: str) -> str:
            reference = parse_reference(key, text)
            if reference is None:
                return text
            prerequisite = self._resolve_reference(reference, config, dependents)
            inputs[key] = text
            return str(prerequisite.get_path(reference.file))

        resolved_config = map_paths(config, replace_reference)
        # The configuration of a resumed run already has paths; run.inputs has their references.
        run = dataclasses.replace(
            resolved_config.run, inputs={**resolved_config.run.inputs, **inputs}
        )
        return dataclasses.replace(resolved_config, run=run)

    def order_prerequisites(self, config: Config) -> Iterator[Prerequisite]:
        """Yield the prerequisites of a resolved configuration in a topological order.

        Each prerequisite occurs once, after its own prerequisites.
        """
        ordered_prerequisites: dict[Path, Prerequisite] = {}

        def visit(dependent: Config) -> None:
            """Append the prerequisites of an experiment, each one after its own prerequisites."""
            for key, text in dependent.run.inputs.items():
                reference = parse_reference(key, str(text))
                prerequisite = (
                    self._prerequisites_by_name.get(reference.experiment) if reference else None
                )
                if prerequisite is None or prerequisite.entry in ordered_prerequisites:
                    continue
                # The prerequisites of a complete result are not needed any more.
                if not prerequisite.is_complete:
                    visit(prerequisite.config)
                ordered_prerequisites[prerequisite.entry] = prerequisite

        visit(config)
        yield from ordered_prerequisites.values()

    def _resolve_reference(
        self, reference: Reference, referring_config: Config, dependents: tuple[str, ...]
    ) -> Prerequisite:
        """Resolve the experiment of a reference, and check the kind of its result.

        Args:
            reference: Reference to the experiment's result.
            referring_config: Configuration that contains the reference.
            dependents: Experiments that depend on the experiment, outermost first.

        Raises:
            ConfigError: The experiment is invalid, has automatic values, depends on itself, or has
                a result of a kind that the key does not accept.
        """
        setting = f"{reference.key}={reference.text}"
        name = reference.experiment
        # `dependents` is the path of the depth-first search.
        if name in dependents:
            cycle = (*dependents[dependents.index(name) :], name)
            raise ConfigError(
                f"{setting}: circular dependency between experiments: {' -> '.join(cycle)}"
            )

        if name not in self._prerequisites_by_name:
            try:
                config = compose_config([f"experiment={name}"], self._config_directory)
            except ConfigError as error:
                raise ConfigError(f"{setting}: {error}") from error
            if config.run.automatic:
                raise ConfigError(
                    f"{setting}: run.automatic=true is not supported in an experiment whose result"
                    " another experiment uses; set run.automatic=false and all values in its file"
                )
            self._prerequisites_by_name[name] = self._resolve_experiment(
                name, config, (*dependents, name)
            )

        prerequisite = self._prerequisites_by_name[name]
        kind = _get_kind(reference, prerequisite)
        allowed = _get_allowed_kinds(reference.key, referring_config)
        if kind not in allowed:
            raise ConfigError(
                f"{setting}: expected {' or '.join(allowed)}, got {kind} (experiment {name} has"
                f" algorithm.trainer={prerequisite.config.algorithm.trainer})"
            )
        return prerequisite

    def _resolve_experiment(
        self, experiment: str, config: Config, dependents: tuple[str, ...]
    ) -> Prerequisite:
        """Resolve an experiment and find its directory in the cache."""
        # The paths of the unresolved configuration enter the hash as fingerprints: the paths of
        # references contain the location of the cache, which must not change the hash.
        resolved_config = self.resolve(config, dependents)
        values = dataclasses.asdict(map_paths(config, self._fingerprint))
        content = {
            section: values[section] for section in values if section not in _UNHASHED_SECTIONS
        }
        content["steps"] = [config.run.steps, config.run.stop_after]
        if config.run.end_conditions:  # the last step then depends on the evaluation, too
            checkpoint = config.checkpoint
            content["ends"] = [
                config.run.end_conditions,
                checkpoint.every,
                checkpoint.best_metric,
                values["evaluation"],
            ]
        content["aligner"] = __version__
        for role in ("critic", "engine", "reward", "teacher"):
            del content[role]["ports"]  # ports do not change the result

        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
        entry = get_cache_directory().absolute() / "experiments" / f"{experiment}-{digest}"
        run = dataclasses.replace(resolved_config.run, name=entry.name, dir=str(entry / "run"))
        return Prerequisite(experiment, dataclasses.replace(resolved_config, run=run), entry)

    def _fingerprint(self, key: str, text: str) -> str:
        """Return the text with which a path enters the hash of a result.

        The text of a reference names the cache entry and the file. The text of an ordinary path
        contains the absolute path, and the path, size and modification time of each file.
        """
        reference = parse_reference(key, text)
        if reference is not None:
            return (
                f"{self._prerequisites_by_name[reference.experiment].entry.name}/{reference.file}"
            )

        path = Path(text).absolute()
        if not path.exists():
            return text
        # Hashing the content of large models and data would take minutes.
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file())
        else:
            files = [path]
        stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return json.dumps([str(path), stats])


def _get_kind(reference: Reference, prerequisite: Prerequisite) -> str:
    """Return the kind of the model or file that a reference stands for.

    Raises:
        ConfigError: The result has no such file.
    """
    if reference.file is None:
        return prerequisite.result_kind
    setting = f"{reference.key}={reference.text}"
    if not prerequisite.files:
        raise ConfigError(
            f"{setting}: the result is {prerequisite.result_kind}, but a single file of this result"
            f" cannot be selected; use experiment:{prerequisite.name}"
        )
    if reference.file not in prerequisite.files:
        raise ConfigError(
            f"{setting}: no such file in the result of experiment {prerequisite.name};"
            f" its files: {', '.join(prerequisite.files)}"
        )
    return _RESULT_KINDS[reference.file]


def _get_allowed_kinds(key: str, config: Config) -> tuple[str, ...]:
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


def _get_result_shape(config: Config, expected: ExpectedInputs) -> ModelShape | None:
    """Return the shape of the model that an experiment trains; None if it trains no model."""
    if not config.algorithm.trains_model:
        return None
    shape = read_shape(config, expected)
    return first_layers(config, shape) if config.algorithm.trainer == "reward_model" else shape
