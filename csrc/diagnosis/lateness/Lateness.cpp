#include "diagnosis/lateness/Lateness.hpp"

#include <cmath>
#include <cstddef>

namespace torchcomms_pg {

namespace {

// Part of the total own time after which a block ends. Collectives in quick succession share a
// block, since each alone says little; 20 collectives at equal distances have a block each.
constexpr double kBlockPart = 1.0 / 32;

double medianOf(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return values.size() % 2 == 1 ? *middle
                                : (*middle + *std::max_element(values.begin(), middle)) / 2;
}

// Returns the median, or the lower of the two middle values: for two ranks, the value of the rank
// that did not stall.
double lowerMedianOf(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// The ranks' times between two collectives, in microseconds, by rank.
struct Stretch {
  std::vector<double> own;  // time outside of waits
  // time in the group's collectives after this stretch, which shows who was late
  std::vector<double> here;
  std::vector<double> took;  // time between the two arrivals
  uint64_t collectives = 0;
  bool known = true;  // true if each rank arrived at both in one thread

  void add(const Stretch& other) {
    const auto addTo = [](auto& sums, const auto& values) {
      sums.resize(values.size());
      std::ranges::transform(sums, values, sums.begin(), std::plus<>());
    };
    addTo(own, other.own);
    addTo(here, other.here);
    addTo(took, other.took);
    collectives += other.collectives;
  }
};

bool isSound(const Arrivals& arrivals) {
  const auto size = arrivals.seqs.size();
  return size > 0 && arrivals.at.size() == size && arrivals.waited.size() == size &&
         arrivals.here.size() == size && arrivals.threads.size() == size;
}

// Returns the stretches between successive collectives that all ranks report. Leaves out the last
// stretch, and each stretch in which a rank changed its thread.
std::vector<Stretch> stretchesOf(const std::vector<Arrivals>& ranks) {
  std::vector<Stretch> all;
  std::vector<size_t> before;
  for (const auto seq : ranks[0].seqs) {
    std::vector<size_t> places;
    for (const auto& told : ranks) {
      const auto found = std::ranges::lower_bound(told.seqs, seq);
      if (found != told.seqs.end() && *found == seq) {
        places.push_back(static_cast<size_t>(found - told.seqs.begin()));
      }
    }
    if (places.size() < ranks.size()) {
      continue;
    }
    if (!before.empty()) {
      Stretch stretch;
      for (size_t rank = 0; rank < ranks.size(); ++rank) {
        const auto& told = ranks[rank];
        const auto from = before[rank];
        const auto to = places[rank];
        const auto passed = [&](const auto& times) {
          return static_cast<double>(times[to] - times[from]);
        };
        stretch.known = stretch.known && told.threads[from] == told.threads[to];
        stretch.took.push_back(passed(told.at));
        stretch.here.push_back(passed(told.here));
        stretch.own.push_back(std::max(passed(told.at) - passed(told.waited), 0.0));
      }
      stretch.collectives = seq - ranks[0].seqs[before[0]];
      if (!all.empty()) {
        all.back().here = stretch.here;
      }
      all.push_back(std::move(stretch));
    }
    before = std::move(places);
  }
  if (!all.empty()) {
    all.pop_back();  // the time in the collective after it is not known yet
  }
  std::erase_if(all, [](const Stretch& stretch) { return !stretch.known; });
  return all;
}

// Joins stretches into blocks of about equal own time. A block ends only with a collective in which
// the ranks waited, since these waits show how late a rank was.
std::vector<Stretch> blocksOf(const std::vector<Stretch>& stretches) {
  double total = 0;
  for (const auto& stretch : stretches) {
    total += lowerMedianOf(stretch.own);
  }
  std::vector<Stretch> blocks;
  Stretch block;
  double own = 0;
  for (const auto& stretch : stretches) {
    block.add(stretch);
    own += lowerMedianOf(stretch.own);
    if (own >= total * kBlockPart && own > 0 && lowerMedianOf(stretch.here) > 0) {
      blocks.push_back(std::move(block));
      block = {};
      own = 0;
    }
  }
  return blocks;
}

// Returns the median of all values except the value at `left`.
double medianWithout(std::vector<double> values, size_t left) {
  values.erase(values.begin() + static_cast<ptrdiff_t>(left));
  return medianOf(std::move(values));
}

}  // namespace

Lateness judgeLateness(const std::vector<Arrivals>& ranks) {
  Lateness lateness;
  if (ranks.size() < 2 || !std::ranges::all_of(ranks, isSound)) {
    return lateness;
  }
  const auto blocks = blocksOf(stretchesOf(ranks));
  if (blocks.size() < kFewestBlocks) {
    return lateness;
  }
  std::vector<double> took;
  for (const auto& block : blocks) {
    took.push_back(std::max(medianOf(block.took), 1.0));
    lateness.seconds += took.back() * 1e-6;
    lateness.collectives += block.collectives;
  }
  size_t latest = 0;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    std::vector<double> excesses;
    for (const auto& block : blocks) {
      const auto excess = block.own[rank] - medianWithout(block.own, rank);
      excesses.push_back(excess * 1e-6 / static_cast<double>(block.collectives));
    }
    lateness.ranks.push_back({medianOf(std::move(excesses)), 0});
    latest = lateness.ranks[rank].later > lateness.ranks[latest].later ? rank : latest;
  }
  // The share is the part of the time in which the others wait for the latest rank alone. In each
  // block it is, for each other rank, the smaller of two differences: how much longer the latest
  // rank works, and how much longer the other rank waits in collectives. The median over the blocks
  // counts, and of the other ranks' medians the least.
  double share = 1;
  bool steady = true;
  std::vector<double> scatters;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (rank == latest) {
      continue;
    }
    std::vector<double> differences;
    for (size_t place = 0; place < blocks.size(); ++place) {
      const auto& block = blocks[place];
      const auto longer = block.own[latest] - block.own[rank];
      const auto waits = block.here[rank] - block.here[latest];
      differences.push_back(std::min(longer, waits) / took[place]);
    }
    const auto difference = medianOf(differences);
    share = std::min(share, difference);
    const auto later = std::ranges::count_if(differences, [](double each) { return each > 0; });
    steady = steady &&
             static_cast<double>(later) >= kSteadyPart * static_cast<double>(differences.size());
    for (auto& each : differences) {
      each = std::abs(each - difference);
    }
    scatters.push_back(medianOf(std::move(differences)));
  }
  lateness.ranks[latest].share = std::max(share, 0.0);
  if (steady && share > kLateShare && share >= kDeviations * medianOf(std::move(scatters))) {
    lateness.late = static_cast<int>(latest);
  }
  return lateness;
}

}  // namespace torchcomms_pg
