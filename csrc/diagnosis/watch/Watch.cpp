#include "diagnosis/watch/Watch.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "device/AcceleratorDevice.hpp"
#include "diagnosis/lateness/AwaitedEnd.hpp"

namespace torchcomms_pg {

namespace {

// The id of every watch's hooks; users choose the ids of their hooks.
constexpr int64_t kHookId = 0x7463'6f6d'6d73'7067;

// An operation that a thread has begun to issue.
struct Call {
  const Watch* watch;
  int64_t id;                   // c10d's id, by which the post hook finds the call
  std::weak_ptr<WatchedOp> op;  // null once its group is closed
  c10::Device device;
};
// What is known of a thread.
struct Thread {
  // Operations that the thread has begun to issue; the innermost is the last. An operation whose
  // call raises has no post hook, and stays until the thread's next operation.
  std::vector<Call> calls;
  // The synchronous operation whose call returned last. The thread is assumed to wait for it until
  // the thread's next call.
  std::weak_ptr<WatchedOp> waiting;
  // True if `told` gets the time of that operation's end. The fields below then describe the
  // operation, which may be gone by its end.
  bool timed = false;
  AwaitedEnd& told = AwaitedEnd::ofThread();
  Clock::time_point issued;
  bool collective = false;
  std::weak_ptr<WatchedGroup> group;

  // Records that the thread will wait for an operation. Returns the callback to call at its end.
  AwaitedEnd::Callback await(WatchedOp& op) {
    if (group.owner_before(op.owner()) || op.owner().owner_before(group)) {
      group = op.owner();  // a copy takes longer than the comparison
    }
    issued = op.operation().issued;
    collective = op.operation().collective;
    timed = true;
    return told.await(issued);
  }

  // Ends the thread's wait, if any, and reports how long it was: the thread has gone on.
  void pass(Clock::time_point now) {
    auto op = waiting.lock();
    if (std::exchange(timed, false)) {
      auto end = told.get();
      if (end == Clock::time_point{} && (!op || op->ask())) {
        end = now;  // the operation has ended, and is about to report its end
      }
      const auto known = op ? nullptr : group.lock();
      auto* const waitedIn = op ? &op->group() : known.get();
      if (waitedIn != nullptr && end > issued) {
        waitedIn->lateness().wait(end - issued, collective);
      }
    }
    if (op) {
      auto& group = op->group();
      group.pass(std::move(op), now);
    }
    waiting.reset();
  }

  // Forgets earlier calls that have raised. The thread is now in a new call, seen by `watch`.
  void forgetRaised(const Watch* watch, const Stack& stack) {
    while (!calls.empty()) {
      const auto& last = calls.back();
      if (const auto op = last.op.lock()) {
        const auto& before = op->stack();
        const bool known = before != nullptr && stack != nullptr && StackSource::get() != nullptr;
        if (known ? StackSource::get()->within(stack, before) : last.watch != watch) {
          return;
        }
        op->group().discard(*op);
      }
      calls.pop_back();
    }
  }
};
Thread& thisThreads() {
  static thread_local Thread thread;
  return thread;
}

std::optional<OpKind> kindOf(const latest::PreHookArgs& args, int size) {
  using Name = latest::HookOpName;
  // Returns whether the call has one tensor for all ranks, instead of a list of one for each rank.
  const auto one = [size](const auto& whole, const auto& part) {
    return whole.size() == 1 && part.size() == 1 &&
           whole.front().numel() == part.front().numel() * size;
  };
  switch (familyOf(args.name)) {
    case Name::SEND: return OpKind::send;
    case Name::RECV: return OpKind::recv;
    case Name::BROADCAST: return OpKind::broadcast;
    case Name::ALLREDUCE: return OpKind::allReduce;
    case Name::REDUCE: return OpKind::reduce;
    case Name::ALLGATHER:
      return one(args.output_tensors, args.input_tensors) ? OpKind::allGatherSingle
                                                          : OpKind::allGather;
    case Name::REDUCE_SCATTER:
      return one(args.input_tensors, args.output_tensors) ? OpKind::reduceScatterSingle
                                                          : OpKind::reduceScatter;
    case Name::ALLTOALL:
      return args.input_tensors.size() == 1 && args.output_tensors.size() == 1
                 ? OpKind::allToAllSingle
                 : OpKind::allToAll;
    case Name::BARRIER: return OpKind::barrier;
    case Name::SCATTER: return OpKind::scatter;
    case Name::GATHER: return OpKind::gather;
    case Name::SPLIT: return OpKind::split;
    case Name::NEW_WINDOW: return OpKind::newWindow;
    default: return std::nullopt;
  }
}

const at::Tensor* firstTensor(const latest::PreHookArgs& args) {
  const auto& tensors = args.input_tensors.empty() ? args.output_tensors : args.input_tensors;
  return tensors.empty() ? nullptr : &tensors.front();
}

// Returns the group for the operation's type of device, or null if no group is for it.
std::shared_ptr<WatchedGroup> groupOf(const latest::PreHookArgs& args, const auto& parts) {
  const auto* const tensor = firstTensor(args);
  for (const auto& part : parts) {
    auto group = part.lock();
    if (group && (tensor == nullptr || group->type() == tensor->device().type())) {
      return group;
    }
  }
  return nullptr;
}

// Returns the operation's device, or the current one if the operation has no tensor.
c10::Device deviceOf(const latest::PreHookArgs& args, c10::DeviceType type) {
  if (type == c10::DeviceType::CPU) {
    return type;
  }
  const auto* const tensor = firstTensor(args);
  return tensor != nullptr ? tensor->device() : c10::impl::VirtualGuardImpl(type).getDevice();
}

// Returns the type of device whose backend c10d chooses for a barrier if the group has several.
c10::DeviceType typeOfBarriers(c10d::ProcessGroup& group) {
  switch (group.getBackendType()) {
    case c10d::ProcessGroup::NCCL: return c10::DeviceType::CUDA;
    case c10d::ProcessGroup::XCCL: return c10::DeviceType::XPU;
    default: return c10::DeviceType::CPU;
  }
}

// Makes the group's lateness learn how long the calling thread waits for `op`, whose call has
// returned. `work`: null if the thread has waited inside the call.
void followWait(Thread& thread, WatchedOp& op, const c10::intrusive_ptr<c10d::Work>& work) {
  const auto& told = op.operation();
  auto& lateness = op.group().lateness();
  if (!work) {
    lateness.wait(Clock::now() - told.issued, told.collective);
    return;
  }
  const auto future = WatchedOp::futureOf(*work);
  if (!future) {
    return;
  }
  if (!told.async) {
    future->addCallback(thread.await(op), /*uses_future=*/false);
  } else if (auto pass = told.collective ? lateness.follow() : nullptr) {
    future->addCallback(
        [pass = std::move(pass)](const auto&) { pass->end(); }, /*uses_future=*/false);
  }
}

}  // namespace

std::shared_ptr<Watch> Watch::begin(
    c10d::ProcessGroup& group, const std::vector<int64_t>& ranks,
    const std::vector<c10::DeviceType>& types, Milliseconds timeout) {
  auto watch = std::make_shared<Watch>();
  auto& parts = watch->parts_;
  auto groups = std::make_shared<Groups>();
  const auto store = group.getStore();
  const auto barriers = typeOfBarriers(group);
  bool compares = true;  // a group has the same members for each type of device
  for (const auto type : types) {
    const auto backend = group.getBackend(type);
    Group told;
    told.name = group.getGroupName();
    told.description = group.getGroupDesc();
    told.backend = backend->getBackendName();
    told.globalRanks = ranks;
    auto watched = Monitor::watch<WatchedGroup>(
        std::move(told), group.getRank(), group.getSize(), type, timeout);
    if (!watched->fake() && store) {
      watched->open(
          c10::make_intrusive<c10d::PrefixStore>(
              std::string("torchcomms_pg/") + c10::DeviceTypeName(type, /*lower_case=*/true),
              store),
          std::exchange(compares, false));
    }
    if (type != c10::DeviceType::CPU) {
      watched->setTold(registerCompletionHook(
          *backend, kHookId,
          [weak = std::weak_ptr(watched)](const latest::CompletionHookArgs& args) {
            if (const auto known = weak.lock()) {
              known->completed(args);
            }
          }));
    }
    parts.insert(type == barriers ? parts.begin() : parts.end(), watched);
    groups->push_back(std::move(watched));
  }
  watch->groups_.store(std::move(groups));
  // The group keeps the watch alive through its hooks.
  registerHooks(
      group, kHookId, [watch](const latest::PreHookArgs& args) { watch->before(args); },
      [watch](const latest::PostHookArgs& args) { watch->after(args); });
  return watch;
}

void Watch::setTimeout(Milliseconds timeout) {
  for (const auto& part : parts_) {
    if (const auto group = part.lock()) {
      group->setTimeout(timeout);
    }
  }
}

Lateness Watch::lateness(const char* operation) const {
  for (const auto& part : parts_) {
    const auto group = part.lock();
    if (group && !group->queues()) {
      return group->lateness().ask(operation);
    }
  }
  throw std::runtime_error(
      std::string(operation) +
      ": the watched group has ended, or has no backend for tensors of the CPU: on another device "
      "operations are queued, and who waits for whom is not seen");
}

void Watch::close() {
  // A program may keep a destroyed group, which keeps this object.
  if (const auto groups = groups_.exchange({})) {
    for (const auto& group : *groups) {
      group->close();
    }
  }
}

void Watch::failCalls() noexcept {
  for (const auto& call : std::exchange(thisThreads().calls, {})) {
    if (const auto op = call.op.lock(); op && op->group().ofThisProcess()) {
      op->group().fail(*op);
    }
  }
}

void Watch::before(const latest::PreHookArgs& args) try {
  auto& thread = thisThreads();
  const auto now = Clock::now();
  thread.pass(now);
  const auto group = groupOf(args, parts_);
  const auto kind = group ? kindOf(args, group->size()) : std::nullopt;
  if (!kind || !group->ofThisProcess()) {
    return;
  }
  const auto device = deviceOf(args, group->type());
  if (group->queues() && isCapturing(currentStream(device))) {
    return;  // the operation goes into a graph, whose replays are not seen
  }
  auto* const source = StackSource::get();
  auto stack = source == nullptr ? nullptr : source->capture();
  thread.forgetRaised(this, stack);

  Operation op;
  op.kind = *kind;
  op.issued = now;
  op.peer = static_cast<int>(args.root);
  // For c10d, a blocking send or receive is asynchronous. Only Python's stack shows that it waits.
  op.async = args.async_op && !(source != nullptr && source->waits(stack));
  for (const auto& tensor : args.input_tensors) {
    op.numelIn += tensor.numel();
  }
  for (const auto& tensor : args.output_tensors) {
    op.numelOut += tensor.numel();
  }
  if (const auto* const tensor = firstTensor(args)) {
    op.dtype = tensor->scalar_type();
  }
  if (args.output_tensors.empty()) {
    op.numelOut = op.numelIn;  // the operation works in place
  }
  op.bytes = std::max(op.numelIn, op.numelOut) * static_cast<int64_t>(c10::elementSize(op.dtype));
  const auto begun = group->begin(std::move(op), args, std::move(stack));
  thread.calls.push_back({this, args.op_id, begun, device});
} catch (const std::exception&) {
  // Out of memory: the operation goes on unwatched.
}

void Watch::after(const latest::PostHookArgs& args) {
  auto& thread = thisThreads();
  auto& calls = thread.calls;
  const auto found = std::find_if(calls.rbegin(), calls.rend(), [&](const Call& call) {
    return call.watch == this && call.id == args.op_id;
  });
  if (found == calls.rend()) {
    return;
  }
  auto call = std::move(*found);
  const auto op = call.op.lock();
  for (auto raised = calls.rbegin(); raised != found; ++raised) {
    if (const auto forgotten = raised->op.lock()) {
      forgotten->group().discard(*forgotten);
    }
  }
  calls.erase(std::prev(found.base()), calls.end());
  if (!op || op->group().closed() || !op->group().ofThisProcess()) {
    return;
  }
  auto& group = op->group();
  if (group.fake()) {
    group.end(*op, /*completed=*/true);
    return;
  }
  try {
    if (!group.queues() && group.size() > 1) {
      followWait(thread, *op, args.work);
    }
    group.leave(op, args.work, call.device);
    if (!op->operation().async && !group.queues()) {
      thread.waiting = std::move(call.op);
    }
  } catch (const std::exception&) {
    group.end(*op, /*completed=*/false);  // no thread can be started: the operation is not watched
  }
}

}  // namespace torchcomms_pg
