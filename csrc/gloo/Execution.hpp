// One collective of a group on several hosts, as one rank executes it.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "gloo/Comm.hpp"

namespace torchcomms_pg::gloo {

using Kind = CollectiveKind;

inline char* at(void* base, size_t offset) {
  return static_cast<char*>(base) + offset;
}

inline const char* at(const void* base, size_t offset) {
  return static_cast<const char*>(base) + offset;
}

// Limit of the bytes of a small collective; for a reduction, summed over the hosts. A small
// collective's time depends on the number of steps, a larger one's on how often a byte crosses the
// wire.
inline constexpr size_t kSmall = 64 << 10;

// Limit of the hosts between which a barrier, a small broadcast and a small all-reduce take one
// step. With more hosts they take a logarithmic number of steps (averages of float16 still take
// one).
inline constexpr int kStraight = 8;

// Bytes of the pieces into which large data is cut, so that a transfer of one piece between hosts
// overlaps with the work on another piece inside the hosts.
inline constexpr size_t kPiece = 4 << 20;

// Tag of a collective's messages inside a host. Users' tags are not negative.
inline constexpr int kInsideTag = -2;

// Executes one collective. Reductions.cpp, Gathering.cpp and Exchanges.cpp have the algorithms;
// Execution.cpp has the barrier and the common part.
class Execution {
 public:
  // `place`: see Comm::nextPlace().
  Execution(Comm& comm, const Signature& signature, uint64_t place);

  void run(const Collective& c);
  void exchange(const std::vector<Part>& sends, const std::vector<Part>& receives, bool sameSizes);

 private:
  // Packets between this rank and its counterparts that are under way together. Declare a Step
  // after the buffers that it sends and receives: Gloo may use them until the Step is destroyed.
  class Step {
   public:
    explicit Step(Execution& execution) : execution_(execution) {}
    void send(int host, const void* data, size_t bytes) {
      add(true, host, const_cast<void*>(data), bytes, execution_.announcedTo_);
    }
    void receive(int host, void* data, size_t bytes) {
      add(false, host, data, bytes, execution_.announcedBy_);
    }
    void add(Packet packet) { packets_.push_back(execution_.comm_.rail_->post(std::move(packet))); }
    void finish() {
      for (auto& packet : packets_) {
        execution_.comm_.rail_->complete(packet, /*late=*/true);
      }
      packets_.clear();
    }

   private:
    void add(bool sending, int host, void* data, size_t bytes, std::vector<bool>& announced) {
      add(
          {.signature = execution_.signature_,
           .sending = sending,
           .peer = host,
           .tag = execution_.tag_,
           .data = data,
           .bytes = bytes,
           .dataTag = execution_.dataTag_,
           .announced = !announced[host]});
      announced[host] = true;
    }

    Execution& execution_;
    std::vector<Packet> packets_;
  };

  using Block = Scratch::Block;
  Block block(size_t bytes) { return comm_.scratch_.take(bytes); }

  // Returns a message to or from the rank with number `local` on this host.
  static Message hop(bool sending, int local, void* data, size_t bytes) {
    return {.sending = sending, .buffer = data, .count = bytes, .peer = local, .tag = kInsideTag};
  }

  // A piece of an all-reduce or a reduce that is under way.
  struct Piece {
    size_t count = 0;  // elements of one rail's slice; a piece has t_.rails slices
    const char* input = nullptr;
    char* output = nullptr;
    size_t outputBytes = 0;
    Block padded;   // in place of input and output, if the slices together are longer
    Block reduced;  // this rail's slice, reduced inside the host
    const char* slice = nullptr;
    Block received;
    // of a reduce: this rail's slice of the result, or on the root the slices of all rails
    Block result;
    std::unique_ptr<Step> step;  // declared last, see Step
  };

  void inside(Collective part) {
    part.whole = &signature_;
    comm_.inside_->run(part);
  }
  void inside(const std::vector<Message>& hops);

  void allReduceSmall(const Collective& c);
  void recursiveDoubling(const Collective& c, const std::function<void(void*)>& reduced);
  void reduceInPieces(const Collective& c);
  void spreadSlices(const Collective& c, Piece& piece, char* result);
  void gatherSlices(const Collective& c, Piece& piece, char* slice);
  void reduceScatter(const Collective& c);
  void allGather(const Collective& c);
  void broadcast(const Collective& c);
  void broadcastSmall(const Collective& c);
  void gather(const Collective& c);
  void scatter(const Collective& c);
  void barrier();
  void exchangeStraight(const std::vector<Part>& sends, const std::vector<Part>& receives);
  struct Sizes;
  Sizes tellSizes(const std::vector<Part>& sends, const std::vector<Part>& receives, bool same);
  std::map<int, Block> handToRails(const std::vector<Part>& sends, const Sizes& sizes);
  void exchangeSizes(const Sizes& sizes, std::vector<std::vector<uint64_t>>& theirs);
  std::pair<const void*, size_t> pack(
      int host, const std::vector<Part>& sends, const Sizes& sizes,
      const std::map<int, Block>& adopted, std::vector<Block>& packed);
  void spread(
      const std::vector<Part>& receives, const std::vector<std::vector<uint64_t>>& theirs,
      const std::vector<Block>& arrived);

  std::deque<Piece> cut(const Collective& c);
  void reduceInside(const Collective& c, Piece& piece);
  // Reduces `inputs` into `output`. `whole`: the inputs cover all ranks, so an average is divided
  // now.
  void combine(
      const Collective& c, void* output, std::vector<const void*> inputs, size_t count,
      bool whole = true) const;
  int halvings(const Collective& c) const;
  Collective toInside(const Collective& c) const;
  std::vector<int> onRail(int host, int rail) const;
  template <class Body>
  void forOtherHosts(const Body& body) const {
    for (int i = 1; i < hosts_; ++i) {
      body((host_ + i) % hosts_);
    }
  }

  bool onRail() const { return comm_.rail_ != nullptr; }
  int local() const { return t_.local(); }
  int localSize() const { return static_cast<int>(t_.inside().size()); }
  // Returns the index of the first element that `host` reduces when the hosts share `count`
  // elements.
  size_t begin(size_t count, int host) const { return count * host / hosts_; }

  Comm& comm_;
  const Topology& t_;
  const Signature signature_;
  const int tag_;
  const int dataTag_;
  const int hosts_;
  const int host_;
  std::vector<bool> announcedTo_;  // by host: true once this collective's envelope to it is posted
  std::vector<bool> announcedBy_;  // by host: true once the receive of its envelope is posted
};

}  // namespace torchcomms_pg::gloo
