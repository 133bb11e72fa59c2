"""Reads pickles of plain data: dicts, lists, tuples, numbers and texts.

Python's own unpickler can be kept from running code. But a few bytes can make it hash a tuple that
contains another tuple twice, and so on for fifty levels, or allocate any number of objects. In this
module, the bytes of every operation bound the time and the memory that the operation takes.
"""

from __future__ import annotations

import struct
from typing import Any

_NUMBERS = {ord(op): struct.Struct(form) for op, form in (("J", "<i"), ("M", "<H"), ("G", ">d"))}
_LENGTHS = {ord("X"): 4, 0x8C: 1, 0x8D: 8}  # bytes of the length of a text, by operation
_CONSTANTS = {ord("N"): None, 0x88: True, 0x89: False}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_SKIPPED = {0x80: 1, 0x95: 8}  # bytes of the protocol's number, and of a frame's length


def unpickle(data: bytes) -> Any:
    """Returns the object in ``data``, a pickle of protocol 2 or later.

    Raises:
        ValueError: ``data`` is damaged, or contains anything but plain data.
    """
    try:
        return _run(data)
    except (IndexError, KeyError, struct.error, UnicodeDecodeError) as error:
        raise ValueError("it is damaged, or was cut short") from error


def _run(data: bytes) -> Any:
    stack: list[Any] = []
    outer: list[list[Any]] = []  # stacks that a MARK has set aside
    memo: dict[int, Any] = {}
    at = 0

    def take(count: int) -> bytes:
        nonlocal at
        taken = data[at : at + count]
        if len(taken) < count:
            raise IndexError
        at += count
        return taken

    def whole(count: int) -> int:
        return int.from_bytes(take(count), "little")

    while True:
        op = data[at]
        at += 1
        if op == 0x68:  # BINGET, the most frequent; without a call of whole(), to save time
            stack.append(memo[data[at]])
            at += 1
        elif op == 0x6A:  # LONG_BINGET
            stack.append(memo[whole(4)])
        elif op == 0x71:  # BINPUT
            memo[whole(1)] = stack[-1]
        elif op == 0x72:  # LONG_BINPUT
            memo[whole(4)] = stack[-1]
        elif op == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif op == 0x4B:  # BININT1
            stack.append(data[at])
            at += 1
        elif op in _LENGTHS:
            stack.append(take(whole(_LENGTHS[op])).decode("utf-8", "surrogatepass"))
        elif op in _NUMBERS:
            form = _NUMBERS[op]
            stack.append(form.unpack(take(form.size))[0])
        elif op == 0x8A:  # LONG1
            stack.append(int.from_bytes(take(whole(1)), "little", signed=True))
        elif op in _CONSTANTS:
            stack.append(_CONSTANTS[op])
        elif op == 0x28:  # MARK
            outer.append(stack)
            stack = []
        elif op in (0x5D, 0x7D, 0x29):  # EMPTY_LIST, EMPTY_DICT, EMPTY_TUPLE
            stack.append([] if op == 0x5D else {} if op == 0x7D else ())
        elif op in (0x65, 0x75, 0x74):  # APPENDS, SETITEMS, TUPLE
            items, stack = stack, outer.pop()
            if op == 0x65:
                _extend(stack[-1], items)
            elif op == 0x75:
                _update(stack[-1], items)
            else:
                stack.append(tuple(items))
        elif op == 0x61:  # APPEND
            item = stack.pop()
            _extend(stack[-1], [item])
        elif op == 0x73:  # SETITEM
            value, key = stack.pop(), stack.pop()
            _update(stack[-1], [key, value])
        elif op in _TUPLES:
            items = [stack.pop() for _ in range(_TUPLES[op])]
            stack.append(tuple(reversed(items)))
        elif op in _SKIPPED:
            take(_SKIPPED[op])
        elif op == 0x2E:  # STOP
            return stack.pop()
        else:
            raise ValueError(f"its operation {op:#04x} at byte {at - 1} makes something else")


def _extend(target: Any, items: list[Any]) -> None:
    if type(target) is not list:
        raise ValueError("it is damaged: it extends what is no list")
    target.extend(items)


def _update(target: Any, items: list[Any]) -> None:
    if type(target) is not dict or len(items) % 2:
        raise ValueError("it is damaged: it sets items of what is no dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, (str, int)):
            raise ValueError(f"a key is of type {type(key).__name__}, wanted str")
        target[key] = value
