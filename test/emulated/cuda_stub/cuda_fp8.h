// nccl.h includes this header where it sees the CUDA runtime, but uses nothing from it.
#pragma once
