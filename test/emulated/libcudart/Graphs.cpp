#include "libcudart/Graphs.hpp"

#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "libcudart/Calls.hpp"
#include "libcudart/Captures.hpp"
#include "libcudart/Streams.hpp"

namespace emulated {

namespace {

// The streams that branches of graphs run in; given back, as streams are never freed.
std::mutex branchesMutex;
std::multimap<int, Stream*> freeBranches;  // by device

Stream* takeBranch(int device) {
  const std::lock_guard lock(branchesMutex);
  const auto found = freeBranches.find(device);
  if (found == freeBranches.end()) return new Stream(device, cudaStreamNonBlocking, 0);
  auto* const stream = found->second;
  freeBranches.erase(found);
  return stream;
}

void giveBranch(Stream* stream) {
  const std::lock_guard lock(branchesMutex);
  freeBranches.emplace(stream->device(), stream);
}

// An instantiated graph. Nodes that do not depend on each other run concurrently, as in a GPU: each
// captured stream is a branch with a stream of its own.
class Executable {
 public:
  explicit Executable(std::shared_ptr<const Graph> graph)
      : graph_(std::move(graph)), awaited_(graph_->nodes.size(), false) {
    for (const auto& node : graph_->nodes) {
      for (const auto before : node.after) {
        if (streamOf(before) != node.stream) awaited_[before] = true;
      }
      if (node.stream != graph_->origin && !branches_.contains(node.stream)) {
        branches_[node.stream] = takeBranch(node.stream->device());
      }
    }
    for (const auto end : graph_->last) awaited_[end] = true;
  }

  ~Executable() {
    for (const auto& [captured, branch] : branches_) giveBranch(branch);
  }

  Executable(const Executable&) = delete;
  Executable& operator=(const Executable&) = delete;

  // "Each launch is ordered behind both any previous work in this stream and any previous
  // launches of this graph" (Runtime API, cudaGraphLaunch).
  void launch(Stream& into) {
    const std::lock_guard lock(mutex_);
    if (previous_) into.wait(previous_);
    const auto begin = branches_.empty() ? nullptr : into.record();
    for (const auto& [captured, branch] : branches_) branch->wait(begin);
    std::vector<MarkPtr> ends(graph_->nodes.size());
    for (size_t i = 0; i < graph_->nodes.size(); ++i) {
      const auto& node = graph_->nodes[i];
      auto& branch = branchOf(node.stream, into);
      for (const auto before : node.after) {
        if (streamOf(before) != node.stream) branch.wait(ends[before]);
      }
      if (node.run) {
        branch.add(node.run);
      } else {
        const Redirect redirect(branch);
        node.issue();
      }
      if (awaited_[i]) ends[i] = branch.record();
    }
    for (const auto end : graph_->last) {
      if (streamOf(end) != graph_->origin) into.wait(ends[end]);
    }
    previous_ = into.record();
  }

 private:
  Stream* streamOf(size_t node) const { return graph_->nodes[node].stream; }
  Stream& branchOf(Stream* captured, Stream& into) {
    return captured == graph_->origin ? into : *branches_.at(captured);
  }

  const std::shared_ptr<const Graph> graph_;
  std::vector<bool> awaited_;  // by a node of another branch, or at the end
  std::map<Stream*, Stream*> branches_;
  std::mutex mutex_;
  MarkPtr previous_;
};

std::mutex graphsMutex;
std::unordered_map<cudaGraph_t, std::shared_ptr<Graph>> graphs;
std::unordered_map<cudaGraphExec_t, std::shared_ptr<Executable>> executables;

template <class Handle, class Value>
Value find(const std::unordered_map<Handle, Value>& all, Handle handle) {
  const std::lock_guard lock(graphsMutex);
  const auto found = all.find(handle);
  return found == all.end() ? nullptr : found->second;
}

// Gone only after the lock, since what a graph keeps may call the runtime when it goes.
template <class Handle, class Value>
cudaError_t destroy(std::unordered_map<Handle, Value>& all, Handle handle, const char* function) {
  Value gone;
  {
    const std::lock_guard lock(graphsMutex);
    const auto found = all.find(handle);
    if (found == all.end()) return failed(cudaErrorInvalidValue, function);
    gone = std::move(found->second);
    all.erase(found);
  }
  return cudaSuccess;
}

cudaError_t instantiate(cudaGraphExec_t* made, cudaGraph_t handle, const char* function) {
  calledDriver(function);
  const auto graph = find(graphs, handle);
  if (!graph) return failed(cudaErrorInvalidValue, function);
  auto executable = std::make_shared<Executable>(graph);
  *made = reinterpret_cast<cudaGraphExec_t>(executable.get());
  const std::lock_guard lock(graphsMutex);
  executables[*made] = std::move(executable);
  return cudaSuccess;
}

// The object of cudaUserObjectCreate: a pointer that is destroyed with its last reference.
class UserObject {
 public:
  UserObject(void* pointer, cudaHostFn_t destroy) : pointer_(pointer), destroy_(destroy) {}
  ~UserObject() { destroy_(pointer_); }
  UserObject(const UserObject&) = delete;
  UserObject& operator=(const UserObject&) = delete;

 private:
  void* const pointer_;
  const cudaHostFn_t destroy_;
};

struct UserObjectReferences {
  std::shared_ptr<UserObject> object;
  unsigned count;
};

std::unordered_map<cudaUserObject_t, UserObjectReferences> userObjects;

// Takes the caller's references away.
cudaError_t releaseUserObject(cudaUserObject_t handle, unsigned count, const char* function) {
  std::shared_ptr<UserObject> gone;  // before the lock, so that it goes after it
  const std::lock_guard lock(graphsMutex);
  const auto found = userObjects.find(handle);
  if (found == userObjects.end() || found->second.count < count) {
    return failed(cudaErrorInvalidValue, function);
  }
  found->second.count -= count;
  if (found->second.count == 0) {
    gone = std::move(found->second.object);
    userObjects.erase(found);
  }
  return cudaSuccess;
}

}  // namespace

cudaGraph_t publish(const std::shared_ptr<Graph>& graph) {
  const auto handle = reinterpret_cast<cudaGraph_t>(graph.get());
  const std::lock_guard lock(graphsMutex);
  graphs[handle] = graph;
  return handle;
}

void withdraw(const std::shared_ptr<Graph>& graph) {
  const std::lock_guard lock(graphsMutex);
  graphs.erase(reinterpret_cast<cudaGraph_t>(graph.get()));
}

}  // namespace emulated

using namespace emulated;

// ---------------------------------------------------------------- Runtime API, "Graph Management"

EMULATED_API cudaError_t
cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  return instantiate(made, graph, __func__);
}

EMULATED_API cudaError_t
cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  return instantiate(made, graph, __func__);
}

EMULATED_API cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t into) {
  calledDriver(__func__);
  const auto executable = find(executables, handle);
  if (!executable) return failed(cudaErrorInvalidValue, __func__);
  auto* const stream = findStream(into);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle, __func__);
  // A launch in a capture makes a child graph, which is not modelled.
  if (stream->capturing.load()) return failed(cudaErrorNotSupported, "a graph in a capture");
  executable->launch(*stream);
  return deviceFault();
}

EMULATED_API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  calledDriver(__func__);
  return destroy(graphs, graph, __func__);
}

// Replays that are under way go on: the streams hold what they run. That a capture forbids the call
// is not documented; driver 580 (CUDA 13.0) refuses it.
EMULATED_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  calledDriver(__func__);
  if (const auto error = refuseUnsafe(__func__)) return error;
  return destroy(executables, executable, __func__);
}

EMULATED_API cudaError_t
cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t* nodes, size_t* count) {
  called(__func__);
  const auto graph = find(graphs, handle);
  if (!graph) return failed(cudaErrorInvalidValue, __func__);
  if (nodes != nullptr) return failed(cudaErrorNotSupported, "the nodes of a graph");
  *count = graph->nodes.size();
  return cudaSuccess;
}

EMULATED_API cudaError_t cudaUserObjectCreate(
    cudaUserObject_t* made, void* pointer, cudaHostFn_t destroy, unsigned count, unsigned) {
  called(__func__);
  auto object = std::make_shared<UserObject>(pointer, destroy);
  *made = reinterpret_cast<cudaUserObject_t>(object.get());
  const std::lock_guard lock(graphsMutex);
  userObjects[*made] = {std::move(object), count};
  return cudaSuccess;
}

EMULATED_API cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned count) {
  called(__func__);
  return releaseUserObject(object, count, __func__);
}

EMULATED_API cudaError_t cudaGraphRetainUserObject(
    cudaGraph_t handle, cudaUserObject_t object, unsigned count, unsigned flags) {
  called(__func__);
  {
    const std::lock_guard lock(graphsMutex);
    const auto graph = graphs.find(handle);
    const auto found = userObjects.find(object);
    if (graph == graphs.end() || found == userObjects.end()) {
      return failed(cudaErrorInvalidValue, __func__);
    }
    graph->second->kept.push_back(found->second.object);
  }
  // "Transfer references from the caller rather than creating new references".
  return (flags & cudaGraphUserObjectMove) != 0 ? releaseUserObject(object, count, __func__)
                                                : cudaSuccess;
}
