// Names of host/ that this folder uses unqualified.
#pragma once

#include "host/HostStream.hpp"
#include "host/Interrupt.hpp"
#include "host/Names.hpp"
#include "host/NcclError.hpp"
#include "host/Process.hpp"
#include "host/Reduce.hpp"
#include "host/Signature.hpp"

namespace torchcomms_pg::shm {

using host::HostStream;
using host::NcclError;

using host::bootHash;
using host::describe;
using host::hashBytes;
using host::hasRoot;
using host::hostName;
using host::interrupted;
using host::interruption;
using host::kindName;
using host::pidSpace;
using host::processAlive;
using host::processId;
using host::processStartTime;
using host::signatureOf;
using host::typeName;

}  // namespace torchcomms_pg::shm
