// Handlers for torch's debug server, which queries the processes of a job. They run in one of
// torch's threads, which never takes the GIL: for a file with stacks, another thread takes the GIL,
// within a time limit.
#pragma once

namespace torchcomms_pg {

// Registers the handlers behind the torchcomms_* pages with c10d's control plane. Idempotent.
void registerControlPlane();

}  // namespace torchcomms_pg
