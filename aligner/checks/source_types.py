"""Types of an installed package's arguments, read from its source without importing the package.

vLLM takes 13 s of CPU time to import, and neither vLLM nor TensorRT-LLM can be imported in every
environment in which a configuration is checked. The functions parse the few files that define the
argument classes and the types in their annotations.
"""

import ast
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aligner.schema.conditions import format_value
from aligner.schema.options import format_key_hint

# Types of scalars, and the Python types of the YAML values that they accept. YAML reads 1 as an
# integer, which is also a valid float.
_SCALARS: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "None": (type(None),),
}
_LISTS = ("list", "set", "tuple", "frozenset", "List", "Set", "Tuple", "Sequence", "Collection")
_MAPPINGS = ("dict", "Dict", "Mapping")
# Wrappers whose first argument is the type of the value.
_WRAPPERS = ("Annotated", "Final", "Required", "NotRequired", "SkipValidation")
# Annotations of values that a YAML file cannot contain.
_UNWRITABLE = ("type", "Type", "Callable")
# Base classes of enumerations.
_ENUMS = ("Enum", "IntEnum", "StrEnum", "StrictEnum")


@dataclass(frozen=True)
class ClassSource:
    """Class definition in a module of the package."""

    statement: ast.ClassDef
    module: "SourceModule"


@dataclass(frozen=True)
class ValueType:
    """Values that an argument accepts: the union of the alternatives of its annotation."""

    accepts_all: bool = False
    """Whether any value is accepted, because the type is not known."""
    scalars: tuple[str, ...] = ()
    """Accepted scalars: keys of `_SCALARS`."""
    choices: tuple[Any, ...] = ()
    """Accepted values of literals and enumerations."""
    ignores_case: bool = False
    """Whether `choices` contain the names of an enumeration, in any case."""
    items: "ValueType | None" = None
    """Type of the entries of a list; None if no list is accepted."""
    entries: "ValueType | None" = None
    """Type of the values of a mapping; None if no mapping with arbitrary names is accepted."""
    section: ClassSource | None = None
    """Class whose fields a mapping may contain; None if no such mapping is accepted."""

    def __or__(self, other: "ValueType") -> "ValueType":
        """Return the type that accepts the values of both."""
        return ValueType(
            self.accepts_all or other.accepts_all,
            tuple(dict.fromkeys((*self.scalars, *other.scalars))),
            (*self.choices, *other.choices),
            self.ignores_case or other.ignores_case,
            _join(self.items, other.items),
            _join(self.entries, other.entries),
            self.section or other.section,
        )

    def find_problem(self, key: str, value: Any) -> str | None:
        """Return why a value is not accepted; None if it is accepted.

        Args:
            key: Dotted key of the value, for the message.
            value: Value from a YAML file.
        """
        if self.accepts_all or self._accepts_scalar(value):
            return None
        if isinstance(value, list) and self.items is not None:
            items = self.items
            problems = (items.find_problem(f"{key}[{i}]", each) for i, each in enumerate(value))
            return next(filter(None, problems), None)
        if isinstance(value, Mapping) and self.entries is not None:
            entries = self.entries
            problems = (entries.find_problem(f"{key}.{name}", each) for name, each in value.items())
            return next(filter(None, problems), None)
        if isinstance(value, Mapping) and self.section is not None:
            return next(find_field_problems(self.section, key, value), None)
        return f"{key}={format_value(value)}: {self._describe_problem(value)}"

    def _accepts_scalar(self, value: Any) -> bool:
        """Return whether a value is one of the accepted scalars and choices."""
        # `True == 1` in Python, but not in a configuration.
        is_choice = any(value == each and type(value) is type(each) for each in self.choices)
        if self.ignores_case and isinstance(value, str):
            is_choice |= value.lower() in [str(each).lower() for each in self.choices]
        kinds = [kind for name in self.scalars for kind in _SCALARS[name]]
        return is_choice or type(value) in kinds

    def _describe_problem(self, value: Any) -> str:
        """Return the accepted values in words, for a value that is not accepted."""
        types = [name for name in self.scalars if name != "None"]
        types += ["list"] * (self.items is not None)
        types += ["mapping"] * (self.entries is not None or self.section is not None)
        null = ["null"] * ("None" in self.scalars)
        choices = [*map(format_value, self.choices), *null]
        if not types:
            return f"allowed: {', '.join(choices)}" if choices else "cannot be set in a file"
        return f"expected {' or '.join([*types, *choices])}, got {type(value).__name__}"


_ANY = ValueType(accepts_all=True)


def _join(first: ValueType | None, second: ValueType | None) -> ValueType | None:
    """Return the union of two optional types."""
    if first is None or second is None:
        return first or second
    return first | second


class SourcePackage:
    """Installed package whose files are parsed when they are needed."""

    def __init__(self, directory: Path) -> None:
        """Create a package.

        Args:
            directory: Directory of the package, whose name is the package's name.
        """
        self._directory = directory
        self._modules: dict[str, SourceModule | None] = {}

    def load(self, name: str) -> "SourceModule | None":
        """Return a module of the package by its dotted name; None if the package has no such
        module."""
        if name not in self._modules:
            self._modules[name] = self._parse(name)
        return self._modules[name]

    def find_class(self, path: str) -> ClassSource | None:
        """Return the class with a dotted path, such as `vllm.engine.arg_utils.EngineArgs`."""
        module_name, _, name = path.rpartition(".")
        module = self.load(module_name)
        definition = None if module is None else module.resolve(name)
        return definition if isinstance(definition, ClassSource) else None

    def _parse(self, name: str) -> "SourceModule | None":
        """Parse a module; return None if the package has no such module."""
        root, *parts = name.split(".")
        if root != self._directory.name:
            return None
        path = self._directory.joinpath(*parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                is_package = file.name == "__init__.py"
                return SourceModule(self, name, ast.parse(file.read_text()), is_package)
        return None


class SourceModule:
    """Parsed module with its definitions and imports."""

    def __init__(
        self, package: SourcePackage, name: str, tree: ast.Module, is_package: bool
    ) -> None:
        """Create a module.

        Args:
            package: Package of the module.
            name: Dotted name of the module.
            tree: Parsed source.
            is_package: Whether the module is the file `__init__.py` of a package.
        """
        self._package = package
        self._parent = name if is_package else name.rpartition(".")[0]
        self._definitions: dict[str, ast.stmt] = {}
        """Statements that define names, at the module's top level."""
        self._imports: dict[str, tuple[str, str]] = {}
        """Module and name of the imported names."""
        for statement in _iterate_statements(tree.body):
            self._add(statement)

    def get_definition(self, name: str) -> ast.stmt | None:
        """Return the statement that defines a name in this module."""
        return self._definitions.get(name)

    def resolve(self, name: str) -> "ClassSource | tuple[ast.expr, SourceModule] | None":
        """Return the class or the expression to which a name refers, also in another module of the
        package; None if the name is not defined in the package."""
        statement = self._definitions.get(name)
        if isinstance(statement, ast.ClassDef):
            return ClassSource(statement, self)
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            return statement.value, self
        if name not in self._imports:
            return None
        module_name, imported_name = self._imports[name]
        module = self._package.load(module_name)
        return None if module is None else module.resolve(imported_name)

    def read_type(self, annotation: ast.expr) -> ValueType:
        """Return the type of an annotation in this module."""
        match annotation:
            case ast.Constant(value=None):
                return ValueType(scalars=("None",))
            case ast.Constant(value=str(text)):  # an annotation in quotes
                return self.read_type(ast.parse(text, mode="eval").body)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self.read_type(left) | self.read_type(right)
            case ast.Subscript(value=value, slice=slice_):
                arguments = slice_.elts if isinstance(slice_, ast.Tuple) else [slice_]
                return self._read_subscript(_get_last_name(value), arguments)
            case ast.Name() | ast.Attribute():
                return self._read_name(_get_last_name(annotation))
        return _ANY

    def _read_subscript(self, name: str, arguments: Sequence[ast.expr]) -> ValueType:
        """Return the type of an annotation such as `list[int]`."""
        if name == "Literal":
            return ValueType(choices=tuple(self._iterate_literals(arguments)))
        if name in ("Union", "Optional"):
            types = [self.read_type(each) for each in arguments]
            optional = [ValueType(scalars=("None",))] * (name == "Optional")
            return functools.reduce(lambda left, right: left | right, types + optional)
        if name in _LISTS:
            items = [each for each in arguments if not _is_ellipsis(each)]
            types = [self.read_type(each) for each in items]
            return ValueType(items=functools.reduce(lambda left, right: left | right, types))
        if name in _MAPPINGS:
            return ValueType(entries=self.read_type(arguments[-1]))
        if name in _WRAPPERS:
            return self.read_type(arguments[0])
        return ValueType() if name in _UNWRITABLE else _ANY

    def _read_name(self, name: str) -> ValueType:
        """Return the type of an annotation that is a single name."""
        if name in _SCALARS:
            return ValueType(scalars=(name,))
        if name in _LISTS:
            return ValueType(items=_ANY)
        if name in _MAPPINGS:
            return ValueType(entries=_ANY)
        if name in _UNWRITABLE:
            return ValueType()
        match self.resolve(name):
            case ClassSource() as source:
                return _read_class_type(source)
            case (expression, module):
                return module.read_type(expression)
        return _ANY

    def _iterate_literals(self, arguments: Sequence[ast.expr]) -> Iterator[Any]:
        """Yield the values of `Literal[...]`, whose arguments may be names of other literals."""
        for argument in arguments:
            if isinstance(argument, ast.Constant):
                yield argument.value
            else:
                yield from self.read_type(argument).choices

    def _add(self, statement: ast.stmt) -> None:
        """Add the names that a statement defines; the first definition of a name counts."""
        match statement:
            case ast.ClassDef(name=name):
                self._definitions.setdefault(name, statement)
            case ast.Assign(targets=targets):
                for target in targets:
                    self._add_value(target, statement)
            case ast.AnnAssign(target=target, value=ast.expr()):
                self._add_value(target, statement)
            case ast.ImportFrom(module=module, names=names, level=level):
                parents = self._parent.split(".")
                base = ".".join(parents[: len(parents) - level + 1]) if level else ""
                source = ".".join(filter(None, (base, module)))
                for alias in names:
                    self._imports.setdefault(alias.asname or alias.name, (source, alias.name))

    def _add_value(self, target: ast.expr, statement: ast.stmt) -> None:
        """Add a name to which a statement assigns a value."""
        if isinstance(target, ast.Name) and target.id not in self._imports:
            self._definitions.setdefault(target.id, statement)


def read_fields(source: ClassSource) -> dict[str, ValueType]:
    """Return the types of the fields that a dataclass or a pydantic model accepts as arguments.

    Fields of base classes in the same package are included, and private fields are not.
    """
    fields: dict[str, ValueType] = {}
    for base in source.statement.bases:
        parent = source.module.resolve(_get_last_name(base))
        if isinstance(parent, ClassSource):
            fields |= read_fields(parent)

    converted = _find_converted_fields(source.statement)
    for statement in source.statement.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                is_class_variable = _get_last_name(annotation) == "ClassVar"
                if name.startswith("_") or is_class_variable or not _is_argument(value):
                    fields.pop(name, None)
                    continue
                # A validator that runs before the type is checked may accept other types.
                is_converted = name in converted
                fields[name] = _ANY if is_converted else source.module.read_type(annotation)
    return fields


def find_field_problems(
    source: ClassSource, key: str, values: Mapping[str, Any], owner: str = ""
) -> Iterator[str]:
    """Yield a line for each entry of a mapping that is not a field of a class, or whose value the
    field does not accept.

    Args:
        source: Class with the fields.
        key: Dotted key of the mapping.
        values: Entries of the mapping.
        owner: Description of the class for messages; empty means the class's name.
    """
    fields = read_fields(source)
    owner = owner or source.statement.name
    for name, value in values.items():
        if name in fields:
            problem = fields[name].find_problem(f"{key}.{name}", value)
            if problem is not None:
                yield problem
        elif not _has_model_validator(source.statement):
            allowed = f"{owner} has {', '.join(sorted(fields))}"
            hint = format_key_hint(key, name, fields, allowed if len(fields) < 30 else "")
            yield f"{key}.{name}: {owner} has no such argument" + (f"; {hint}" if hint else "")


def _read_class_type(source: ClassSource) -> ValueType:
    """Return the type of a class: an enumeration, or a section with fields."""
    bases = [_get_last_name(base) for base in source.statement.bases]
    if not any(base in _ENUMS or base.endswith("Enum") for base in bases):
        is_configuration = bool(source.statement.decorator_list or bases)
        return ValueType(section=source) if is_configuration else _ANY
    members = [
        (target.id, statement.value)
        for statement in source.statement.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name) and not target.id.startswith("_")
    ]
    # An enumeration accepts the value of a member. vLLM and TensorRT-LLM also accept its name.
    names = tuple(name for name, _ in members)
    values = tuple(value.value for _, value in members if isinstance(value, ast.Constant))
    choices = tuple(dict.fromkeys((*names, *(each for each in values if each != ""))))
    return ValueType(choices=choices, ignores_case=True)


def _find_converted_fields(statement: ast.ClassDef) -> set[str]:
    """Return the names of the fields that have a validator with `mode="before"` or "wrap"."""
    return {
        str(argument.value)
        for call in _iterate_decorators(statement, "field_validator")
        for argument in call.args
        if isinstance(argument, ast.Constant) and _get_mode(call) in ("before", "wrap", "plain")
    }


def _has_model_validator(statement: ast.ClassDef) -> bool:
    """Return whether a validator converts the entries of a class before the fields are checked."""
    calls = _iterate_decorators(statement, "model_validator")
    return any(_get_mode(call) in ("before", "wrap") for call in calls)


def _iterate_decorators(statement: ast.ClassDef, name: str) -> Iterator[ast.Call]:
    """Yield the calls that decorate the methods of a class with a decorator of this name."""
    for method in statement.body:
        if isinstance(method, ast.FunctionDef):
            for decorator in method.decorator_list:
                if isinstance(decorator, ast.Call) and _get_last_name(decorator.func) == name:
                    yield decorator


def _get_mode(call: ast.Call) -> Any:
    """Return the argument `mode` of a decorator; None without it."""
    values = (each.value for each in call.keywords if each.arg == "mode")
    value = next(values, None)
    return value.value if isinstance(value, ast.Constant) else None


def _is_argument(default: ast.expr | None) -> bool:
    """Return whether a field with a default is an argument, that is, without `init=False`."""
    keywords = default.keywords if isinstance(default, ast.Call) else []
    return not any(
        each.arg == "init" and isinstance(each.value, ast.Constant) and each.value.value is False
        for each in keywords
    )


def _iterate_statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, and those of both branches of an `if` or a `try`.

    The first branch of `if TYPE_CHECKING` has the more precise definitions.
    """
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try)):
            yield from _iterate_statements(statement.body)
            yield from _iterate_statements(statement.orelse)


def _get_last_name(expression: ast.expr) -> str:
    """Return the last name of a dotted expression; empty for another expression."""
    if isinstance(expression, ast.Attribute):
        return expression.attr
    if isinstance(expression, ast.Subscript):
        return _get_last_name(expression.value)
    return expression.id if isinstance(expression, ast.Name) else ""


def _is_ellipsis(expression: ast.expr) -> bool:
    """Return whether an expression is `...`, as in `tuple[int, ...]`."""
    return isinstance(expression, ast.Constant) and expression.value is ...
