"""Runs programs for tests, and can end a program with all the processes that it has started."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap

from harness import ROOT, limits
from torchcomms_pg.testing.processes import stop

# Seconds that a test's program may take: less than the test, whose own limit would not show what
# the program has printed.
PROGRAM_LIMIT = 100


def run_python(*arguments, env=os.environ, **variables):
    """Runs an interpreter with these arguments, in ROOT, with `variables` added to `env`.

    A program after "-c" may be indented.
    """
    command = [sys.executable, *(textwrap.dedent(str(argument)) for argument in arguments)]
    return run_program(
        command,
        env={**env, **variables},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run_program(command, timeout=PROGRAM_LIMIT, **options):
    """Does what subprocess.run does; calls `end_tree` if the program takes too long."""
    with subprocess.Popen(command, text=True, **options) as program:
        try:
            output, errors = program.communicate(timeout=limits.grown(timeout))
        except subprocess.TimeoutExpired as late:
            end_tree(program.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):  # another process may have it
                output, errors = program.communicate(timeout=10)
                late.add_note(f"Its output ends:\n{((output or '') + (errors or ''))[-4000:]}")
            raise
        except BaseException:
            end_tree(program.pid)
            raise
    return subprocess.CompletedProcess(command, program.returncode, output, errors)


def children():
    """Returns {pid of a parent: [(pid, state) of each child]} for all processes of this machine."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
                found.setdefault(int(parent), []).append((int(name), state))
    return found


def end_tree(pid):
    """Kills a process and its descendants, such as torchrun's workers, each in its own session.

    Stops them first, so that none starts another process or gets another parent meanwhile.
    """
    tree, stopped = [pid], set()
    while fresh := [each for each in tree if each not in stopped]:
        for each in fresh:
            with contextlib.suppress(ProcessLookupError):
                stop(each, 10.0)
        stopped.update(fresh)
        by_parent = children()
        tree = [pid]
        for each in tree:
            tree += [child for child, _ in by_parent.get(each, [])]
    for each in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
