"""Jinja environment for chat templates, which bounds their steps, memory and output.

A chat template is a program in a downloaded file. Jinja's sandbox keeps it away from Python's
internals, but not from loops of 10^10 iterations or texts of 10^10 characters. `LimitedEnvironment`
counts loop iterations and calls, and checks the size of a value before an operation computes it.
The limits are counts, not seconds: whether a conversation can be rendered must not depend on the
load of the machine, because all ranks render the same conversations.
"""

import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jinja2
from jinja2 import nodes
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from aligner.file_limits import MAX_TEMPLATE_CHARACTERS, MAX_TEMPLATE_STEPS

# Steps of a call of a function, macro or filter, which takes about five times as long as an
# iteration of a loop.
_CALL_STEPS = 5
# Elements whose sizes `_measure` adds up in about the time of one step.
_MEASURED_PER_STEP = 1
# Characters or elements that Python processes in C in about the time of one step.
_ELEMENTS_PER_STEP = 1024
# Maximum number of bits of an integer.
_MAX_BITS = 100_000
# Maximum width, precision or indentation of a number or a line.
_MAX_WIDTH = 9_999
_WIDE_FORMAT = re.compile(r"\d{5}|\*|\{[^{}]*\{")
# Names of the filters that `_Instrumentation` inserts.
_COUNT = "_count_iterations"
_JOIN = "_join_parts"
_CHARGE = "_charge_comparison"
# Filters that neither read nor convert the elements of their input.
_STRUCTURAL_FILTERS = frozenset(
    (
        *("length", "count", "list", "first", "last", "map", "select", "reject", "selectattr"),
        *("rejectattr", "items", "default", "d", "reverse", "batch", "slice", "attr", "random"),
        *("safe", _COUNT, _JOIN, _CHARGE),
    )
)
# Methods whose first argument is the size of the result.
_PADDING_METHODS = frozenset(("center", "ljust", "rjust", "zfill"))
# Methods whose result can be much larger than their arguments, and that no template needs.
_REFUSED_METHODS = frozenset(("translate", "expandtabs", "to_bytes"))
# Methods that do not read the whole text.
_SHORT_METHODS = frozenset(("startswith", "endswith"))


class TemplateLimitError(jinja2.TemplateError):
    """A chat template exceeds a limit of steps or memory."""


class _Instrumentation(NodeTransformer):
    """Inserts filters into a template where the environment cannot intercept the operation."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(node.iter, _COUNT)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), _JOIN)

    def visit_Operand(self, node: nodes.Operand) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.expr, nodes.Const):
            node.expr = _filter(node.expr, _CHARGE)
        return node


def _filter(node: nodes.Expr | nodes.Node, name: str) -> nodes.Filter:
    """Return an expression that applies a filter without arguments to a node."""
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Sandbox in which the rendering of a template has limited steps and memory.

    A template that exceeds a limit raises `TemplateLimitError`.
    """

    intercepted_binops: ClassVar[frozenset[str]] = frozenset(("+", "*", "**", "%"))  # type: ignore[misc]

    def __init__(self, **settings: Any) -> None:
        """Create an environment with the settings of `jinja2.Environment`."""
        super().__init__(finalize=self._check_output, **settings)
        self._budget = threading.local()
        self.globals.pop("lipsum", None)
        self.concat = self._concatenate  # type: ignore[method-assign]
        own_filters = {
            _COUNT: self._count_iterations,
            _JOIN: self._join_parts,
            _CHARGE: self._charge_comparison,
        }
        for name, function in self.filters.items():
            self.filters[name] = self._limit_filter(name, function)
        self.filters.update(own_filters)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Add a filter, whose input and result are limited."""
        self.filters[name] = self._limit_filter(name, function)

    def start(self) -> None:
        """Begin the count of the steps of this thread."""
        self._budget.steps = 0

    def _generate(
        self,
        source: nodes.Template,
        name: str | None,
        filename: str | None,
        defer_init: bool = False,
    ) -> str:
        self.start()
        _Instrumentation().visit(source)
        source.set_environment(self)
        return super()._generate(source, name, filename, defer_init)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call an object of a template.

        The first parameters are private, because a template may pass arguments of any name.
        """
        __self._take_steps(_CALL_STEPS)
        if isinstance(__obj, LoopContext):  # {{ loop(children) }} in a recursive loop
            args = tuple(__self._count_iterations(argument) for argument in args)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes | int):
            args = __self._check_method(owner, __obj.__name__, args)
        result = super().call(__context, __obj, *args, **kwargs)
        __self._check_length(result)
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute a binary operation of a template."""
        if operator == "%" and isinstance(left, str | bytes):
            self._check_format(left, [right])
        elif operator == "+" and _has_length(left) and _has_length(right):
            self._require_length(len(left) + len(right))
        elif operator == "*":
            self._check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._require_bits(left.bit_length() * max(right, 0))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a limited form of `str.format`, or None for another value."""
        formatter = super().wrap_str_format(value)
        if formatter is None:
            return None
        text = value.__self__

        def format_text(*args: Any, **kwargs: Any) -> str:
            self._check_format(text, [*args, *kwargs.values()])
            return formatter(*args, **kwargs)

        return format_text

    def _check_product(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            self._require_bits(left.bit_length() + right.bit_length())
        for sequence, count in ((left, right), (right, left)):
            if _has_length(sequence) and isinstance(count, int):
                self._require_length(len(sequence) * max(count, 0))

    def _check_method(
        self, owner: str | bytes | int, name: str, args: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Check the call of a method of a text or number, and return its arguments."""
        if name in _REFUSED_METHODS:
            raise TemplateLimitError(f"the method {name} is not allowed in a chat template")
        if isinstance(owner, int):
            return args
        if name not in _SHORT_METHODS:
            self._take_steps(len(owner) // _ELEMENTS_PER_STEP)
        if name in _PADDING_METHODS and args and isinstance(args[0], int):
            self._require_length(args[0])
        if name == "replace" and len(args) > 1:
            self._check_replacement(owner, args[0], args[1])
        if name == "join" and args:
            parts = list(self._count_iterations(args[0]))
            self._require_length(len(owner) * len(parts) + sum(map(_length, parts)))
            args = (parts, *args[1:])
        return args

    def _check_replacement(self, text: Any, old: Any, new: Any) -> None:
        if isinstance(text, str | bytes) and isinstance(old, type(text)) and _has_length(new):
            self._require_length(len(text) + text.count(old) * len(new))  # type: ignore[arg-type]

    def _check_format(self, text: str | bytes, values: Sequence[Any]) -> None:
        """Check the format of numbers: its widths, and the values that become text."""
        shown = text if isinstance(text, str) else text.decode("latin-1")
        if _WIDE_FORMAT.search(shown):
            raise TemplateLimitError(
                f"a format has a variable width or one above {_MAX_WIDTH}: {shown!r:.80}"
            )
        # Each value may occur wherever the format has a field.
        fields = shown.count("%") + shown.count("{")
        self._require_length(len(shown) + fields * sum(map(self._measure, values)))

    def _limit_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter whose steps, input and result are limited."""
        position = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            """Call the filter; raises TemplateLimitError if it exceeds a limit."""
            self._take_steps(_CALL_STEPS)
            value = args[position] if len(args) > position else None
            arguments = (*args[position + 1 :], *kwargs.values())
            self._take_steps(_length(value) // _ELEMENTS_PER_STEP)
            if name not in _STRUCTURAL_FILTERS:
                self._check_filter(name, value, arguments)
            elif name in ("batch", "slice"):
                self._require_widths(arguments, MAX_TEMPLATE_CHARACTERS)
            result = function(*args, **kwargs)
            self._check_length(result)
            return result

        return limited

    def _check_filter(self, name: str, value: Any, arguments: Sequence[Any]) -> None:
        """Check the size of a filter's input, and of the result that its arguments cause."""
        size = self._measure(value)
        if name in ("center", "wordwrap", "truncate"):
            self._require_widths(arguments, MAX_TEMPLATE_CHARACTERS)
        elif name in ("round", "tojson"):
            self._require_widths(arguments, _MAX_WIDTH)
            widths = [width for width in arguments if type(width) is int]
            self._require_length(size * max([1, *widths]))
        elif name == "indent":
            widths = [_length(width) if isinstance(width, str) else width for width in arguments]
            width = max([4, *(width for width in widths if isinstance(width, int))])
            self._require_length(size + (str(value).count("\n") + 1) * width)
        elif name == "replace" and len(arguments) > 1:
            self._check_replacement(str(value), str(arguments[0]), str(arguments[1]))
        elif name == "join" and arguments:
            self._require_length(size + _length(value) * _length(arguments[0]))
        elif name == "format":
            self._check_format(str(value), arguments)

    def _require_widths(self, arguments: Sequence[Any], limit: int) -> None:
        for argument in arguments:
            if isinstance(argument, int) and abs(argument) > limit:
                raise TemplateLimitError(f"the size {argument:.0e} exceeds {limit}")

    def _check_output(self, value: Any) -> Any:
        """Return a value that the template writes, after its size was checked."""
        if not isinstance(value, str):
            self._measure(value)
        return value

    def _charge_comparison(self, value: Any) -> Any:
        """Return an operand of a comparison, which may read all of it."""
        if isinstance(value, list | tuple | dict):
            self._measure(value)
        elif isinstance(value, str):
            self._take_steps(len(value) // _ELEMENTS_PER_STEP)
        return value

    def _count_iterations(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yield the values of a loop, and count a step for each."""
        for value in values:
            self._take_steps(1)
            yield value

    def _join_parts(self, parts: Sequence[Any]) -> str:
        """Return the operands of `~` as one text."""
        self._require_length(sum(map(self._measure, parts)))
        return "".join(map(str, parts))

    def _concatenate(self, parts: Iterable[str]) -> str:
        """Return the output of a template, a macro or a block as one text."""
        total = 0
        kept = []
        for part in parts:
            total += len(part)
            self._require_length(total)
            kept.append(part)
        self._take_steps(len(kept) // _ELEMENTS_PER_STEP)
        return "".join(kept)

    def _measure(self, value: Any) -> int:
        """Return the number of characters and elements of a value as text.

        A list may contain the same list several times, so that its text is exponentially larger
        than the list. Therefore the size of each list is computed once.
        """
        if not isinstance(value, list | tuple | Mapping):
            return _length(value)
        sizes: dict[int, int] = {}
        # A value that contains itself has no size; converting it to text fails.
        unfinished: set[int] = set()
        open_values = [value]
        while open_values:
            current = open_values[-1]
            if id(current) in sizes:
                open_values.pop()
                continue
            entries: list[Any] = (
                [*current.keys(), *current.values()]
                if isinstance(current, Mapping)
                else list(current)
            )
            self._take_steps(1 + len(entries) // _MEASURED_PER_STEP)
            missing = {
                id(entry): entry
                for entry in entries
                if isinstance(entry, list | tuple | Mapping)
                and id(entry) not in sizes
                and id(entry) not in unfinished
            }
            unfinished.add(id(current))
            if missing:
                open_values += missing.values()
                continue
            sizes[id(current)] = 1 + sum(
                sizes.get(id(entry), 1 + _length(entry)) for entry in entries
            )
            self._require_length(sizes[id(current)])
            open_values.pop()
        return sizes[id(value)]

    def _take_steps(self, count: int) -> None:
        self._budget.steps = getattr(self._budget, "steps", 0) + count
        if self._budget.steps > MAX_TEMPLATE_STEPS:
            raise TemplateLimitError(
                f"more than {MAX_TEMPLATE_STEPS} steps (loop iterations and calls), the maximum of"
                " a conversation"
            )

    def _check_length(self, value: Any) -> None:
        if _has_length(value):
            self._require_length(len(value))

    def _require_length(self, length: int) -> None:
        if length > MAX_TEMPLATE_CHARACTERS:
            raise TemplateLimitError(
                f"a text or list of {length:.3g} elements, allowed: {MAX_TEMPLATE_CHARACTERS}"
            )

    def _require_bits(self, bits: int) -> None:
        if bits > _MAX_BITS:
            raise TemplateLimitError(f"an integer of {bits:.3g} bits, allowed: {_MAX_BITS}")


def _has_length(value: Any) -> bool:
    return isinstance(value, str | bytes | list | tuple | dict)


def _length(value: Any) -> int:
    """Return the length of a text or container; 1 for other values."""
    return len(value) if _has_length(value) else 1
