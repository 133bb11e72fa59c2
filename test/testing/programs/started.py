"""A file of tests that starts a thread when it is imported, of which no ranks can be forked."""

import threading
import time

import pytest

threading.Thread(target=time.sleep, args=(100,), daemon=True).start()


@pytest.mark.ranks(2)
def test_of_a_file_with_threads():
    pass
