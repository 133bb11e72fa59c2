// Operations that hooks are told of.
#include <utility>

#include "comm/Buffers.hpp"
#include "comm/Communicator.hpp"

namespace torchcomms_pg {

namespace {

// All post hooks run, whatever the others do. What the first of them raises
// is raised when nothing else was.
void fireNow(
    const Hooks::Table& table,
    const std::shared_ptr<PostHookArgs>& args,
    std::exception_ptr& error) {
  for (const auto& [id, hook] : table.post) {
    try {
      (*hook)(args);
    } catch (const std::exception& raised) {
      if (error) {
        TORCH_WARN("a post hook raised after the operation had failed: ", raised.what());
      } else {
        error = std::current_exception();
      }
    }
  }
}

OpName nameFor(const PreparedOp& call) {
  switch (call.op.kind) {
    case OpKind::allReduce: return OpName::all_reduce;
    case OpKind::broadcast: return OpName::broadcast;
    case OpKind::reduce: return OpName::reduce;
    case OpKind::allGather:
      return sameNumel(call.outputs) ? OpName::all_gather : OpName::all_gather_v;
    case OpKind::allGatherSingle: return OpName::all_gather_single;
    case OpKind::reduceScatter:
      return sameNumel(call.inputs) ? OpName::reduce_scatter : OpName::reduce_scatter_v;
    case OpKind::reduceScatterSingle: return OpName::reduce_scatter_single;
    case OpKind::allToAll: return OpName::all_to_all;
    case OpKind::allToAllSingle:
      return call.op.inputSplits.empty() && call.op.outputSplits.empty()
                 ? OpName::all_to_all_single
                 : OpName::all_to_all_v_single;
    case OpKind::gather: return OpName::gather;
    case OpKind::gatherSingle: return OpName::gather_single;
    case OpKind::scatter: return OpName::scatter;
    case OpKind::send: return OpName::send;
    case OpKind::recv: return OpName::recv;
    case OpKind::barrier:
    case OpKind::monitoredBarrier: return OpName::barrier;
    case OpKind::coalesced: return OpName::batch_op_issue;
    case OpKind::newWindow: return OpName::new_window;
    case OpKind::tensorRegister: return OpName::tensor_register;
    case OpKind::tensorDeregister: return OpName::tensor_deregister;
    case OpKind::put: return OpName::put;
    case OpKind::signal: return OpName::signal;
    case OpKind::waitSignal: return OpName::wait_signal;
    case OpKind::split: return OpName::split;
    case OpKind::shrink: return OpName::shrink;
    case OpKind::registerMemory:
    case OpKind::suspend:
    case OpKind::resume:
    case OpKind::initialization: break;  // no operation of a user
  }
  TORCH_INTERNAL_ASSERT(false, "hooks do not know ", name(call.op.kind));
}

}  // namespace

std::shared_ptr<PreHookArgs> Hooks::argsOf(const PreparedOp& call, uint64_t id) {
  auto args = std::make_shared<PreHookArgs>();
  const auto& op = call.op;
  args->name = nameFor(call);
  args->opId = id;
  args->async = op.async;
  args->inputs = call.inputs;
  args->outputs = call.outputs;
  if (isPointToPoint(op.kind)) {
    args->peer = op.peer;
  } else if (op.peer >= 0) {
    args->root = op.peer;
  }
  args->reduceOp = op.reduceOp == nullptr ? "" : op.reduceOp;
  args->inputSplits = op.inputSplits;
  args->outputSplits = op.outputSplits;
  args->ranks = call.ranks;
  args->newName = call.newName;
  for (const auto& member : call.members ? *call.members : call.parts) {
    args->ops.push_back(argsOf(member, id));
  }
  return args;
}

WorkPtr Hooks::launch(PreparedOp& call, WorkPtr work, Communicator& comm) {
  const auto table = this->table();
  const auto id = nextOpId();
  const auto args = argsOf(call, id);
  std::shared_ptr<HookedOperation> hooked;
  if (!table->end.empty() || (args->async && !table->post.empty())) {
    hooked = std::make_shared<HookedOperation>(args->name, id, table);
    call.op.hooked = hooked;
  }
  std::exception_ptr error;
  WorkPtr result;
  try {
    for (const auto& [id, hook] : table->pre) {
      (*hook)(args);
    }
    result = comm.start(call, work);
  } catch (...) {
    error = std::current_exception();
    if (work) {
      work->finish(error);  // of a batch, which was given out already
    }
  }
  // Of an asynchronous operation that was started tellEnd() tells, also where that failed.
  const bool now = !args->async || (error && !(hooked && hooked->told.exchange(true)));
  if (now && !table->post.empty()) {
    auto after = std::make_shared<PostHookArgs>();
    after->name = args->name;
    after->opId = id;
    after->work = result;
    after->error = error;
    if (!result && !error) {
      after->finished = {comm.shared_from_this(), args, call.op.kind, call.op.seq};
    }
    fireNow(*table, after, error);
  }
  if (error) {
    std::rethrow_exception(error);
  }
  return result;
}

void Hooks::tellEnd(
    const Operation& op,
    const WorkPtr& work,
    const std::exception_ptr& error,
    Clock::time_point started,
    Clock::time_point finished) {
  if (!op.hooked) {
    return;
  }
  // A Work may live on, and hooks hold on to what they like.
  const auto table = std::move(op.hooked->table);
  if (!table->end.empty()) {
    auto args = std::make_shared<EndHookArgs>();
    args->name = op.hooked->name;
    args->opId = op.hooked->id;
    args->async = op.async;
    args->error = error;
    // An operation that failed before it was started has no start.
    args->duration = started == Clock::time_point{} ? Clock::duration{} : finished - started;
    fireEnd(std::move(args));
  }
  if (op.async && !table->post.empty() && !op.hooked->told.exchange(true)) {
    auto args = std::make_shared<PostHookArgs>();
    args->name = op.hooked->name;
    args->opId = op.hooked->id;
    args->work = work;
    args->error = error;
    args->apart = true;
    firePost(table->post, std::move(args));
  }
}

void Hooks::run(const std::shared_ptr<PreHookArgs>& before, const std::function<void()>& body) {
  const auto table = this->table();
  auto after = std::make_shared<PostHookArgs>();
  after->name = before->name;
  after->opId = before->opId;
  try {
    for (const auto& [id, hook] : table->pre) {
      (*hook)(before);
    }
    body();
  } catch (...) {
    after->error = std::current_exception();
  }
  auto error = after->error;
  fireNow(*table, after, error);
  if (error) {
    std::rethrow_exception(error);
  }
}

}  // namespace torchcomms_pg
