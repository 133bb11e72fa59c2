// A group of ranks that communicate through one library's table, and the one
// path that every operation of every front end takes.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "comm/BlockingCall.hpp"
#include "comm/CommError.hpp"
#include "comm/Flight.hpp"
#include "comm/Group.hpp"
#include "comm/Hooks.hpp"
#include "comm/Operation.hpp"
#include "comm/Work.hpp"
#include "device/Device.hpp"
#include "monitor/Monitor.hpp"
#include "nccl/Config.hpp"
#include "nccl/Memory.hpp"
#include "nccl/NcclApi.hpp"

namespace torchcomms_pg {

class Inquiring;
class Recorder;
class Reduction;
class Window;
struct Recorded;
struct Verdict;

// Thread-safe. Owns the library's communicator, the device's streams, and the
// list of operations in flight that the monitor looks at. One operation with
// `async` false on CPU tensors runs in the calling thread; otherwise a Work
// tells of its end. Where the caller gets no Work, it gets null. On an
// accelerator every operation is queued and the call returns at once: with
// `async` false in the caller's current stream, else in the communicator's.
class Communicator final : public std::enable_shared_from_this<Communicator>,
                           public Monitor::Watched {
 public:
  struct Options {
    bool async = true;
    std::optional<Milliseconds> timeout;  // none: the communicator's
  };

  // The library's communicator: one that may still be initializing, or the call that makes it.
  struct Made {
    ncclComm_t comm = nullptr;
    std::unique_ptr<BlockingCall> call = nullptr;
  };

  // Takes over `made`, which is made with `config`.
  Communicator(
      const NcclApi& api,
      Made made,
      int rank,
      int size,
      Group group,
      Milliseconds timeout,
      std::unique_ptr<Device> device,
      NcclConfig config = {});
  ~Communicator() override;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const Group& group() const { return group_; }
  // For whom the description is late: before the first operation.
  void setDescription(std::string description);
  const at::Device& device() const { return device_->device(); }
  std::vector<at::Device> futureDevices() const;

  // Collectives (Reductions.cpp, Gathering.cpp, Exchanges.cpp). All ranks call
  // the same ones in the same order. Tensors may have any strides; shapes
  // matter only where named.
  //
  // In place: tensor = op over ranks of tensor.
  WorkPtr allReduce(const at::Tensor& tensor, const c10d::ReduceOp& op, const Options& options) {
    return allReduce(tensor, tensor, op, options);
  }
  // output = op over ranks of input. They are the same tensor, or do not overlap.
  WorkPtr allReduce(
      const at::Tensor& output,
      const at::Tensor& input,
      const c10d::ReduceOp& op,
      const Options& options);
  // As allReduce, on `root` only; elsewhere `tensor` is unchanged.
  WorkPtr reduce(
      const at::Tensor& tensor, int root, const c10d::ReduceOp& op, const Options& options);
  // output = op over ranks of part `rank` of input, which has size x output.numel elements.
  WorkPtr reduceScatterSingle(
      const at::Tensor& output,
      const at::Tensor& input,
      const c10d::ReduceOp& op,
      const Options& options);
  // The parts as a list; they may differ in size.
  WorkPtr reduceScatter(
      const at::Tensor& output,
      const std::vector<at::Tensor>& inputs,
      const c10d::ReduceOp& op,
      const Options& options);
  WorkPtr broadcast(const at::Tensor& tensor, int root, const Options& options);
  // output = the ranks' inputs one after another.
  WorkPtr allGatherSingle(
      const at::Tensor& output, const at::Tensor& input, const Options& options);
  // outputs[r] = input of rank r; sizes may differ from rank to rank.
  WorkPtr allGather(
      const std::vector<at::Tensor>& outputs, const at::Tensor& input, const Options& options);
  WorkPtr gather(
      const std::vector<at::Tensor>& outputs,
      const at::Tensor& input,
      int root,
      const Options& options);
  // `output`, on `root` only: the ranks' inputs one after another.
  WorkPtr gatherSingle(
      const std::optional<at::Tensor>& output,
      const at::Tensor& input,
      int root,
      const Options& options);
  WorkPtr scatter(
      const at::Tensor& output,
      const std::vector<at::Tensor>& inputs,
      int root,
      const Options& options);
  // Splits count rows of the first dimension; empty: equal parts.
  WorkPtr allToAllSingle(
      const at::Tensor& output,
      const at::Tensor& input,
      const std::vector<int64_t>& outputSplits,
      const std::vector<int64_t>& inputSplits,
      const Options& options);
  WorkPtr allToAll(
      const std::vector<at::Tensor>& outputs,
      const std::vector<at::Tensor>& inputs,
      const Options& options);
  WorkPtr barrier(const Options& options, OpKind kind = OpKind::barrier);

  // Messages (Messages.cpp). `source` kAnyPeer takes the first that comes.
  WorkPtr send(const at::Tensor& tensor, int destination, int tag, const Options& options);
  WorkPtr recv(const at::Tensor& tensor, int source, int tag, const Options& options);

  // From startBatch on, operations of the calling thread are collected;
  // endBatch launches them together, inside one group of the library.
  // `parts`, `inputs`: what a profile is to show, where it is known.
  void startBatch(OpKind parts = OpKind::coalesced, std::vector<at::Tensor> inputs = {});
  WorkPtr endBatch();
  void dropBatch();
  bool inBatch() {
    return openBatches_.load(std::memory_order_relaxed) > 0 && openBatch() != nullptr;
  }

  // One-sided communication, see Window.hpp. Collective.
  bool supportsWindows() const;
  std::shared_ptr<Window> newWindow();

  // A tensor, not initialized, in memory that peers can map: a window takes it
  // as it is.
  at::Tensor allocateTensor(int64_t numel, c10::ScalarType dtype) const;

  // Memory (Memory.cpp), of a library that has the functions.
  //
  // Registers the segments of a pool of torch's, those that are not yet, so that the library uses
  // them as they are. They are no more when they are freed, or this is closed. `symmetric`: they
  // lie alike on all ranks; collective.
  void registerMemory(
      Registrations::Pool pool, const std::vector<Segment>& segments, bool symmetric);
  // False: it was not registered.
  bool deregisterMemory(Registrations::Pool pool);

  // Gives back the library's memory on the device when all that is in flight has ended. Until
  // resume() operations raise. Both are collective.
  void suspend();
  void resume();
  // In bytes: "suspend" is what suspend() gives back, "persist" what it does not, "total" both;
  // "suspended" is 1 after it. Also while suspended.
  std::unordered_map<std::string, uint64_t> memoryStats();

  // A communicator of the listed ranks (of this one), in that order; null where the list is empty.
  // Collective over all ranks, with a wrong list, too, which then raises ValueError here and on the
  // ranks that would have been together with this one. No `config`: this one's. `named`: NCCL is
  // told the group's name.
  std::shared_ptr<Communicator> split(
      const std::vector<int>& ranks,
      Group group,
      Milliseconds timeout,
      const std::optional<NcclConfig>& config = std::nullopt,
      bool named = false);
  // A communicator without the excluded ranks, which do not call this and may
  // be dead, with this one's configuration. With `abort`, operations in flight fail first.
  std::shared_ptr<Communicator> shrink(
      const std::vector<int>& excluded, bool abort, Group group, Milliseconds timeout);

  // As NCCL tells it, e.g. 22809 for 2.28.9.
  int libraryVersion() const;

  // The library's own communicator, once all ranks have joined; it stays this object's.
  ncclComm_t handle();

  // In place of another (Succession.cpp). Takes over what `former`'s users have
  // attached: hooks and recorders. Before the first operation.
  void succeed(const Communicator& former);
  // Returns when all ranks have joined; raises CommError when they do not, as
  // an operation of this timeout would.
  void awaitRanks(Milliseconds timeout);
  // close(), for what has a successor: what is in flight fails rather than
  // being waited for, and hooks are not told, since they go on.
  void retire(const char* why);

  // A work of an operation that has finished already.
  WorkPtr finishedWork(
      OpKind kind, std::vector<at::Tensor> outputs, std::optional<uint64_t> seq = std::nullopt);

  // Waits for the end of `work`, see Work::wait.
  // `onHost`: on an accelerator, too, the calling thread waits.
  void await(Work& work, Milliseconds timeout, bool onHost = false);
  // Has asynchronous operations end that were left to whoever waits for them: somebody may look for
  // their end without waiting.
  void hasten() { device_->wake(); }
  // Of an accelerator: has the current stream wait for the end of `work`.
  void awaitInStream(const Work& work);
  // Finishes, in a thread of its own, an operation whose stream is past it.
  void conclude(std::shared_ptr<Flight> flight);
  // Null: a host device.
  AcceleratorDevice* accelerator() const { return accelerator_; }

  // Fails every operation here and on the other ranks, now and later. Returns
  // when the abort hooks have run, or after 30 s. Has an effect once.
  void abort(const std::string& why);
  // The two halves of abort(), so that several communicators fail together:
  // what fails it, and what waits for the hooks that are told.
  void failBy(const std::string& why);
  void awaitFailureHook() const;

  // Returns when nothing is in flight: what is ends with its peers, or at its
  // deadline. Interrupted, it aborts, and raises what the handler of the signal has raised.
  // Messages that no stream orders are waited for no longer than `messages`.
  void drain(Milliseconds messages = Milliseconds::max());

  // Ends what is in flight, then gives the library's communicator back.
  // Idempotent; later operations raise. Raises CommError, once all is freed, if
  // the ranks' last operations do not match and nobody has said so yet.
  void close();

  void setTimeout(Milliseconds timeout);
  Milliseconds timeout() const;

  // Lengthens the timeout of the operations issued from now on, until the
  // first of them has finished.
  void addEphemeralTimeout(Milliseconds extra);

  // Whether every rank has joined.
  bool initialized();

  // Number of collectives issued so far.
  uint64_t sequenceNumber() const { return collectives_.load(std::memory_order_relaxed); }

  // From now on every operation gives a Work that knows its duration, also a
  // synchronous one.
  void enableTiming() { timing_.store(true, std::memory_order_relaxed); }

  // Called when an operation has finished; from any thread. Set before use.
  // `work` is null where the caller got none.
  using EndHook = std::function<void(
      const Operation& op, Work* work, Clock::time_point started, Clock::time_point finished)>;
  void setEndHook(EndHook hook);

  // Called once, when the communicator fails, in a thread of its own. The
  // failure is raised when it has returned, or after kHookPatience.
  using FailureHook = std::function<void()>;
  void setFailureHook(FailureHook hook);

  // Hooks on every operation. Dropped when the communicator is closed. Shared,
  // so that a hook can be removed after the communicator is gone.
  const std::shared_ptr<Hooks>& hooks() const { return hooks_; }

  // From the next operation on, `recorder` has an entry for each (Recorded.cpp).
  // Where it is the process's, a failure has it written to its file. False:
  // it has been there already, or is to record nothing.
  bool record(std::shared_ptr<Recorder> recorder);
  void stopRecording(const Recorder* recorder);

  // Whether a failure, other than by abort() here, ends the process when the
  // abort hooks have run; where it is others' and this rank is in no operation,
  // with the next call.
  void setEndsProcess(bool endsProcess) {
    endsProcess_.store(endsProcess, std::memory_order_relaxed);
  }
  bool endsProcess() const { return endsProcess_.load(std::memory_order_relaxed); }

  // Whether waiting for a Work stops the calling thread on an accelerator, too.
  void setBlockingWait(bool blocking) { blockingWait_.store(blocking, std::memory_order_relaxed); }

  // Has the ranks find out together, through the store, who holds up an
  // operation (Verdicts.cpp). `prefix` is this communicator's alone, and the
  // same on all ranks. Before the first operation.
  void inquireThrough(const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix);

  // For the next `time`, peers wait for this rank past their deadlines, and
  // operations issued here may take that long; 0: no more.
  void relax(Milliseconds time);

  c10d::ErrorType error() const;
  std::shared_ptr<const Failure> failure() const;  // null: none

  void check(Clock::time_point now) noexcept override;
  void giveUp(const char* why) noexcept override;
  std::string failureMessage() const override;

 private:
  friend class Window;
  using Launch = std::function<ncclResult_t(ncclComm_t comm, cudaStream_t stream)>;

  // Everything one operation consists of.
  struct Call {
    Operation op;
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> outputs;
    Launch launch;
    // Runs when the launch has finished, in the order of the stream: copies
    // out of temporary buffers, local reductions.
    std::function<void()> after;
    std::optional<Message> message;
    std::vector<Call> parts;                     // of a batch of messages
    std::shared_ptr<std::vector<Call>> members;  // of another batch
    std::vector<int64_t> ranks;                  // of a split, for hooks
    std::string newName;
  };

  using InFlightList = std::list<InFlight>;

  struct Batch {
    std::vector<Call> calls;
    WorkPtr work;
  };

  // Elements for or from one peer.
  struct Part {
    void* data;
    size_t count;
  };

  // How long a failed library may take to let go of a blocked operation.
  static constexpr std::chrono::seconds kReleasePatience{10};

  // How long a group that is called gloo waits at its end for messages: Gloo forgets them, and
  // ranks that wait for each other to take one would stay until the deadline.
  static constexpr Milliseconds kMessagePatience{2000};

  // The same where more would most likely be in vain.
  static constexpr Milliseconds kBriefPatience{200};

  // How often a thread that waits asks whether it is wanted elsewhere, and what fails it then.
  static constexpr Milliseconds kInterruptInterval{200};
  static constexpr const char* kInterrupt = "an interrupt, such as Ctrl-C";

  // Messages inside an all-to-all, apart from those of users, whose tags are
  // not negative.
  static constexpr int kExchangeTag = -1;

  Call newCall(OpKind kind, const Options& options) const;
  static void describeTensors(
      Call& call,
      std::vector<at::Tensor> inputs,
      std::vector<at::Tensor> outputs,
      const char* reduceOp = nullptr);
  void launchReduceScatter(
      Call& call, const at::Tensor& output, const at::Tensor& input, const Reduction& reduction);
  ncclResult_t exchange(
      const std::vector<Part>& sends,
      const std::vector<Part>& receives,
      ncclDataType_t type,
      ncclComm_t comm,
      cudaStream_t stream);
  ncclResult_t message(bool sending, const Message& message, ncclComm_t comm, cudaStream_t stream);

  WorkPtr issue(Call call);
  WorkPtr launch(Call call, WorkPtr work);
  WorkPtr start(Call& call, WorkPtr work);
  void runHere(Call& call, const WorkPtr& work);
  bool mayBeDeferred(const Operation& op) const;
  void runOnStream(Call& call, const WorkPtr& work);
  void runMessages(Call& call, const WorkPtr& work);

  // On an accelerator (Accelerator.cpp).
  void runOnAccelerator(Call& call, const WorkPtr& work);
  void runInGraph(Call& call, const WorkPtr& work);
  void queue(Call& call, cudaStream_t stream);
  // `work`: null where the caller gets none.
  void awaitOnAccelerator(
      const Flight& flight, const Work* work, Milliseconds timeout, bool onHost);
  void land(Flight& flight, const std::exception_ptr& error);
  std::exception_ptr asyncError(const Operation& op);
  bool awaitEnd(const Flight& flight, std::optional<Clock::time_point> deadline);
  std::string splitMistake(const std::vector<int>& ranks) const;  // empty: none
  std::string splitDifference(
      const NcclApi& api, ncclComm_t child, const std::vector<int>& ranks, int key) const;
  Call merge(std::vector<Call> calls);
  Batch* openBatch();
  WorkPtr newWork(const Call& call);

  void manage(OpKind kind, const std::function<ncclResult_t(ncclComm_t comm)>& body);
  void refuseSuspended() const;

  // With hooks (Hooked.cpp).
  static OpName hookName(const Call& call);
  static std::shared_ptr<PreHookArgs> hookArgs(const Call& call, uint64_t id);
  WorkPtr launchHooked(Call& call, WorkPtr work);
  void tellEnd(
      const Operation& op,
      const WorkPtr& work,
      const std::exception_ptr& error,
      Clock::time_point started,
      Clock::time_point finished);
  // Of what is no launch: finalize and shrink.
  void runHooked(std::shared_ptr<PreHookArgs> before, const std::function<void()>& body);

  // Recorded.cpp
  static const char* recordedName(const Call& call);
  void recordIssue(Call& call);
  void dumpRecords();

  InFlightList::iterator enter(
      const Operation& op, WorkPtr work, std::shared_ptr<Flight> flight = nullptr);
  void leave(InFlightList::iterator entry, bool completed = true);
  void finish(const WorkPtr& work, InFlightList::iterator entry, const std::exception_ptr& error);
  void awaitInitialization();
  void awaitFinish(Work& work, Milliseconds timeout, bool onHost);
  // Null until the ranks have joined.
  ncclComm_t usable() const;
  ncclComm_t shrinkLibrary(
      ncclComm_t comm,
      std::vector<int> excluded,
      int flags,
      const Operation& op,
      Clock::time_point deadline);
  void awaitJoined();
  void endLibrary(ncclComm_t comm, bool failed, std::string& mismatch);

  Failure describeFailure(c10d::ErrorType type, const Operation& op, const std::string& what) const;
  std::exception_ptr resultError(const Operation& op, ncclResult_t result);
  void timeOut(const Operation& op, Milliseconds timeout, const Verdict& verdict);
  std::vector<int> absentRanks();
  // Whether those have not come, or may be waiting for others themselves.
  bool absenceIsCertain();
  bool libraryFailed();
  void failLibrary(const Failure& failure);
  void failInFlight();
  // How it comes to fail: an operation of this rank meets the failure; by abort() here; on other
  // ranks, while this one has no operation in flight.
  enum class Cause { met, requested, elsewhere };
  std::shared_ptr<const Failure> setFailure(Failure failure, Cause cause = Cause::met);
  [[noreturn]] void raise(const Failure& failure) const;
  // Ends the process where `failure` does so with the next call, or has with one in flight.
  void meet(const Failure& failure) const;
  Failure failureElsewhere();
  std::exception_ptr interruption();
  bool awaitUninterrupted(Work& work, std::optional<Clock::time_point> deadline);
  void release();
  void closeNow();
  void tellMismatch(const std::string& what);
  std::string rankNames(const std::vector<int>& ranks) const;

  const NcclApi& api_;
  const int rank_;
  const int size_;
  Group group_;
  const pid_t pid_;
  const std::unique_ptr<Device> device_;
  const NcclConfig config_;               // has the texts that the library was given
  AcceleratorDevice* const accelerator_;  // device_, if it is one
  std::atomic<int64_t> timeoutMs_;
  std::atomic<int64_t> extraMs_{0};
  std::atomic<bool> timing_{false};
  std::atomic<uint64_t> collectives_{0};
  std::atomic<uint64_t> messages_{0};

  mutable std::mutex
      commMutex_;  // held to replace comm_ or to fail it, never across a blocking call
  std::atomic<ncclComm_t> comm_;
  const std::unique_ptr<BlockingCall> joining_;  // makes comm_; null: it was there at once
  std::atomic<bool> initialized_{false};
  std::atomic<bool> closed_{false};
  std::atomic<bool> suspended_{false};
  std::atomic<bool> captured_{false};       // graphs may hold operations
  std::shared_ptr<const Failure> failure_;  // by std::atomic_load; set once
  std::shared_ptr<const EndHook> endHook_;  // by std::atomic_load

  std::atomic<bool> endsProcess_{false};
  std::atomic<bool> blockingWait_{false};
  mutable std::atomic<bool> told_{false};  // a call has raised the failure
  std::shared_ptr<Hooks> hooks_ = std::make_shared<Hooks>();

  mutable std::mutex hookMutex_;
  FailureHook failureHook_;
  std::shared_future<void> failureHookDone_;

  std::atomic<bool> recorded_{false};
  std::shared_ptr<const std::vector<Recorded>> recorders_;  // by std::atomic_load
  std::once_flag dumped_;
  int idleTicks_ = 0;  // of the monitor's thread

  mutable std::mutex inFlightMutex_;
  std::condition_variable drained_;
  InFlightList inFlight_;
  Operation lastCompleted_;  // its seq is 0: none

  friend class Inquiring;
  const std::unique_ptr<Inquiring> inquiring_;

  std::timed_mutex failMutex_;  // held while libnccl is made to fail
  std::atomic<bool> libraryFailed_{false};
  std::atomic<bool> libraryReleased_{false};  // by the thread that libraryFailed_ tells of

  std::mutex issueMutex_;  // held while an operation goes into the communicator's stream

  Registrations registrations_;

  std::mutex windowMutex_;
  std::vector<bool> windowSignals_ = std::vector<bool>(api_.signals);  // in use, by sigIdx
  std::vector<std::shared_ptr<const void>> droppedWindows_;            // see Window::forget

  std::mutex batchMutex_;
  std::atomic<int> openBatches_{0};
  std::unordered_map<std::thread::id, Batch> batches_;
  // What a split has made of lists that differ: other ranks may be connecting to it still.
  std::vector<std::shared_ptr<Communicator>> refused_;
};

}  // namespace torchcomms_pg
