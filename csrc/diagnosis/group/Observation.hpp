// Makes the diagnosis observe this process's groups.
#pragma once

namespace torchcomms_pg {

// Call once, before the first group.
void observeProcess();

}  // namespace torchcomms_pg
