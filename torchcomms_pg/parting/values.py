"""Values of expressions in frames of other threads, read without running code of the program.

Only exact builtin types, instance dictionaries and slots are read: no property, no `__getattr__`,
no `__len__` of a class, no `__eq__`.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Mapping
from typing import Any

_LONGEST = 60  # characters of a string
_PLAIN = (int, float, bool, str, bytes, types.NoneType)
_SIZED = (list, tuple, dict, set, frozenset, str, bytes, bytearray, range)
_MISSING = object()


class Unreadable(Exception):  # noqa: N818
    """A value cannot be read without running code, or is of no plain type."""


def show(value: object) -> str:
    """Returns the text of a plain value, a tensor's shape and type, or a container's size."""
    kind = type(value)
    if kind in _PLAIN:
        text = repr(value)
        return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
    if kind in _SIZED:
        return f"a {kind.__name__} of {len(value)}"  # type: ignore[arg-type]
    if kind.__module__.partition(".")[0] == "torch" and kind.__name__ in ("Tensor", "Parameter"):
        tensor: Any = value
        return f"a tensor of {tuple(tensor.shape)}, {tensor.dtype}"
    raise Unreadable(kind.__name__)


def evaluate(expression: ast.AST, names: Mapping[str, Any]) -> Any:
    """Returns the value of an expression of names, attributes, subscripts, `len()` and comparisons.

    Raises Unreadable if this would run code of the program.
    """
    if isinstance(expression, ast.Expression):
        return evaluate(expression.body, names)
    if isinstance(expression, ast.Constant):
        return expression.value
    if isinstance(expression, ast.Name):
        value = names.get(expression.id, _MISSING)
        if value is _MISSING:
            raise Unreadable(expression.id)
        return value
    if isinstance(expression, ast.Attribute):
        return _attribute(evaluate(expression.value, names), expression.attr)
    if isinstance(expression, ast.Subscript):
        return _item(evaluate(expression.value, names), evaluate(expression.slice, names))
    if isinstance(expression, ast.Call):
        return _length(expression, names)
    if isinstance(expression, ast.UnaryOp):
        value = evaluate(expression.operand, names)
        if isinstance(expression.op, ast.Not):
            return not truth(value)
        if isinstance(expression.op, ast.USub) and type(value) in (int, float):
            return -value
    if isinstance(expression, ast.BoolOp):
        ends = isinstance(expression.op, ast.Or)
        value = None
        for each in expression.values:
            value = evaluate(each, names)
            if truth(value) == ends:
                break
        return value
    if isinstance(expression, ast.BinOp):
        return _compute(expression, names)
    if isinstance(expression, ast.Compare):
        return _compare(expression, names)
    raise Unreadable(type(expression).__name__)


def truth(value: object) -> bool:
    """Returns whether a value is true; raises Unreadable if its class would have to say so."""
    if type(value) in _PLAIN or type(value) in _SIZED:
        return bool(value)
    if isinstance(value, type | types.FunctionType | types.ModuleType) and type(value) in (
        type,
        types.FunctionType,
        types.ModuleType,
    ):
        return True
    raise Unreadable(type(value).__name__)


def _attribute(value: Any, name: str) -> Any:
    if type(value) is types.ModuleType:
        found = vars(value).get(name, _MISSING)
    else:
        if type(type(value)) is not type and not isinstance(value, type):
            # a metaclass may change how attributes are found
            if type(type(value)).__name__ not in ("ABCMeta", "EnumType", "EnumMeta"):
                raise Unreadable(name)
        kind: Any = type(value)
        if kind.__getattribute__ is not object.__getattribute__:
            raise Unreadable(name)
        found = inspect.getattr_static(value, name, _MISSING)
        if type(found) is types.MemberDescriptorType:
            try:
                found = found.__get__(value)
            except AttributeError:
                found = _MISSING
        elif hasattr(type(found), "__get__"):
            raise Unreadable(name)
    if found is _MISSING:
        raise Unreadable(name)
    return found


def _item(value: Any, index: Any) -> Any:
    if type(value) in (list, tuple, dict, str) and type(index) in (int, str, bool, types.NoneType):
        try:
            return value[index]
        except (LookupError, TypeError):
            pass
    raise Unreadable("an item")


def _length(call: ast.Call, names: Mapping[str, Any]) -> Any:
    if (
        isinstance(call.func, ast.Name)
        and call.func.id == "len"
        and len(call.args) == 1
        and not call.keywords
        and names.get("len", len) is len
    ):
        value = evaluate(call.args[0], names)
        if type(value) in _SIZED:
            return len(value)
    raise Unreadable("a call")


def _compute(expression: ast.BinOp, names: Mapping[str, Any]) -> Any:
    left, right = evaluate(expression.left, names), evaluate(expression.right, names)
    if type(left) in (int, float, bool) and type(right) in (int, float, bool):
        if isinstance(expression.op, ast.Add):
            return left + right
        if isinstance(expression.op, ast.Sub):
            return left - right
        if isinstance(expression.op, ast.Mult) and abs(left) < 2**64 and abs(right) < 2**64:
            return left * right
        if isinstance(expression.op, ast.Mod) and right:
            return left % right
        if isinstance(expression.op, ast.FloorDiv) and right:
            return left // right
    raise Unreadable("an operator")


def _compare(expression: ast.Compare, names: Mapping[str, Any]) -> bool:
    left = evaluate(expression.left, names)
    for operator, comparator in zip(expression.ops, expression.comparators, strict=True):
        right = evaluate(comparator, names)
        if isinstance(operator, ast.Is | ast.IsNot):
            holds = (left is right) == isinstance(operator, ast.Is)
        else:
            holds = _ordered(operator, left, right)
        if not holds:
            return False
        left = right
    return True


def _ordered(operator: ast.cmpop, left: Any, right: Any) -> bool:
    if isinstance(operator, ast.In | ast.NotIn):
        if (
            type(right) in (list, tuple, set, frozenset, dict, range)
            and len(right) <= 1000
            and type(left) in _PLAIN
            and all(type(each) in _PLAIN for each in right)
        ) or (type(left) is str and type(right) is str):
            return (left in right) == isinstance(operator, ast.In)
        raise Unreadable("in")
    if type(left) not in _PLAIN or type(right) not in _PLAIN:
        raise Unreadable("a comparison")
    if isinstance(operator, ast.Eq):
        return bool(left == right)
    if isinstance(operator, ast.NotEq):
        return bool(left != right)
    try:
        if isinstance(operator, ast.Lt):
            return bool(left < right)
        if isinstance(operator, ast.LtE):
            return bool(left <= right)
        if isinstance(operator, ast.Gt):
            return bool(left > right)
        return bool(left >= right)
    except TypeError:
        raise Unreadable("a comparison") from None
