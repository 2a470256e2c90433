"""Changes of one line that break a program: the operators of `tests/mutation_check.py`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
_BOOLEAN: dict[type[ast.boolop], tuple[str, str]] = {ast.And: ("and", "or"), ast.Or: ("or", "and")}

_COMMUTATIVE = {"max", "min", "gcd", "hypot", "isclose", "allclose", "equal", "maximum", "minimum"}
_LOG_METHODS = {"debug", "info", "warning", "warn", "error", "exception", "critical", "log"}
_LOGGERS = {"log", "_log", "logger", "_logger", "logging", "warnings"}
_TEXT_METHODS = {"__repr__", "__str__"}


@dataclass(frozen=True)
class Change:
    """A replacement of a part of one line."""

    operator: str
    line: int
    """Line number, the first line is 1."""

    start: int
    """First replaced byte of the line, in UTF-8."""

    end: int
    """Byte after the last replaced one."""

    text: str

    def apply(self, line: str) -> str:
        """Return the line with the replacement."""
        encoded = line.encode()
        return (encoded[: self.start] + self.text.encode() + encoded[self.end :]).decode()


def changes(source: str) -> list[Change]:
    """Return all changes of a module, in the order of the source.

    Docstrings, messages, annotations, log calls, `__repr__` and code that only type checkers read
    are left out, because a change there does not change what the program computes.
    """
    collector = _Collector(source)
    collector.visit(ast.parse(source))
    return sorted(
        set(collector.changes),
        key=lambda change: (change.line, change.start, change.end, change.text, change.operator),
    )


class _Collector(ast.NodeVisitor):
    """Collects the changes of a syntax tree.

    A construct that spans several lines is changed only where the changed part is on one line.
    """

    def __init__(self, source: str) -> None:
        self.changes: list[Change] = []
        self._lines = [line.encode() for line in source.split("\n")]

    # Parts of the source

    def _text(self, node: ast.AST) -> str | None:
        """Return the source of an expression or statement, None if it spans several lines."""
        if node.lineno != node.end_lineno:  # type: ignore[attr-defined]
            return None
        line = self._lines[node.lineno - 1]  # type: ignore[attr-defined]
        return line[node.col_offset : node.end_col_offset].decode()  # type: ignore[attr-defined]

    def _replace(self, node: ast.AST, text: str, operator: str) -> None:
        """Add the replacement of a node that is on one line."""
        if self._text(node) in (None, text):
            return
        start, end = node.col_offset, node.end_col_offset  # type: ignore[attr-defined]
        line = node.lineno  # type: ignore[attr-defined]
        self.changes.append(Change(operator, line, start, end, text))

    def _replace_between(
        self, left: ast.expr, right: ast.expr, tokens: tuple[str, str], operator: str
    ) -> None:
        """Add the replacement of an operator between two operands.

        The operator is on the line where the left operand ends or on the one where the right
        operand begins.
        """
        old, new = tokens
        word = rf"\b{old}\b" if old[0].isalpha() else re.escape(old)
        pattern = re.compile(word.replace(" ", r"\s+").encode())
        end_line, begin_line = left.end_lineno or left.lineno, right.lineno

        for number in sorted({end_line, begin_line}):
            line = self._lines[number - 1]
            start = (left.end_col_offset or 0) if number == end_line else 0
            end = right.col_offset if number == begin_line else len(line)
            code, _, _ = line[start:end].partition(b"#")
            if token := pattern.search(code):
                self.changes.append(
                    Change(operator, number, start + token.start(), start + token.end(), new)
                )
                return

    def _negate(self, test: ast.expr) -> None:
        if not isinstance(test, ast.UnaryOp) and (text := self._text(test)) is not None:
            self._replace(test, f"(not ({text}))", "negated condition")

    def _visit_all(self, nodes: Iterable[ast.AST | None]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    # Expressions

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            self._replace_between(left, right, _COMPARISONS[type(operator)], "comparison")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if (tokens := _ARITHMETIC.get(type(node.op))) and not _is_text(node):
            self._replace_between(node.left, node.right, tokens, "arithmetic")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._replace_between(left, right, _BOOLEAN[type(node.op)], "boolean operator")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        operand = self._text(node.operand)
        if isinstance(node.op, ast.Not | ast.USub) and operand is not None:
            removed = "not" if isinstance(node.op, ast.Not) else "minus sign"
            self._replace(node, f"({operand})", f"removed {removed}")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value), "constant")
        elif isinstance(node.value, int):
            self._replace(node, str(node.value + 1), "constant")
        elif isinstance(node.value, float):
            self._replace(node, f"({self._text(node)} + 1)", "constant")

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave out the text and the format specifications, which are mostly messages."""

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(bound, ast.Constant):
                self._replace(bound, f"({self._text(bound)}) + 1", "index")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negate(test)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if _is_log_call(node):
            return
        function = node.func.attr if isinstance(node.func, ast.Attribute) else self._text(node.func)
        if len(node.args) >= 2 and function not in _COMMUTATIVE:
            self._swap(*node.args[:2])
        self.generic_visit(node)

    def _swap(self, first: ast.expr, second: ast.expr) -> None:
        one, two = self._text(first), self._text(second)
        is_one_line = first.lineno == second.lineno and one is not None and two is not None
        if not is_one_line or isinstance(first, ast.Starred) or isinstance(second, ast.Starred):
            return
        between = self._lines[first.lineno - 1][first.end_col_offset : second.col_offset].decode()
        if one != two:
            start, end = first.col_offset, second.end_col_offset or 0
            swapped = Change("swapped arguments", first.lineno, start, end, f"{two}{between}{one}")
            self.changes.append(swapped)

    # Statements

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave out assertions: they state what is always true."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """Remove the statement, and leave out its message."""
        self._replace(node, "pass", "removed statement")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            self._replace(node, "return None", "returned None")
            self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._replace(node, "continue", "break")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace(node, "break", "continue")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not _is_log_call(node.value):
            self._replace(node, "pass", "removed statement")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if isinstance(target, ast.Attribute | ast.Subscript):
            self._replace(node, "pass", "removed statement")
        elif isinstance(target, ast.Name) and not _is_type_or_dunder(target.id):
            self._replace(node.value, "None", "assigned None")
        if not (isinstance(target, ast.Name) and _is_type_or_dunder(target.id)):
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace(node, "pass", "removed statement")
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._visit_all([node.value])

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Visit defaults and the body, but no annotations."""
        if node.name in _TEXT_METHODS:
            return
        self._visit_all(
            [*node.decorator_list, *node.args.defaults, *node.args.kw_defaults, *node.body]
        )

    visit_AsyncFunctionDef = visit_FunctionDef


def _is_text(node: ast.BinOp) -> bool:
    """Whether an operation formats or concatenates text."""
    operands = (node.left, node.right)
    return any(
        isinstance(operand, ast.JoinedStr)
        or (isinstance(operand, ast.Constant) and isinstance(operand.value, str | bytes))
        for operand in operands
    )


def _is_log_call(node: ast.Call) -> bool:
    function = node.func
    return (
        isinstance(function, ast.Attribute)
        and function.attr in _LOG_METHODS
        and isinstance(function.value, ast.Name)
        and function.value.id in _LOGGERS
    )


def _is_type_or_dunder(name: str) -> bool:
    """Whether a name is a type alias, such as `Rows` or `_Rows`, or a name such as `__all__`."""
    bare = name.lstrip("_")
    return name.startswith("__") or (bare[:1].isupper() and not bare.isupper())
