// Calls of hooks for operations and their ends.
#include <utility>

#include "comm/Communicator.hpp"
#include "monitor/Printer.hpp"

namespace torchcomms_pg {

namespace {

// Runs all post hooks, even if some raise. If `error` is null, sets it to the first exception.
void fireNow(
    const Hooks::Table& table, const std::shared_ptr<PostHookArgs>& args,
    std::exception_ptr& error) {
  for (const auto& [id, hook] : table.post) {
    try {
      (*hook)(args);
    } catch (const std::exception& raised) {
      if (error) {
        printLine(
            std::string("torchcomms_pg: a post hook raised after the operation had failed: ") +
            raised.what());
      } else {
        error = std::current_exception();
      }
    }
  }
}

OpName nameFor(const PreparedOp& call) {
  const auto& known = traits(call.op.kind);
  const auto name = call.uneven() && known.unevenHook ? known.unevenHook : known.hook;
  TORCH_INTERNAL_ASSERT(name.has_value(), "hooks do not know ", known.name);
  return *name;
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
      work->finish(error);  // a batch's Work, which callers have
    }
  }
  // tellEnd() calls the post hooks of an asynchronous operation that was started, even if it
  // failed.
  const bool now = !args->async || (error && !(hooked && hooked->told.exchange(true)));
  if (now && !table->post.empty()) {
    auto after = std::make_shared<PostHookArgs>();
    after->name = args->name;
    after->opId = id;
    after->work = result;
    after->error = error;
    if (!result && !error) {
      after->finished = {comm.self(), args, call.op.kind, call.op.seq};
    }
    fireNow(*table, after, error);
  }
  if (error) {
    std::rethrow_exception(error);
  }
  return result;
}

void Hooks::tellEnd(
    const Operation& op, const WorkPtr& work, const std::exception_ptr& error,
    Clock::time_point started, Clock::time_point finished) {
  if (!op.hooked) {
    return;
  }
  // Moves the hooks, which may keep objects alive, out of `op`: a Work may keep `op` for long.
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

void GroupHooks::tellEnd(
    const Operation& op, const WorkPtr& work, const std::exception_ptr& error,
    Clock::time_point started, Clock::time_point finished) {
  if (const auto hook = this->end()) {
    // Hides the Work of a synchronous operation, which only measures the duration.
    (*hook)(op, op.async ? work.get() : nullptr, started, finished);
  }
  users_->tellEnd(op, work, error, started, finished);
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
