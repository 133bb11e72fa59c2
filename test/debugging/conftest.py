import os

import pytest

from harness.ranks import Ranks


@pytest.fixture
def recording(tmp_path):
    """Makes ranks that dump to tmp_path."""
    made = []

    def start(world, init=True, **env):
        env = dict(TORCH_FR_DUMP_TEMP_FILE=str(tmp_path / "trace_"), **env)
        made.append(Ranks(world, init=init, env=env))
        return made[-1]

    yield start
    for ranks in made:
        ranks.close()


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "holds the GIL")
    return str(tmp_path / "holds the GIL")
