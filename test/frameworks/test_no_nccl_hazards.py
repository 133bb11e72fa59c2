"""What torch's own parallelisms, and others', do has no hazard for NCCL."""

import pytest

from frameworks import test_ddp, test_dtensor, test_fsdp, test_mesh, test_pipeline
from harness.comms import torchcomms
from harness.parity import run_over
from harness.ranks import BACKEND, Ranks
from torchcomms_pg.trace import load, nccl_hazards

CASES = {
    "DDP": (2, test_ddp.test_gradient_accumulation_with_no_sync, {}),
    "DDP, unused parameters": (2, test_ddp.test_parameters_that_a_step_does_not_use, {}),
    "DDP, uneven inputs": (3, test_ddp.test_uneven_inputs_join, dict(by_initial_world_size=True)),
    "zero optimizer": (2, test_ddp.test_zero_redundancy_optimizer, dict(bucket_views=True)),
    "FSDP1": (2, test_fsdp.test_fsdp1, dict(strategy="FULL_SHARD", original=True)),
    "FSDP1, hybrid": (4, test_fsdp.test_fsdp1_hybrid, dict(strategy="HYBRID_SHARD")),
    "FSDP2": (2, test_fsdp.test_fsdp2, dict(reshard=True)),
    "HSDP": (4, test_fsdp.test_hsdp2_with_all_reduce_and_state_dicts, {}),
    "tensor parallel": (2, test_dtensor.test_tensor_and_sequence_parallel, dict(plan="tensor")),
    "redistribution": (4, test_dtensor.test_redistribution_on_a_plane, {}),
    "context parallel": (2, test_dtensor.test_context_parallel, {}),
    **{
        f"ring of context parallel, {rotation}": (
            3,
            test_dtensor.test_the_ring_of_context_parallel,
            dict(rotation=rotation, causal=False),
        )
        for rotation in ("allgather", "alltoall")
    },
    **{
        f"pipeline, {kind.__name__}, {world} ranks": (
            world,
            test_pipeline.test_schedules_of_one_stage_a_rank,
            dict(kind=kind),
        )
        for kind in (test_pipeline.ScheduleGPipe, test_pipeline.Schedule1F1B)
        for world in (2, 3)
    },
    **{
        f"pipeline, {name}": (
            2,
            test_pipeline.test_schedules_of_several_stages_a_rank,
            dict(name=name),
        )
        for name in test_pipeline.INTERLEAVED
    },
    "object collectives": (3, test_mesh.test_object_collectives, {}),
}


def run_case(name, store):
    """Called in a rank, which then has its dump."""
    world, test, kwargs = CASES[name]
    run_over(BACKEND, store, world, test.over_one, kwargs, {})
    torchcomms().hooks.process_recorder().dump_file()


# The others take as long together.
FIRST = (
    *("DDP", "FSDP1", "FSDP2", "HSDP", "tensor parallel", "context parallel"),
    *("pipeline, Schedule1F1B, 3 ranks", "pipeline, interleaved zero bubble"),
)


@pytest.mark.parametrize(
    "name",
    [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_what_frameworks_do_has_no_hazard(name, tmp_path):
    world = CASES[name][0]
    prefix = str(tmp_path / "rank_")
    env = dict(TORCH_FR_DUMP_TEMP_FILE=prefix, TORCH_FR_BUFFER_SIZE="20000")
    with Ranks(world, init=False, env=env) as ranks:
        ranks.run(run_case, name, ranks.store_args())
    dumps = load(tmp_path)
    assert set(dumps) == set(range(world)) and all(dump.whole for dump in dumps.values())
    report = nccl_hazards(dumps)
    assert not report.found and not report.doubts, f"{report}"
    assert sum(len(dump.entries) for dump in dumps.values()) > 4 * world
