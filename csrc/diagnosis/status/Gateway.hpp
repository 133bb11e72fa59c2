// Starts the process that answers NCCL's RAS client for the job's processes of this host
// (torchcomms_pg/status/ras/gateway.py).
#pragma once

#include <string>
#include <vector>

namespace torchcomms_pg::status {

// The command that starts the gateway. Its last word is the address that the user has named.
struct GatewayCommand {
  std::vector<std::string> words;  // none if no address is named
  std::vector<std::string> environment;
};

// Runs a command, given by its words and its environment, in a process that is independent of this
// one: no child of it, so that nobody waits for its end and no SIGCHLD comes, and in a separate
// session. The process has this process's stderr, and no other open file. Raises
// std::runtime_error with the reason if the program cannot be started.
void runApart(std::vector<std::string> words, std::vector<std::string> environment);

}  // namespace torchcomms_pg::status
