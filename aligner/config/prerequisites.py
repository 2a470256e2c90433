"""Experiments that come before a run: those whose results its paths name, and those that these need
in turn.

A result is kept in the cache under a name that follows from what it is made from, so that it is
made once:

    experiments/<experiment>-<hash>/run/      the run that made it
    experiments/<experiment>-<hash>/result/   the result; there once it is complete

An experiment that builds on itself (`model.previous_round`) has rounds, each with a result of its
own in `experiments/<experiment>-round<N>-<hash>/`. What a round needs is of the same round, where
it has rounds too.
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
from aligner.schema.references import Reference, map_paths, parse_reference, round_name
from aligner.version import __version__

_FILES = {PREFERENCES: "preferences", RESPONSES: "responses", TEACHER_SCORES: "teacher scores"}
"""What the files of a run that trains nothing hold. A model's directory is named as a whole."""
_NOT_MADE_FROM = ("run", "cluster", "server", "checkpoint", "evaluation", "logging", "dry_run")
"""Sections that a result does not depend on, but for how many steps `run` has, and by what it ends
before them."""


@dataclass(frozen=True)
class Prerequisite:
    """An experiment whose result is needed."""

    name: str
    """With `@` and its round where it has rounds."""
    config: Config
    """Its own, with paths instead of references, and its place in the cache as run directory."""
    entry: Path
    """Its directory in the cache."""
    has_rounds: bool
    """Whether it is another one in each round."""

    @property
    def result(self) -> Path:
        """A Hugging Face directory, or one with what a run that trains nothing keeps."""
        return self.entry / "result"

    @property
    def is_complete(self) -> bool:
        """Whether the result is there."""
        return self.result.is_dir()

    @property
    def files(self) -> tuple[str, ...]:
        """The files of its result, the one first that stands for it; none where it is a model's
        directory."""
        if self.config.algorithm.learns:
            return ()
        if self.config.algorithm.trainer == "teacher_scores":
            return (TEACHER_SCORES,)
        return (RESPONSES,) if self.config.algorithm.pairs == "none" else (PREFERENCES, RESPONSES)

    @property
    def gives(self) -> str:
        """What kind of result it has."""
        if self.files:
            return _FILES[self.files[0]]
        return "a reward model" if self.config.algorithm.trainer == "reward_model" else "a policy"

    def path(self, file: str | None) -> Path:
        """What a reference to it stands for; files are named by themselves, not by their
        directory."""
        return self.result.joinpath(*([file] if file else self.files[:1]))


@dataclass(frozen=True)
class RunPlan:
    """A run and what comes before it."""

    config: Config
    """With paths instead of references; `run.inputs` says which were some."""
    prerequisites: tuple[Prerequisite, ...]
    """In the order in which they are to run: those whose results exist, and those that are missing.
    What is needed only for a result that exists is not among them."""

    @property
    def missing(self) -> tuple[Prerequisite, ...]:
        """Those that are still to be run."""
        return tuple(first for first in self.prerequisites if not first.is_complete)

    def results(self) -> ExpectedInputs:
        """The directories of results that are still to be made, with the shapes of those that are
        models."""
        expected: dict[str, ModelShape | None] = {}
        for first in self.missing:
            expected[str(first.result)] = _result_shape(first.config, expected)
        return expected

    def check(self, absent: ExpectedInputs = NOTHING_EXPECTED) -> ModelShape:
        """Check all that is to run as far as that can be done before it does, and that the run
        directory is free for it; returns the shape of the run's policy.

        `absent` are model directories that need not be there. Raises ConfigError as
        `aligner.checks.check.check` does.
        """
        return check(self.config, self.expected_inputs(absent), resume_problems(self.config))

    def expected_inputs(self, absent: ExpectedInputs = NOTHING_EXPECTED) -> ExpectedInputs:
        """The `absent` directories and the results that are still to be made, after the checks of
        what makes them."""
        expected = dict(absent)
        for first in self.missing:
            try:
                if first.config.run.stop_after is not None:
                    raise ConfigError(
                        f"run.stop_after={first.config.run.stop_after}: what others need runs to"
                        " its end"
                    )
                check(first.config, expected)
                expected[str(first.result)] = _result_shape(first.config, expected)
            except ConfigError as error:
                raise ConfigError(f"experiment {first.name}, which comes first: {error}") from error
        return expected


def plan_run(config: Config, config_directory: Path | None = None) -> RunPlan:
    """What must run, from a configuration whose paths may be references.

    `config_directory` holds the user's own experiments, beside the built-in ones. Raises
    ConfigError for a reference to what does not exist, is of another kind than the key needs, or
    needs itself.
    """
    planner = _Planner(config_directory)
    begun = planner.begun(config, ())
    resolved, has_rounds = planner.resolve(begun, ())
    if config.run.round > 1 and not (has_rounds or config.model.previous_round):
        raise ConfigError(f"run.round={config.run.round}: {_without_rounds(config.run.experiment)}")
    return RunPlan(resolved, tuple(planner.needed(resolved)))


class _Planner:
    def __init__(self, config_directory: Path | None) -> None:
        self._config_directory = config_directory
        self._known: dict[tuple[str, int], Prerequisite] = {}
        """By experiment and round; of one without rounds the first alone."""

    def begun(self, config: Config, above: tuple[str, ...]) -> Config:
        """The configuration with the model that its round begins with: from the second on what the
        one before has left."""
        model, before = config.model, config.run.round - 1
        if model.previous_round is None:
            return config
        reference = parse_reference("model.previous_round", model.previous_round)
        if reference is None or reference.round or reference.file:
            raise ConfigError(
                f"model.previous_round={model.previous_round}: expected experiment:NAME"
            )
        model = dataclasses.replace(model, previous_round=None)
        if before:
            reference = dataclasses.replace(reference, round=before)
            self._prerequisite(reference, config, above)
            model = dataclasses.replace(model, source="directory", path=reference.text)
        return dataclasses.replace(config, model=model)

    def resolve(self, config: Config, above: tuple[str, ...]) -> tuple[Config, bool]:
        """The configuration with paths instead of references, and whether what it needs is another
        in each round.

        `above` are the experiments that need it, outermost first.
        """
        inputs, has_rounds = {}, False

        def path(key: str, text: str) -> str:
            nonlocal has_rounds
            reference = parse_reference(key, text)
            if reference is None:
                return text
            first = self._prerequisite(reference, config, above)
            has_rounds |= first.has_rounds and reference.round is None
            number = (
                config.run.round
                if first.has_rounds and reference.round is None
                else reference.round
            )
            inputs[key] = dataclasses.replace(reference, round=number).text
            return str(first.path(reference.file))

        resolved = map_paths(config, path)
        # A resumed run's configuration has paths already, and says of them where they came from.
        run = dataclasses.replace(resolved.run, inputs={**resolved.run.inputs, **inputs})
        return dataclasses.replace(resolved, run=run), has_rounds

    def needed(self, config: Config) -> Iterator[Prerequisite]:
        """What a resolved configuration needs, each once, after what it needs itself."""
        found: dict[Path, Prerequisite] = {}

        def visit(inputs: Config) -> None:
            for key, text in inputs.run.inputs.items():
                reference = parse_reference(key, str(text))
                first = (
                    None
                    if reference is None
                    else self._known.get((reference.experiment, reference.round or 1))
                )
                if first is None or first.entry in found:
                    continue
                if not first.is_complete:
                    visit(first.config)
                found[first.entry] = first

        visit(config)
        yield from found.values()

    def _prerequisite(
        self, reference: Reference, user: Config, above: tuple[str, ...]
    ) -> Prerequisite:
        where = f"{reference.key}={reference.text}"
        # Those before it are planned before it, so that any number of rounds is no deeper than one.
        for number in range(1, (reference.round or user.run.round) + 1):
            first = self._round(reference.experiment, number, where, above)
            if not first.has_rounds:
                break
        if reference.round is not None and not first.has_rounds:
            raise ConfigError(f"{where}: {_without_rounds(reference.experiment)}")
        given, wanted = _given(reference, first), _wanted(reference.key, user)
        if given not in wanted:
            trainer = first.config.algorithm.trainer
            raise ConfigError(
                f"{where}: must give {' or '.join(wanted)}, but algorithm.trainer={trainer} gives"
                f" {given}"
            )
        return first

    def _round(
        self, experiment: str, number: int, where: str, above: tuple[str, ...]
    ) -> Prerequisite:
        """A round of an experiment; the only one of one without rounds."""
        name = round_name(experiment, number if number > 1 else None)
        if name in above:
            raise ConfigError(
                f"{where}: experiments that need each other:"
                f" {' -> '.join((*above[above.index(name) :], name))}"
            )
        first = self._known.get((experiment, number))
        if first is None:
            try:
                config = compose_config(
                    [f"experiment={experiment}", f"run.round={number}"], self._config_directory
                )
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error
            if config.run.automatic:
                raise ConfigError(
                    f"{where}: run.automatic=true chooses at launch; give it its values, and"
                    " run.automatic=false"
                )
            first = self._known[experiment, number] = self._entry(
                experiment, config, (*above, name)
            )
        return first

    def _entry(self, experiment: str, config: Config, above: tuple[str, ...]) -> Prerequisite:
        begun = self.begun(config, above)
        resolved, has_rounds = self.resolve(begun, above)
        has_rounds |= config.model.previous_round is not None
        number = config.run.round if has_rounds else None
        made_from = dataclasses.asdict(
            map_paths(begun, lambda key, text: self._identity(key, text, config.run.round))
        )
        content = {
            section: made_from[section] for section in made_from if section not in _NOT_MADE_FROM
        }
        content["steps"] = [config.run.steps, config.run.stop_after]
        if config.run.ends:  # then it depends on what is measured, too
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
        place = experiment if number is None else f"{experiment}-round{number}"
        entry = cache_directory().absolute() / "experiments" / f"{place}-{digest}"
        run = dataclasses.replace(resolved.run, name=entry.name, dir=str(entry / "run"))
        return Prerequisite(
            round_name(experiment, number),
            dataclasses.replace(resolved, run=run),
            entry,
            has_rounds,
        )

    def _identity(self, key: str, text: str, number: int) -> str:
        """What a path stands for: an experiment's result by what it is made from, files by their
        place, size and time."""
        reference = parse_reference(key, text)
        if reference is not None:
            first = self._known.get((reference.experiment, reference.round or number))
            first = first or self._known[reference.experiment, 1]
            return f"{first.entry.name}/{reference.file}"
        path = Path(text).absolute()
        if not path.exists():
            return text
        files = (
            sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        )
        stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return json.dumps([str(path), stats])


def _given(reference: Reference, first: Prerequisite) -> str:
    """What a reference stands for. Raises ConfigError for a file that the result does not have."""
    if reference.file is None:
        return first.gives
    if not first.files:
        raise ConfigError(
            f"{reference.key}={reference.text}: {first.gives} is named as a whole:"
            f" experiment:{first.name}"
        )
    if reference.file not in first.files:
        raise ConfigError(
            f"{reference.key}={reference.text}: no such file in its result; it has"
            f" {', '.join(first.files)}"
        )
    return _FILES[reference.file]


def _wanted(key: str, config: Config) -> tuple[str, ...]:
    """Of which kinds a path that is a key's value must be; prompts can be had from whatever has
    some."""
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


def _without_rounds(experiment: str) -> str:
    return (
        f"{experiment} has no rounds, for neither it nor what it needs has model.previous_round,"
        " which says whose last round the next one begins with"
    )


def _result_shape(config: Config, expected: ExpectedInputs) -> ModelShape | None:
    """The shape of the model that an experiment leaves; None where it leaves none."""
    if not config.algorithm.learns:
        return None
    shape = read_shape(config, expected)
    return first_layers(config, shape) if config.algorithm.trainer == "reward_model" else shape
