// What the machine allows, whatever the library does: floor flag | floor copy BYTES COPIERS.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#include <climits>
#include <string>

#include "processes.hpp"

using namespace bench;

namespace {

struct alignas(64) Flag {
  std::atomic<unsigned> value;
  std::atomic<unsigned> sleepers;
};

// Waits as a library does that may not burn a core for ever: spins, then sleeps.
void await(Flag& flag, unsigned value, bool mayUseFutex) {
  for (int i = 0; flag.value.load(std::memory_order_acquire) != value; ++i) {
    if (!mayUseFutex || i < 20'000) continue;
    flag.sleepers.fetch_add(1);
    const unsigned seen = flag.value.load();
    if (seen != value) syscall(SYS_futex, &flag.value, FUTEX_WAIT, seen, nullptr, nullptr, 0);
    flag.sleepers.fetch_sub(1);
  }
}

void set(Flag& flag, unsigned value, bool mayUseFutex) {
  if (!mayUseFutex) return flag.value.store(value, std::memory_order_release);
  flag.value.store(value);
  if (flag.sleepers.load() != 0) {
    syscall(SYS_futex, &flag.value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

// A flag there and another back; in microseconds.
void flags(bool mayUseFutex) {
  constexpr int kTrips = 20'000, kRounds = 15;
  Flag* flag = shared<Flag>(2);
  double* times = shared<double>(kRounds);
  processes(2, [&](int rank) {
    for (int round = 0; round < kRounds; ++round) {
      const double start = now();
      for (int trip = 1; trip <= kTrips; ++trip) {
        const unsigned value = round * kTrips + trip;
        if (rank == 0) set(flag[0], value, mayUseFutex);
        await(flag[rank == 0], value, mayUseFutex);
        if (rank == 1) set(flag[1], value, mayUseFutex);
      }
      if (rank == 0) times[round] = (now() - start) / kTrips * 1e6;
    }
  });
  std::printf(
      "{\"flag\": \"%s\", \"round_trip_us\": %.4f}\n", mayUseFutex ? "futex" : "spin",
      quantile({times, times + kRounds}, 0.5));
}

// Processes copy what their neighbours have written, so many at once: out of pages they share
// and, with process_vm_readv, out of the neighbour's own. Bytes copied per second by each.
void copies(size_t bytes, int copiers) {
  const int ranks = std::max(2, copiers);
  constexpr int kRounds = 9;
  char* pages = shared<char>(bytes * ranks);
  double* times = shared<double>(2 * kRounds * ranks);
  struct Peer {
    pid_t pid;
    char* memory;
  };
  Peer* peers = shared<Peer>(ranks);
  Meeting* meeting = shared<Meeting>(1);
  processes(ranks, [&](int rank) {
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
    std::vector<char> own(bytes, static_cast<char>(rank)), out(bytes);
    peers[rank] = {getpid(), own.data()};
    const int neighbour = (rank + 1) % ranks;
    for (int round = 0; round < kRounds; ++round) {
      std::memset(pages + bytes * rank, round + rank, bytes);
      meeting->meet(ranks);
      double start = now();
      if (rank < copiers) {
        std::memcpy(out.data(), pages + bytes * neighbour, bytes);
        times[rank * kRounds + round] = now() - start;
        if (out[bytes / 2] != static_cast<char>(round + neighbour)) stop("wrong copy");
      }
      meeting->meet(ranks);
      start = now();
      if (rank < copiers) {
        const iovec to{out.data(), bytes}, from{peers[neighbour].memory, bytes};
        const bool good = process_vm_readv(peers[neighbour].pid, &to, 1, &from, 1, 0) ==
                          static_cast<ssize_t>(bytes);
        times[(ranks + rank) * kRounds + round] = good ? now() - start : 0;
      }
      meeting->meet(ranks);
    }
  });
  double speed[2];
  for (int way = 0; way < 2; ++way) {
    std::vector<double> slowest(kRounds);
    for (int round = 0; round < kRounds; ++round) {
      for (int rank = 0; rank < ranks; ++rank) {
        slowest[round] = std::max(slowest[round], times[(way * ranks + rank) * kRounds + round]);
      }
    }
    const double seconds = quantile(slowest, 0.5);
    speed[way] = seconds > 0 ? bytes / seconds / 1e9 : 0;
  }
  std::printf(
      "{\"copy_bytes\": %zu, \"copiers\": %d, \"shared_gb_s\": %.3f, \"vm_readv_gb_s\": %.3f}\n",
      bytes, copiers, speed[0], speed[1]);
}

}  // namespace

int main(int count, char** arguments) {
  const std::string what = count > 1 ? arguments[1] : "";
  if (what == "flag") {
    flags(false);
    flags(true);
  } else if (what == "copy" && count == 4) {
    copies(std::stoull(arguments[2]), std::stoi(arguments[3]));
  } else {
    stop("usage: floor flag | floor copy BYTES COPIERS");
  }
}
