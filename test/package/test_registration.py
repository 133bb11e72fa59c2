"""The name "torchcomms" reaches this backend, in every way torch offers, or says why not."""

import copy
import datetime
import os
import re
import textwrap
import traceback

import pytest
import torch
import torch.distributed as dist

import torchcomms_pg
from harness.programs import run_python
from harness.ranks import Ranks, init_default_group

pytestmark = [pytest.mark.beyond_gloo, pytest.mark.torch_version]
CPU = torch.device("cpu")


ALONE = """
    store = dist.HashStore()
    dist.init_process_group("torchcomms", store=store, rank=0, world_size=1)
    dist.all_reduce(tensor := torch.ones(4))
    assert tensor.tolist() == [1, 1, 1, 1]
    print("name:", dist.get_backend())
    dist.destroy_process_group()
"""


def alone(first="import torchcomms_pg", **env):
    """Runs ALONE in a fresh interpreter; returns (exit code, output)."""
    code = f"import torch, torch.distributed as dist\n{first}\n"
    done = run_python("-c", code + textwrap.dedent(ALONE), **env)
    return done.returncode, done.stdout + done.stderr


def test_import_registers_the_name_for_cpu_and_cuda():
    assert "torchcomms" in dist.Backend.backend_list
    # Other tests of this process may have added devices after these.
    assert dist.Backend.backend_capability["torchcomms"][:2] == ["cpu", "cuda"]
    assert dist.Backend.backend_type_map["torchcomms"] == dist.ProcessGroup.BackendType.CUSTOM


def test_registering_again_changes_nothing():
    before = list(dist.Backend.backend_list), dict(dist.Backend._plugins)
    torchcomms_pg.registration.register()
    torchcomms_pg.registration.register()
    assert (list(dist.Backend.backend_list), dict(dist.Backend._plugins)) == before


@pytest.mark.slow
def test_register_fails_closed_when_the_name_is_taken():
    """The other creator stays in place, and no program takes it for this backend."""
    done = run_python(
        "-c",
        """
        import torch.distributed as dist

        def other(*args):
            raise AssertionError("the other creator")

        dist.Backend.register_backend("torchcomms", other, devices=["cpu"])
        try:
            import torchcomms_pg.registration
            torchcomms_pg.registration.register()
        except Exception as error:
            print("refused:", type(error).__name__, error)
        assert dist.Backend._plugins["TORCHCOMMS"].creator_fn is other
        """,
    )
    assert done.returncode == 0, done.stderr
    assert re.search("refused: .*torchcomms.*registered", done.stdout), done.stdout


@pytest.mark.skipif(torch.__version__ < "2.14", reason="torch 2.14 reads the entry points")
def test_from_torch_2_14_the_name_works_without_an_import(tmp_path, monkeypatch):
    info = tmp_path / "entry-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: entry\nVersion: 1\n")
    target = "torchcomms_pg.registration:register"
    (info / "entry_points.txt").write_text(f"[torch.distributed.backends]\ntorchcomms = {target}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    code, output = alone(first="")
    assert code == 0 and "name: torchcomms" in output, output


MIXED = ["cpu:torchcomms", "cpu:torchcomms,cuda:torchcomms", "cpu:gloo,cuda:torchcomms"]
if dist.is_nccl_available():
    MIXED.append("cpu:torchcomms,cuda:nccl")


def mixed(args, world, backend):
    init_default_group(*args, int(os.environ["RANK"]), world, 20, backend)
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    assert tensor[0] == world
    dist.all_gather_object(things := [None] * world, dist.get_rank())
    assert things == list(range(world))
    dist.barrier()
    group = dist.new_group()
    dist.all_reduce(tensor, group=group)
    assert tensor[0] == world**2
    name = dist.group.WORLD._get_backend(CPU).name()
    assert name.lower() == ("gloo" if "cpu:gloo" in backend else "torchcomms"), name
    assert dist.group.WORLD.name().lower() != "undefined"
    dist.group.WORLD._wait_for_pending_works()
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", MIXED)
def test_mixed_backend_strings_on_a_machine_without_gpu(backend):
    if "nccl" in backend and not torch.cuda.is_available():
        pytest.skip("torch's own nccl cannot start without a GPU")
    with Ranks(2, init=False) as ranks:
        ranks.run(mixed, ranks.store_args(), 2, backend)


def alone_with(args, backend):
    try:
        init_default_group(*args, 0, 1, 20, backend)
    except Exception:
        return traceback.format_exc()
    dist.all_reduce(tensor := torch.ones(4))
    assert tensor.tolist() == [1, 1, 1, 1]
    return None


def test_cpu_torchcomms_with_cuda_nccl_works_or_torch_itself_refuses():
    """If torch was built without NCCL or sees no GPU, torch refuses, and not torchcomms_pg."""
    if torch.cuda.is_available():
        pytest.skip("test_mixed_backend_strings covers it")
    with Ranks(1, init=False) as ranks:
        (refusal,) = ranks.run(alone_with, ranks.store_args(), "cpu:torchcomms,cuda:nccl")
    if refusal is not None:
        ours = os.path.dirname(torchcomms_pg.__file__) + os.sep
        raised_in = refusal.rpartition('  File "')[2]  # patches of torch's functions are around it
        assert "nccl" in refusal.lower() and not raised_in.startswith(ours), refusal


@pytest.mark.ranks(2)
def test_the_backend_knows_its_name_rank_and_size(world):
    backend = dist.group.WORLD._get_backend(CPU)
    assert isinstance(backend, torchcomms_pg.Backend)
    assert backend.name() == "torchcomms" and dist.get_backend() == "torchcomms"
    assert (backend.rank(), backend.size()) == (dist.get_rank(), world)


def with_options(args, world):
    options = torchcomms_pg.Backend.Options()
    init_default_group(*args, int(os.environ["RANK"]), world, 20, pg_options=options)
    backend = dist.group.WORLD._get_backend(CPU)
    assert backend.options._timeout == datetime.timedelta(seconds=20)
    clone = copy.deepcopy(backend.options)
    assert clone._timeout == backend.options._timeout and clone is not backend.options
    assert list(clone.global_ranks_in_group) == list(backend.options.global_ranks_in_group)
    assert clone.group_name == backend.options.group_name
    dist.all_reduce(tensor := torch.ones(3))
    assert tensor[0] == world
    dist.destroy_process_group()


def test_options_are_taken_kept_and_copied():
    with Ranks(2, init=False) as ranks:
        ranks.run(with_options, ranks.store_args(), 2)


def wrong_options(args):
    with pytest.raises((TypeError, ValueError, RuntimeError), match="(?i)options"):
        init_default_group(*args, 0, 1, 5, pg_options="fast please")


def test_options_of_a_wrong_type_are_refused():
    with Ranks(1, init=False) as ranks:
        ranks.run(wrong_options, ranks.store_args())


@pytest.mark.slow
def test_the_torchcomms_package_with_its_switch_on_is_a_clear_error(tmp_path, monkeypatch):
    """The switch would give the name torchcomms to another project's package."""
    fake = tmp_path / "torchcomms"
    fake.mkdir()
    contents = """
        def new_comm(*args, **kwargs):
            raise SystemExit("hijacked")

        def is_backend_built(name):
            return False

        def _is_backend_registered(name):
            return name == "torchcomms"

        class _BackendWrapper:
            pass

        class FlightRecorderHook:
            pass
    """
    for module in ("__init__", "_comms", "_backend_wrapper", "hooks", "objcol"):
        (fake / f"{module}.py").write_text(textwrap.dedent(contents))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    code, output = alone(TORCH_DISTRIBUTED_USE_TORCHCOMMS="1")
    assert code != 0, output
    assert "hijacked" not in output
    assert "TORCH_DISTRIBUTED_USE_TORCHCOMMS" in output and "torchcomms_pg" in output, output


@pytest.mark.slow
def test_the_switch_without_that_package_is_harmless():
    code, output = alone(TORCH_DISTRIBUTED_USE_TORCHCOMMS="1")
    assert code == 0 and "name: torchcomms" in output, output
