"""What the check has found, and the texts that tell it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchcomms_pg.trace.analysis import rank_names

_DOCS = 'torch.distributed\'s documentation, "Synchronous and asynchronous collective operations"'
_WAIT = f"{_DOCS}: the output is to be used after wait()"
_INPUT = (
    'torch\'s tutorial "Writing Distributed Applications": the tensors of isend and irecv are not '
    "to be changed or read before wait() has returned; the same holds for collectives"
)


@dataclass(frozen=True)
class _Kind:
    """The texts of one kind of finding: what the ranks do, the second line, advice, rule."""

    title: str
    then: str
    otherwise: str
    instead: str
    rule: str


_KINDS = {
    "read": _Kind(
        "read the output of {op} before its end",
        "then {then} reads it",
        "the operation's result, what was there before, or both mixed",
        "wait first, for the work of each operation whose output is read",
        _WAIT,
    ),
    "write": _Kind(
        "write into the output of {op} before its end",
        "then {then} writes it",
        "what is written is lost, or mixed with the operation's result",
        "write after wait(), or into another tensor",
        _WAIT,
    ),
    "input": _Kind(
        "write into the input of {op} before its end",
        "then {then} writes it",
        "the other ranks get the old data, the new, or both mixed",
        "write after wait(), or give the operation a copy",
        _INPUT,
    ),
    "overlap": _Kind(
        "give one piece of memory to two operations in flight",
        "then {then} takes it, too",
        "Gloo orders them by chance; other backends only in one group and one stream",
        "wait for the first operation before the second is issued",
        _WAIT,
    ),
    "changed": _Kind(
        "change a tensor of {op} before its end, by no operator of torch",
        "{then}",
        "the old data, the new, or both mixed go to the other ranks or stay in the output",
        "change it after wait(); NumPy, DLPack and C++ are possible authors",
        _INPUT,
    ),
    "freed": _Kind(
        "free an input of {op} before its end",
        "{then}",
        "the memory gets new contents while the operation reads it",
        "keep the tensor, or the work and not only its future, until wait() has returned",
        "torch's NCCL backend: until wait() the work keeps the tensors, a future keeps no input",
    ),
    "again": _Kind(
        "wait twice for one work of {op}",
        "then {then}",
        "what follows the first wait runs a second time, on tensors that are used or freed",
        "drop the work after its wait",
        "torch has none; DeepSpeed's issue 8486 shows what a second wait did to a freed parameter",
    ),
    "process": _Kind(
        "wait for a work of {op} that another process has issued",
        "then {then}",
        "a forked process has a copy of the work, which nothing completes",
        "wait in the process that has issued the operation",
        "torch's documentation of multiprocessing: process groups are made in each process",
    ),
    "lost": _Kind(
        "never wait for the result of {op} in compiled code",
        "{then}",
        "whoever reads it reads the result, what was there before, or both mixed",
        "pass the result through wait_tensor before it leaves the graph",
        "torch.distributed._functional_collectives: each result is waited for before it is used",
    ),
}


@dataclass
class Finding:
    """One use of an asynchronous operation that depends on time, at one pair of lines.

    Attributes:
        kind: ``read``, ``write``, ``input``, ``overlap``, ``changed``, ``freed``, ``again``,
            ``process`` or ``lost``; docs/check_async.md describes them.
        ranks: the global ranks on which it was found.
        issue: the operation and the line of its issue.
        then: what came too early, and its line; without a line if that is not known.
        times: how often it was found, on all ranks.
    """

    kind: str
    ranks: list[int]
    issue: tuple[str, str]
    then: tuple[str, str]
    times: int = 1

    def __str__(self) -> str:
        texts = _KINDS[self.kind]
        operation = self.issue[0].split(" (")[0]
        title = texts.title.format(op=f"{_article(operation)} {operation}")
        who = rank_names(sorted(self.ranks))
        verb = title if len(self.ranks) > 1 else _singular(title)
        first = f"rank {min(self.ranks)}: "
        lines = [
            f"{who} {verb}",
            f"  {first}{_at(*self.issue)}",
            f"  {' ' * len(first)}{_at(texts.then.format(then=self.then[0]), self.then[1])}",
            f"  without the check: {texts.otherwise}",
            f"  instead: {texts.instead}",
            f"  rule: {texts.rule}",
        ]
        if self.times > 1:
            lines.append(f"  {self.times - 1} more times at these lines")
        return "\n".join(lines)


@dataclass
class Findings:
    """What was found in one process, or after `merged` on all ranks.

    Attributes:
        found: the findings, in the order in which they were made.
        operations: how many asynchronous operations were checked.
        not_covered: a line for each thing that could not be judged.
    """

    found: list[Finding] = field(default_factory=list)
    operations: int = 0
    not_covered: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        blocks = [f"{number}. {finding}" for number, finding in enumerate(self.found, 1)]
        if not blocks:
            blocks = [f"No early use in {self.operations} asynchronous operations found."]
        if self.not_covered:
            lines = [f"  {line}" for line in self.not_covered]
            blocks.append("\n".join(["Not covered:", *lines]))
        return "\n\n".join(blocks)

    def as_dict(self) -> dict[str, Any]:
        """Returns the findings as values of JSON, for `from_dict`."""
        found = [[one.kind, one.ranks, one.issue, one.then, one.times] for one in self.found]
        return {
            "found": found,
            "operations": self.operations,
            "not_covered": self.not_covered,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Findings:
        """Returns the findings that `as_dict` has turned into values."""
        found = [
            Finding(kind, ranks, (issue[0], issue[1]), (then[0], then[1]), times)
            for kind, ranks, issue, then, times in values["found"]
        ]
        return cls(found, values["operations"], values["not_covered"])


def merged(parts: Iterable[Findings]) -> Findings:
    """Returns the findings of several processes as one; each pair of lines is in it once."""
    result = Findings()
    known: dict[tuple[str, str, str], Finding] = {}
    for part in parts:
        result.operations += part.operations
        result.not_covered += [each for each in part.not_covered if each not in result.not_covered]
        for finding in part.found:
            add(known, finding)
    result.found = list(known.values())
    return result


def add(known: dict[tuple[str, str, str], Finding], finding: Finding) -> bool:
    """Adds a finding to `known`; returns whether it is the first at its lines."""
    key = (finding.kind, _place(finding.issue), _place(finding.then))
    first = known.setdefault(key, finding)
    if first is finding:
        return True
    first.times += finding.times
    first.ranks += [rank for rank in finding.ranks if rank not in first.ranks]
    return False


def _place(what: Sequence[str]) -> str:
    return what[1] or what[0]


def _at(what: str, where: str) -> str:
    return f"{what}  at {where}" if where else what


def _article(word: str) -> str:
    return "an" if word[:1] in "aeiou" else "a"


def _singular(title: str) -> str:
    verb, space, rest = title.partition(" ")
    if verb == "never":
        return verb + space + _singular(rest)
    return f"{verb}s{space}{rest}"
