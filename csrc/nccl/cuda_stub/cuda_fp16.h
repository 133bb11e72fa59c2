// nccl.h includes this header but uses nothing from it.
#pragma once
