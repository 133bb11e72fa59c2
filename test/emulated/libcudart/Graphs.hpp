// Graphs: what a stream was told to do while it captured, and its replays
// (Programming Guide, "CUDA Graphs").
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace emulated {

class Stream;

struct Node {
  std::function<void()> run = {};    // in the order of the stream; or
  std::function<void()> issue = {};  // called by the thread that replays, and queues by itself
  Stream* stream = nullptr;          // that captured it
  std::vector<size_t> after = {};    // the nodes that come before it
};

struct Graph {
  std::vector<Node> nodes;  // in the order of the capture
  Stream* origin = nullptr;
  std::vector<size_t> last;  // what the origin depended on at the end
  std::vector<std::shared_ptr<void>> kept;
};

// The handle of a graph, by which the runtime's functions find it until cudaGraphDestroy.
cudaGraph_t publish(const std::shared_ptr<Graph>& graph);
void withdraw(const std::shared_ptr<Graph>& graph);

}  // namespace emulated
