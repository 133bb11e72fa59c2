"""The examples of the API's two documents run as they are written there.

Device and backend are exchanged for what every machine has, the module's name for ours. The
documents are not part of the package: without them, next to the checkout, this is skipped.
"""

import os
import pathlib
import re
import textwrap
import uuid

import pytest
import torch.distributed as dist
from ranks import on_ranks

pytestmark = pytest.mark.beyond_gloo
SPEC = pathlib.Path(__file__).resolve().parents[2] / "shared" / "spec"
API, HOOKS = SPEC / "001_cc01c7dc0c89eb7e.txt", SPEC / "000_ac130fe3d8209d3d.txt"
NEEDS = {  # what else an example needs; those are not run here
    "CUDAGraph": "a GPU",
}


def examples(path):
    """(first line, code) of the programs in a document, by the title above them."""
    if not path.is_file():
        return {}
    text, found = path.read_text(), {}
    if path == API:
        pattern = r"^### ([^\n]*)\n(?:(?!^#).)*?```python\n(.*?)```"
    else:
        pattern = r"^([^\n]+)\n[\^]{4,}\n+\.\. code-block:: python\n\n((?:    [^\n]*\n|\n)+)"
    for title, code in re.findall(pattern, text, re.M | re.S):
        if "new_comm(" in code and "import torchcomms" in code:
            found[title] = textwrap.dedent(code)
    return found


# Both documents have a "Basic Usage".
EXAMPLES = {**examples(API), **{f"hooks: {t}": code for t, code in examples(HOOKS).items()}}


def adapted(code, path):
    code = re.sub(r"\bimport torchcomms\b", "import torchcomms_pg as torchcomms", code)
    code = code.replace("from torchcomms.", "from torchcomms_pg.")
    code = code.replace("cuda:0", "cpu").replace('"ncclx"', '"shm"').replace('"nccl"', '"shm"')
    code = code.replace("/tmp/torchcomm_test", path)
    # Two mistakes of the document: torch has no timedelta, and this is a placeholder.
    code = code.replace("torch.timedelta(", "__import__('datetime').timedelta(")
    return re.sub(r',\n\s*"backend_option": "value"', "", code)


@pytest.mark.skipif(not EXAMPLES, reason="the documents are not next to the checkout")
def test_examples_are_found():
    wanted = {"Basic Usage", "Asynchronous Operations", "Custom Options"}
    assert wanted | {"hooks: Registering Hooks", "hooks: Basic Usage"} <= set(EXAMPLES)


@pytest.mark.parametrize("title", list(EXAMPLES) or [pytest.param("", marks=pytest.mark.skip)])
@on_ranks(2)
def test_example(world, title):
    code = EXAMPLES[title]
    for word, what in NEEDS.items():
        if word in code:
            pytest.skip(f"needs {what}")
    path = [f"/tmp/torchcomms_pg-{uuid.uuid4()}"]
    dist.broadcast_object_list(path, 0)
    environment = dict(os.environ)
    server = None
    try:
        if dist.get_rank() == 0:
            server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = [server.port if server else None]
        dist.broadcast_object_list(port, 0)
        os.environ.update(
            WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port[0]),
            TORCHELASTIC_USE_AGENT_STORE="True", RANK=str(dist.get_rank()),
        )  # fmt: skip
        exec(compile(adapted(code, path[0]), title, "exec"), {"__name__": "__main__"})
        dist.barrier()
    finally:
        os.environ.clear()
        os.environ.update(environment)
        if dist.get_rank() == 0 and os.path.exists(path[0]):
            os.unlink(path[0])
