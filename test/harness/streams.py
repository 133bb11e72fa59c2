"""Holds up a CUDA stream, on any GPU."""

import contextlib
import ctypes
import functools

import torch

_semaphores = []  # never freed, since a stream may reach one at any time


@contextlib.contextmanager
def hold(stream=None):
    """Holds up a stream (default: the current one), like a kernel that does not end.

    Gives a function that releases the stream, as the end of the block does, too. The stream runs a
    function of the host that waits for a semaphore (CUDA Runtime API, cudaLaunchHostFunc), so no
    duration is guessed.
    """
    library, semaphore = ctypes.CDLL(None), ctypes.create_string_buffer(32)  # a sem_t
    _semaphores.append(semaphore)
    assert library.sem_init(semaphore, 0, 0) == 0
    stream = torch.cuda.current_stream() if stream is None else stream
    with torch.cuda.device(stream.device):
        result = library.cudaLaunchHostFunc(
            ctypes.c_void_p(stream.cuda_stream),
            ctypes.cast(library.sem_wait, ctypes.c_void_p),
            ctypes.cast(semaphore, ctypes.c_void_p),
        )
    assert result == 0, f"cudaLaunchHostFunc on {stream}: cudaError {result}"
    release = functools.partial(library.sem_post, semaphore)
    try:
        yield release
    finally:
        release()
