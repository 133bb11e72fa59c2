// Graphs: the tasks that a stream recorded while it captured, and their replays (Programming Guide,
// "CUDA Graphs").
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace emulated {

class Stream;

struct Node {
  std::function<void()> run = {};    // runs in the order of the stream; or
  std::function<void()> issue = {};  // called by the thread that replays, and queues by itself
  Stream* stream = nullptr;          // stream that captured it
  std::vector<size_t> after = {};    // nodes that come before it
};

struct Graph {
  std::vector<Node> nodes;  // nodes in the order of the capture
  Stream* origin = nullptr;
  std::vector<size_t> last;  // dependencies of the origin at the end
  std::vector<std::shared_ptr<void>> kept;
};

// Makes the handle of a graph, by which the runtime's functions find it until cudaGraphDestroy.
cudaGraph_t publish(const std::shared_ptr<Graph>& graph);
void withdraw(const std::shared_ptr<Graph>& graph);

}  // namespace emulated
