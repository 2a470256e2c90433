"""Experiments that come before a run: those whose results its paths name, and those that these need in turn.

A result is kept in the cache under a name that follows from what it is made from, so that it is made once:

    experiments/<experiment>-<hash>/run/      the run that made it
    experiments/<experiment>-<hash>/result/   the result; there once it is complete
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
from aligner.models.model_source import NOTHING_EXPECTED, ExpectedInputs, critic_shape, read_shape
from aligner.models.shape import ModelShape
from aligner.paths import PREFERENCES, RESPONSES, cache_directory
from aligner.schema import Config
from aligner.schema.references import Reference, map_paths, parse_reference
from aligner.version import __version__

_GIVES = {"reward_model": "a reward model", "preferences": "preferences"}
_FILES = {PREFERENCES: "preferences", RESPONSES: "responses"}
"""What the files of preferences hold. A model's directory is named as a whole."""
_NOT_MADE_FROM = ("run", "cluster", "server", "checkpoint", "evaluation", "logging", "dry_run")
"""Sections that a result does not depend on, but for how many steps `run` has, and by what it ends before them."""


@dataclass(frozen=True)
class Prerequisite:
    """An experiment whose result is needed."""

    name: str
    config: Config
    """Its own, with paths instead of references, and its place in the cache as run directory."""
    entry: Path
    """Its directory in the cache."""

    @property
    def result(self) -> Path:
        """A Hugging Face directory, or one with the files of preferences."""
        return self.entry / "result"

    @property
    def is_complete(self) -> bool:
        """Whether the result is there."""
        return self.result.is_dir()

    @property
    def gives(self) -> str:
        """What kind of result it has."""
        return _GIVES.get(self.config.algorithm.trainer, "a policy")

    def path(self, file: str | None) -> Path:
        """What a reference to it stands for; preferences are named by themselves, not by their directory."""
        if file is None and self.gives == "preferences":
            file = PREFERENCES
        return self.result if file is None else self.result / file


@dataclass(frozen=True)
class RunPlan:
    """A run and what comes before it."""

    config: Config
    """With paths instead of references; `run.inputs` says which were some."""
    prerequisites: tuple[Prerequisite, ...]
    """In the order in which they are to run: those whose results exist, and those that are missing. What is needed only
    for a result that exists is not among them."""

    @property
    def missing(self) -> tuple[Prerequisite, ...]:
        """Those that are still to be run."""
        return tuple(first for first in self.prerequisites if not first.is_complete)

    def results(self) -> ExpectedInputs:
        """The directories of results that are still to be made, with the shapes of those that are models."""
        expected: dict[str, ModelShape | None] = {}
        for first in self.missing:
            expected[str(first.result)] = _result_shape(first.config, expected)
        return expected

    def check(self, absent: ExpectedInputs = NOTHING_EXPECTED) -> ModelShape:
        """Check all that is to run as far as that can be done before it does, and that the run directory is free for it;
        returns the shape of the run's policy.

        `absent` are model directories that need not be there. Raises ConfigError as `aligner.checks.check.check` does.
        """
        return check(self.config, self.expected_inputs(absent), resume_problems(self.config))

    def expected_inputs(self, absent: ExpectedInputs = NOTHING_EXPECTED) -> ExpectedInputs:
        """The `absent` directories and the results that are still to be made, after the checks of what makes them."""
        expected = dict(absent)
        for first in self.missing:
            try:
                if first.config.run.stop_after is not None:
                    raise ConfigError(f"run.stop_after={first.config.run.stop_after}: what others need runs to its end")
                check(first.config, expected)
                expected[str(first.result)] = _result_shape(first.config, expected)
            except ConfigError as error:
                raise ConfigError(f"experiment {first.name}, which comes first: {error}") from error
        return expected


def plan_run(config: Config, config_directory: Path | None = None) -> RunPlan:
    """What must run, from a configuration whose paths may be references.

    `config_directory` holds the user's own experiments, beside the built-in ones. Raises ConfigError for a reference to
    what does not exist, is of another kind than the key needs, or needs itself.
    """
    planner = _Planner(config_directory)
    resolved = planner.resolve(config, ())
    return RunPlan(resolved, tuple(planner.needed(resolved)))


class _Planner:
    def __init__(self, config_directory: Path | None) -> None:
        self._config_directory = config_directory
        self._known: dict[str, Prerequisite] = {}

    def resolve(self, config: Config, above: tuple[str, ...]) -> Config:
        """The configuration with paths instead of references; `above` are the experiments that need it, outermost first."""
        inputs = {}

        def path(key: str, text: str) -> str:
            reference = parse_reference(key, text)
            if reference is None:
                return text
            inputs[key] = text
            return str(self._prerequisite(reference, config, above).path(reference.file))

        resolved = map_paths(config, path)
        # A resumed run's configuration has paths already, and says of them where they came from.
        run = dataclasses.replace(resolved.run, inputs={**resolved.run.inputs, **inputs})
        return dataclasses.replace(resolved, run=run)

    def needed(self, config: Config) -> Iterator[Prerequisite]:
        """What a resolved configuration needs, each once, after what it needs itself."""
        found: dict[str, Prerequisite] = {}

        def visit(inputs: Config) -> None:
            for key, text in inputs.run.inputs.items():
                reference = parse_reference(key, str(text))
                first = None if reference is None else self._known.get(reference.experiment)
                if first is None or first.name in found:
                    continue
                if not first.is_complete:
                    visit(first.config)
                found[first.name] = first

        visit(config)
        yield from found.values()

    def _prerequisite(self, reference: Reference, user: Config, above: tuple[str, ...]) -> Prerequisite:
        name, where = reference.experiment, f"{reference.key}={reference.text}"
        if name in above:
            raise ConfigError(f"{where}: experiments that need each other: {' -> '.join((*above[above.index(name) :], name))}")
        first = self._known.get(name)
        if first is None:
            try:
                config = compose_config([f"experiment={name}"], self._config_directory)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error
            if config.run.automatic:
                raise ConfigError(
                    f"{where}: run.automatic=true chooses at launch; give it its values, and run.automatic=false"
                )
            first = self._known[name] = self._entry(name, config, (*above, name))
        given, wanted = _given(reference, first), _wanted(reference.key, user)
        if given not in wanted:
            trainer = first.config.algorithm.trainer
            raise ConfigError(f"{where}: must give {' or '.join(wanted)}, but algorithm.trainer={trainer} gives {given}")
        return first

    def _entry(self, name: str, config: Config, above: tuple[str, ...]) -> Prerequisite:
        resolved = self.resolve(config, above)
        made_from = dataclasses.asdict(map_paths(config, self._identity))
        content = {section: made_from[section] for section in made_from if section not in _NOT_MADE_FROM}
        content["steps"] = [config.run.steps, config.run.stop_after]
        if config.run.ends:  # then it depends on what is measured, too
            kept = config.checkpoint
            content["ends"] = [config.run.ends, kept.every, kept.best_metric, made_from["evaluation"]]
        content["aligner"] = __version__
        for role in ("critic", "engine", "reward"):
            del content[role]["ports"]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
        entry = cache_directory().absolute() / "experiments" / f"{name}-{digest}"
        run = dataclasses.replace(resolved.run, name=entry.name, dir=str(entry / "run"))
        return Prerequisite(name, dataclasses.replace(resolved, run=run), entry)

    def _identity(self, key: str, text: str) -> str:
        """What a path stands for: an experiment's result by what it is made from, files by their place, size and time."""
        reference = parse_reference(key, text)
        if reference is not None:
            first = self._known[reference.experiment]
            return f"{first.entry.name}/{reference.file}"
        path = Path(text).absolute()
        if not path.exists():
            return text
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return json.dumps([str(path), stats])


def _given(reference: Reference, first: Prerequisite) -> str:
    """What a reference stands for. Raises ConfigError for a file that the result does not have."""
    if reference.file is None:
        return first.gives
    if first.gives != "preferences":
        raise ConfigError(f"{reference.key}={reference.text}: {first.gives} is named as a whole: experiment:{first.name}")
    if reference.file not in _FILES:
        raise ConfigError(f"{reference.key}={reference.text}: no such file in its result; it has {', '.join(_FILES)}")
    return _FILES[reference.file]


def _wanted(key: str, config: Config) -> tuple[str, ...]:
    """Of which kinds a path that is a key's value must be; prompts can be had from whatever has some."""
    section, trainer = key.partition(".")[0], config.algorithm.trainer
    if section in ("model", "reward"):
        return ("a policy",) if section == "model" else ("a reward model",)
    if key == "data.normalization" or (section == "data" and trainer == "sft"):
        return ("responses",)
    if section == "data" and trainer in ("dpo", "reward_model"):
        return ("preferences",)
    return ("preferences", "responses")


def _result_shape(config: Config, expected: ExpectedInputs) -> ModelShape | None:
    """The shape of the model that an experiment leaves; None where it leaves none."""
    if config.algorithm.trainer == "preferences":
        return None
    shape = read_shape(config, expected)
    return critic_shape(config, shape) if config.algorithm.trainer == "reward_model" else shape
