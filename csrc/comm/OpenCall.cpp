#include "comm/OpenCall.hpp"

#include <c10/util/Exception.h>

#include "base/Thread.hpp"
#include "comm/Identity.hpp"
#include "operation/Operation.hpp"

namespace torchcomms_pg {

OpenCall::OpenCall(const Identity& comm, const Operation* op)
    : comm_(comm), op_(op), outer_(std::exchange(innermost_, this)) {}

OpenCall::~OpenCall() {
  innermost_ = outer_;
  for (auto& body : afterwards_) {
    attempt(body);
  }
}

OpenCall* OpenCall::around(const Identity& comm) {
  OpenCall* outermost = nullptr;
  for (auto* call = handled_; call != nullptr; call = call->outer_) {
    outermost = &call->comm_ == &comm ? call : outermost;
  }
  return outermost;
}

void OpenCall::refuse(const Identity& comm, const char* what) {
  if (const auto* const call = around(comm)) {
    const auto name = call->op_ == nullptr ? "the end of the group" : describe(*call->op_);
    refuseIn(comm.group(), comm.rank(), name, what);
  }
}

void OpenCall::refuseIn(const Group& group, int rank, const std::string& call, const char* what) {
  TORCH_CHECK(
      false, what, " of group '", group.name, "' on rank ", group.numberOf(rank),
      ": called by the handler of a signal in the middle of ", call,
      " of that group, behind which it would wait for ever. A handler can end the group "
      "(destroy_process_group, finalize, abort), raise, use another group, or note the signal for "
      "the program to act on afterwards");
}

}  // namespace torchcomms_pg
