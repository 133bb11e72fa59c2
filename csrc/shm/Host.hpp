// The names of host/, which this folder uses unqualified.
#pragma once

#include "host/HostStream.hpp"
#include "host/Interrupt.hpp"
#include "host/Names.hpp"
#include "host/NcclError.hpp"
#include "host/Process.hpp"
#include "host/Reduce.hpp"
#include "host/Signature.hpp"

namespace torchcomms_pg::shm {

using namespace host;

}  // namespace torchcomms_pg::shm
