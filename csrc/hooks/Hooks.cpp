#include "hooks/Hooks.hpp"

#include "hooks/HookCall.hpp"
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

uint64_t Hooks::nextOpId() {
  static std::atomic<uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

void Hooks::replace(std::shared_ptr<const Table> table) {
  any_.store(
      !table->pre.empty() || !table->post.empty() || !table->end.empty(),
      std::memory_order_relaxed);
  table_ = std::move(table);
}

void Hooks::remove(Id id) {
  std::shared_ptr<const Table> old;  // freed after the lock is released, see insert()
  LockGuard lock(mutex_);
  auto table = std::make_shared<Table>(*table_);
  const auto drop = [id](auto& list) {
    std::erase_if(list, [id](const auto& entry) { return entry.first == id; });
  };
  drop(table->pre);
  drop(table->post);
  drop(table->end);
  drop(table->abort);
  old = std::move(table_);
  replace(std::move(table));
}

void Hooks::clear() {
  std::shared_ptr<const Table> old;
  LockGuard lock(mutex_);
  old = std::move(table_);
  replace(std::make_shared<Table>());
}

std::shared_ptr<const Hooks::Table> Hooks::table() const {
  LockGuard lock(mutex_);
  return table_;
}

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

HookedCall::HookedCall(Hooks& hooks, PreparedOp& call)
    : table_(hooks.table()), args_(Hooks::argsOf(call, Hooks::nextOpId())) {
  if (!table_->end.empty() || (args_->async && !table_->post.empty())) {
    started_ = std::make_shared<HookedOperation>(args_->name, args_->opId, table_);
    call.op.hooked = started_;
  }
}

void HookedCall::before() const {
  for (const auto& [id, hook] : table_->pre) {
    (*hook)(args_);
  }
}

void HookedCall::after(
    c10::intrusive_ptr<c10d::Work> work, std::exception_ptr error,
    PostHookArgs::MakeWork finished) const {
  // Hooks::tellEnd() calls the post hooks of an asynchronous operation that was started, even if it
  // failed.
  const bool now = !args_->async || (error && !(started_ && started_->told.exchange(true)));
  if (now && !table_->post.empty()) {
    const bool makes = !work && !error;
    const auto args = std::make_shared<PostHookArgs>(
        args_->name, args_->opId, std::move(work), error, /*apart=*/false,
        makes ? std::move(finished) : nullptr);
    fireNow(*table_, args, error);
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

void Hooks::tellEnd(
    const Operation& op, c10d::Work* work, const std::exception_ptr& error,
    Clock::time_point started, Clock::time_point finished) {
  if (!op.hooked) {
    return;
  }
  // Moves the hooks, which may keep objects alive, out of `op`: a Work may keep `op` for long.
  const auto table = std::move(op.hooked->table);
  auto hooks = this->table();
  if (!table->end.empty() && !hooks->end.empty()) {
    auto args = std::make_shared<EndHookArgs>(
        op.hooked->name, op.hooked->id, op.async, error,
        // An operation that failed before it was started has no start.
        started == Clock::time_point{} ? Clock::duration{} : finished - started);
    auto fire = [hooks = std::move(hooks), args = std::move(args)] {
      for (const auto& [id, hook] : hooks->end) {
        callHook("an end hook", [&] { (*hook)(args); });
      }
    };
    if (op.async) {
      thread_.enqueue(std::move(fire));  // a hook may wait for other operations
    } else {
      fire();
    }
  }
  if (op.async && !table->post.empty() && !op.hooked->told.exchange(true)) {
    auto args = std::make_shared<PostHookArgs>(
        op.hooked->name, op.hooked->id, c10::intrusive_ptr<c10d::Work>::reclaim_copy(work), error,
        /*apart=*/true);
    // Calls the hooks that existed when the operation was issued, even those removed since. The
    // owner of a hook may remove it as soon as wait() returns, which on an accelerator is long
    // before the end.
    thread_.enqueue([hooks = table->post, args = std::move(args)] {
      for (const auto& [id, hook] : hooks) {
        callHook("a post hook", [&] { (*hook)(args); });
      }
    });
  }
}

void Hooks::run(const std::shared_ptr<PreHookArgs>& before, const std::function<void()>& body) {
  const auto table = this->table();
  const auto after = std::make_shared<PostHookArgs>(before->name, before->opId);
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
