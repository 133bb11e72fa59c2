"""What one rank has called: the groups that it made, and its operations in order."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchcomms_pg.trace.dumps import Frame

Sizes = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Made:
    """One call that makes groups: of `new_group`, `split_group` or `init_process_group`.

    ``lists`` has the global ranks of each group that the call makes, of which the rank is in one at
    most; ``names`` has their names. ``everyone``: whether all ranks of the job have to call it.
    ``where`` is an index of `Program.stacks`.
    """

    lists: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    description: str
    backend: str
    everyone: bool
    where: int


@dataclass(slots=True, frozen=True)
class Called:
    """One operation. ``made`` is the index in `Program.made` of the call that made its group.

    ``peer`` and ``root`` are ranks of the group, None if the operation has none; ``peer`` is -1 for
    any rank. ``batch`` is equal for the messages of one batch, and 0 outside of a batch. Sizes are
    empty if they depend on data. ``where`` is an index of `Program.stacks`.
    """

    op: str
    made: int
    inputs: Sizes
    outputs: Sizes
    dtype: str
    peer: int | None
    root: int | None
    reduce_op: str
    tag: int | None
    batch: int
    thread: int
    device: str
    where: int


@dataclass(slots=True)
class Memory:
    """Bytes of a rank's parameters, gradients and optimizer states, at the optimizer's steps."""

    parameters: int = 0
    gradients: int = 0
    states: int = 0


@dataclass
class Program:
    """What one rank has called.

    ``meshes`` has the shape and the names of the dimensions of each mesh of the whole job.
    ``unseen`` says what depended on data, a line each. ``modules`` are the modules that the program
    has imported. ``error`` is the text of the exception that ended it, ``code`` its exit code.
    ``steps`` has the number of calls at the end of each step of its optimizers. ``waits``: of calls
    that the program did not wait for at once, by their index, the number of calls before it did.
    """

    rank: int
    made: list[Made] = field(default_factory=list)
    calls: list[Called] = field(default_factory=list)
    stacks: list[tuple[Frame, ...]] = field(default_factory=list)
    meshes: list[tuple[tuple[int, ...], tuple[str, ...]]] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    steps: list[int] = field(default_factory=list)
    waits: dict[int, int] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)
    error: str = ""
    code: int = 0
