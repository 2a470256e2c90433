"""Compare a source tree or an installed package of TensorRT-LLM with the table of everything that
aligner uses of it, `tests/engines/tensorrt_llm/contract.py`, and print the differences.

    python -m benchmarks.tensorrt_llm_drift ~/TensorRT-LLM   # a checkout, or a package directory
    python -m benchmarks.tensorrt_llm_drift                  # the package in this environment

The files are parsed and not imported, so neither a GPU nor TensorRT-LLM's dependencies are needed.
The table's release follows from `tensorrt_llm/version.py`, or from --release. Newer releases are
compared with the newest release of the table. An entry whose files are absent is reported as not
compared. The exit code is 1 if there are differences, or if nothing was compared.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engines.tensorrt_llm import contract

PACKAGE = "tensorrt_llm"
_UNKNOWN = object()
"""Default that is not a literal."""


@dataclass
class Differences:
    """Results of a comparison."""

    found: list[str] = field(default_factory=list)
    """Differences between the package and the table."""
    not_compared: list[str] = field(default_factory=list)
    """Entries whose files do not exist."""
    compared: int = 0
    """Number of entries that were compared."""


class SourceTree:
    """The parsed files of a package."""

    def __init__(self, package: Path) -> None:
        """
        Args:
            package: Directory of the package `tensorrt_llm`.
        """
        self._root = package.parent
        self._modules: dict[str, ast.Module | None] = {}

    def parse(self, file: str) -> ast.Module | None:
        """Return the syntax tree of a file, or None if the file does not exist."""
        if file not in self._modules:
            path = self._root / file
            self._modules[file] = (
                ast.parse(path.read_text(encoding="utf-8"), str(path)) if path.is_file() else None
            )
        return self._modules[file]

    def find_class(self, name: str, files: Sequence[str]) -> ast.ClassDef | None:
        """Return the definition of a class in one of the files, also under a second name."""
        statements = [
            statement
            for file in files
            if (module := self.parse(file)) is not None
            for statement in module.body
        ]
        for statement in statements:
            if isinstance(statement, ast.ClassDef) and statement.name == name:
                return statement
        for statement in statements:
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name):
                names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
                if name in names and statement.value.id != name:
                    return self.find_class(statement.value.id, files)
        return None

    def list_classes(self, definition: ast.ClassDef, files: Sequence[str]) -> list[ast.ClassDef]:
        """Return a class and those of its base classes that the files define, in order."""
        classes = [definition]
        for base in definition.bases:
            name = getattr(base, "id", None) or getattr(base, "attr", "")
            base_definition = self.find_class(name, files)
            if base_definition is not None and base_definition is not definition:
                classes += self.list_classes(base_definition, files)
        return classes


def find_package(path: Path | None) -> Path:
    """Return the directory of the package.

    Args:
        path: The directory itself, or one that contains it; None means this environment's package.

    Raises:
        SystemExit: There is no package.
    """
    if path is None:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit("TensorRT-LLM is not installed here; pass the path of a source tree")
        return Path(spec.submodule_search_locations[0])
    for candidate in (path / PACKAGE, path):
        if candidate.name == PACKAGE and candidate.is_dir():
            return candidate
    raise SystemExit(f"{path}: contains no directory {PACKAGE}")


def read_version(tree: SourceTree) -> str | None:
    """Return the package's version, or None if the file with the version is absent."""
    module = tree.parse(f"{PACKAGE}/version.py")
    if module is None:
        return None
    for statement in module.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            return str(statement.value.value)
    return None


def select_release(version: str) -> str:
    """Return the table's release that describes a version.

    Raises:
        SystemExit: The version is older than the table's oldest release.
    """
    numbers = tuple(int(part) for part in version.split(".")[:2])
    releases = {tuple(map(int, release.split("."))): release for release in contract.VERSIONS}
    older = [release for release in releases if release <= numbers]
    if not older:
        raise SystemExit(f"TensorRT-LLM {version}: aligner requires {contract.VERSIONS[0]}")
    return releases[max(older)]


def _read_default(value: ast.expr | None) -> Any:
    """Return the default of an annotated class attribute."""
    if value is None:
        return contract.REQUIRED
    if isinstance(value, ast.Call):
        # Field(...) of pydantic, or field(...) of dataclasses.
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default" in keywords:
            return _read_literal(keywords["default"])
        if "default_factory" in keywords:
            return _UNKNOWN
        return _read_literal(value.args[0]) if value.args else contract.REQUIRED
    return _read_literal(value)


def _read_literal(value: ast.expr) -> Any:
    try:
        return ast.literal_eval(value)
    except ValueError:
        return _UNKNOWN


def _read_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, Any]:
    """Return a function's keyword parameters without self, with their defaults."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    defaults = [contract.REQUIRED] * required + [_read_literal(each) for each in arguments.defaults]
    parameters = dict(zip((each.arg for each in positional), defaults, strict=True))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters[argument.arg] = contract.REQUIRED if default is None else _read_literal(default)
    parameters.pop("self", None)
    return parameters


def _find_function(
    classes: Sequence[ast.ClassDef], name: str
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the definitions of a method, that of the class first."""
    for each in classes:
        for statement in each.body:
            is_function = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and statement.name == name:
                yield statement


def _collect_call_keywords(classes: Sequence[ast.ClassDef], name: str) -> dict[str, Any] | None:
    """Return the keywords of a method; None if it does not exist.

    If a definition ends in **kwargs, the keywords of the base class's definition are included.
    """
    found: dict[str, Any] | None = None
    for function in _find_function(classes, name):
        found = _read_parameters(function) | (found or {})
        if function.args.kwarg is None:
            break
    return found


def _collect_fields(classes: Sequence[ast.ClassDef]) -> dict[str, Any]:
    """Return the annotated attributes of a dataclass or pydantic model, with their defaults."""
    found: dict[str, Any] = {}
    for each in reversed(classes):
        for statement in each.body:
            is_named = isinstance(statement, ast.AnnAssign) and isinstance(
                statement.target, ast.Name
            )
            if is_named and "ClassVar" not in ast.unparse(statement.annotation):
                found[statement.target.id] = _read_default(statement.value)
    return found


def _has_attribute(classes: Sequence[ast.ClassDef], name: str) -> bool:
    """Return whether a class has a method, a property or an attribute, or assigns it to self."""
    if name in _collect_fields(classes) or any(_find_function(classes, name)):
        return True
    return any(
        isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store)
        for each in classes
        for node in ast.walk(each)
    )


def _split_path(path: str) -> tuple[str, str, str]:
    """Return the module, the class and the attribute of a symbol's path; "" if there is none."""
    names = path.split(".")
    index = next(index for index, name in enumerate(names) if name[0].isupper())
    return ".".join(names[:index]), names[index], ".".join(names[index + 1 :])


def _list_files(sources: Mapping[str, contract.Source], release: str) -> list[str]:
    """Return the files of an entry, those of the release first."""
    order = sorted(sources, key=lambda version: version != release)
    return list(dict.fromkeys(file for version in order for file in sources[version].files))


def _compare_keywords(
    path: str, wanted: Mapping[str, contract.Parameter], accepted: Mapping[str, Any]
) -> Iterator[str]:
    for name, parameter in wanted.items():
        if name not in accepted:
            yield f"{path} has no {name}"
            continue
        default = accepted[name]
        if parameter.default == contract.UNCOMPARED:
            continue
        if parameter.default == contract.REQUIRED:
            if default != contract.REQUIRED:
                yield f"{path}: {name} has become optional"
        elif default is _UNKNOWN:
            yield f"{path}: the default of {name} is not {parameter.default!r}, but an expression"
        elif default != parameter.default:
            yield f"{path}: {name} is {default!r} by default, not {parameter.default!r}"


def _compare_export(tree: SourceTree, module: str, name: str) -> Iterator[str]:
    """Yield a difference if a package does not export a name that other files define."""
    file = f"{module.replace('.', '/')}/__init__.py"
    parsed = tree.parse(file)
    if parsed is None:
        return
    bound: set[str] = set()
    for node in ast.walk(parsed):
        if isinstance(node, ast.ImportFrom | ast.Import):
            bound |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Constant):
            # Names may be exported through a list, such as __all__.
            bound.add(str(node.value))
    if name not in bound and "*" not in bound:
        yield f"{file} does not export {name}"


def compare_symbol(
    tree: SourceTree, symbol: contract.Symbol, release: str, differences: Differences
) -> None:
    """Compare an entry of the table with the package, and add the result to `differences`."""
    files = _list_files(symbol.sources, release)
    module, class_name, attribute = _split_path(symbol.path)
    if not any(tree.parse(file) for file in files):
        differences.not_compared.append(f"{symbol.path}: there is no {' or '.join(files)}")
        return

    differences.compared += 1
    found = differences.found
    found += _compare_export(tree, module, class_name)
    definition = tree.find_class(class_name, files)
    if definition is None:
        found.append(f"there is no {symbol.path} in {', '.join(files)}")
        return

    classes = tree.list_classes(definition, files)
    if symbol.members is not None:
        values = {
            target.id: _read_literal(statement.value)
            for each in classes
            for statement in each.body
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            if isinstance(target, ast.Name)
        }
        for name, value in symbol.members.items():
            if values.get(name) != value:
                found.append(f"{symbol.path}.{name} is {values.get(name)!r}, not {value!r}")
    elif attribute and not symbol.parameters:
        if not _has_attribute(classes, attribute):
            found.append(f"there is no {symbol.path}")
    elif attribute:
        accepted = _collect_call_keywords(classes, attribute)
        if accepted is None:
            found.append(f"there is no {symbol.path}")
        else:
            found += _compare_keywords(symbol.path, symbol.keywords(release), accepted)
    else:
        accepted = (_collect_call_keywords(classes, "__init__") or {}) | _collect_fields(classes)
        accepted |= _collect_model_fields(tree, symbol, release)
        found += _compare_keywords(symbol.path, symbol.keywords(release), accepted)


def _collect_model_fields(
    tree: SourceTree, symbol: contract.Symbol, release: str
) -> dict[str, Any]:
    """Return the fields of the model that validates the **kwargs of a symbol."""
    if symbol.fields is None or symbol.field_sources is None:
        return {}
    files = _list_files(symbol.field_sources, release)
    _, class_name, _ = _split_path(symbol.fields)
    definition = tree.find_class(class_name, files)
    return {} if definition is None else _collect_fields(tree.list_classes(definition, files))


@dataclass(frozen=True)
class UpdateFacts:
    """What the source of `WorkerExtension` says about weight updates."""

    has_latch: bool
    clears_latch_on_failure: bool
    has_loader_state: bool
    has_abort: bool
    refused_imports: Mapping[str, Sequence[str]] | None


def read_update_facts(tree: SourceTree, release: str) -> UpdateFacts | None:
    """Return the facts about weight updates, or None if the file is absent."""
    files = _list_files(contract.EXTENSION_SOURCES, release)
    definition = tree.find_class("WorkerExtension", files)
    if definition is None:
        return None
    # The latch's name may be a constant of the module.
    constants = {
        node.value
        for file in files
        for node in ast.walk(tree.parse(file) or ast.Module([], []))
        if isinstance(node, ast.Constant)
    }
    update = next(_find_function([definition], "update_weights"))
    handlers = [node for node in ast.walk(update) if isinstance(node, ast.ExceptHandler)]
    called = {
        node.func.attr
        for handler in handlers
        for node in ast.walk(handler)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    helpers = [function for name in called for function in _find_function([definition], name)]
    refused = next(
        (
            ast.literal_eval(node.value)
            for node in ast.walk(update)
            if isinstance(node, ast.Assign)
            and any(getattr(target, "id", "") == "disallowed_imports" for target in node.targets)
        ),
        None,
    )
    return UpdateFacts(
        has_latch=contract.LATCH in constants,
        clears_latch_on_failure=any(
            isinstance(node, ast.Call) and getattr(node.func, "id", "") == "delattr"
            for part in (*handlers, *helpers)
            for node in ast.walk(part)
        ),
        has_loader_state="abort_update_weights" in called,
        has_abort=any(_find_function([definition], "abort_update_weights")),
        refused_imports=refused,
    )


def compare_updates(tree: SourceTree, release: str, differences: Differences) -> str | None:
    """Compare the handling of failed weight updates with the states in the table.

    Returns:
        The state that equals the package's, or None.
    """
    facts = read_update_facts(tree, release)
    if facts is None:
        differences.not_compared.append("weight updates: there is no WorkerExtension")
        return None
    differences.compared += 1
    order = sorted(contract.WEIGHT_UPDATES, key=lambda state: state != release)
    for state in order:
        updates = contract.WEIGHT_UPDATES[state]
        refused = updates.refused_imports
        wanted = UpdateFacts(
            has_latch=True,
            clears_latch_on_failure=updates.clears_latch_on_failure,
            has_loader_state=updates.has_loader_state,
            has_abort=updates.has_abort,
            refused_imports=refused and {name: [*names] for name, names in refused.items()},
        )
        if facts == wanted:
            return state
    differences.found.append(f"weight updates differ from all known states: {facts}")
    return None


def main() -> int:
    """Compare, print the differences, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", nargs="?", type=Path)
    parser.add_argument("--release", choices=contract.VERSIONS)
    arguments = parser.parse_args()

    package = find_package(arguments.path)
    tree = SourceTree(package)
    version = read_version(tree)
    if version is None and arguments.release is None:
        raise SystemExit(f"{package / 'version.py'}: does not exist; set --release")
    release = arguments.release or select_release(str(version))

    differences = Differences()
    for symbol in contract.SYMBOLS:
        if release in symbol.versions:
            compare_symbol(tree, symbol, release, differences)
    state = compare_updates(tree, release, differences)

    problems = list(dict.fromkeys(differences.found))
    print(f"TensorRT-LLM {version or 'of unknown version'}, compared with release {release}:")
    for problem in problems:
        print(f"  different: {problem}")
    for entry in differences.not_compared:
        print(f"  not compared: {entry}")
    if state is not None:
        print(f"  weight updates fail as in {state}")
    print(
        f"{differences.compared} entries compared, {len(problems)} differences,"
        f" {len(differences.not_compared)} not compared"
    )
    return 1 if problems or not differences.compared else 0


if __name__ == "__main__":
    sys.exit(main())
