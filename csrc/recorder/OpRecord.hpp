// One operation, as flight recorders record it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/util/ApproximateClock.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "recorder/Stack.hpp"

namespace torch {
struct CapturedTraceback;
}

namespace torchcomms_pg {

// Record of an operation. The recorders share it, so that the operation is described once; a
// recorder's own numbers are in the recorder's entry.
struct OpRecord {
  // Direction of an operation between two ranks. `none`: a collective. `one`: an operation of one
  // rank alone on a peer's memory, such as a put.
  enum class Direction : uint8_t { none, send, receive, one };

  // Facts for which c10d's schema has no field; nullopt if unknown.
  struct Details {
    std::optional<int> tag = {};         // of a message
    std::optional<uint64_t> batch = {};  // number of its batch's first message; 0 if not in a batch
    int root = -1;                       // of a collective, a rank of the group; -1 if none
    const char* reduceOp = nullptr;      // operator of a reduction, or null
  };

  // Description of an operation that is issued.
  struct Issue {
    const char* op = "";  // c10d's name, e.g. "_all_gather_base"
    uint64_t seq = 0;     // number among the group's collectives, or among its messages, from 1
    const std::vector<at::Tensor>& inputs;
    const std::vector<at::Tensor>& outputs;
    bool join = false;  // records several tensors as one tensor that contains them
    std::chrono::milliseconds timeout{0};
    Direction direction = Direction::none;
    int peer = -1;  // the other rank, in the group; -1 for a collective, or a receive from any rank
    bool started = false;
    Details details;
  };

  struct Thread {
    std::thread::id id = std::this_thread::get_id();
    std::string name;
  };

  struct Tensor {
    c10::ScalarType dtype;
    uint8_t dim;
  };

  // Describes the operation, in the thread that issues it. `cppStack`: captures the C++ stack.
  OpRecord(const Issue& issue, Stack stack, bool cppStack);

  bool isMessage() const { return direction == Direction::send || direction == Direction::receive; }
  bool isCollective() const { return direction == Direction::none; }

  // Records the start. Returns false if the operation has started before.
  bool start();
  // Records the end. `milliseconds`: the duration, 0 if unknown.
  void end(bool completed, float milliseconds);

  const char* const op;
  const uint64_t seq;
  const std::chrono::milliseconds timeout;
  const int peer;
  const Direction direction;
  const Details details;
  const Stack stack;  // Python's, or null
  const std::shared_ptr<torch::CapturedTraceback> cppStack;
  const std::shared_ptr<const Thread> thread;
  // `tensors` lists the inputs, as many as `inputs`, then the outputs; `sizes` has their shapes in
  // a row.
  size_t inputs = 0;
  c10::DeviceType device = c10::DeviceType::CPU;
  c10::SmallVector<Tensor, 4> tensors;
  c10::SmallVector<int64_t, 4> sizes;

  // Times at which the operation was issued, started and completed; 0 if it has not started or
  // completed. `duration` is set before `completed`, and `completed` before `retired`.
  const c10::time_t created = c10::getTime();
  std::atomic<c10::time_t> started;
  std::atomic<c10::time_t> completed{0};
  std::atomic<float> duration{0};  // in milliseconds; 0 if unknown
  std::atomic<bool> retired{false};

 private:
  void describe(const std::vector<at::Tensor>& described, bool join);
};

}  // namespace torchcomms_pg
