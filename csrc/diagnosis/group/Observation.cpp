#include "diagnosis/group/Observation.hpp"

#include <memory>

#include "base/NeverDestroyed.hpp"
#include "comm/Observer.hpp"
#include "diagnosis/dumps/DumpPipe.hpp"
#include "diagnosis/group/DiagnosisClient.hpp"
#include "diagnosis/group/ProcessTotals.hpp"

namespace torchcomms_pg {

namespace {

// Limit of the wait of an ending process for its metrics.
constexpr Milliseconds kLastWords{1000};

class Observation final : public ProcessObserver {
 public:
  std::unique_ptr<Observer> observe(const Observed& comm) override {
    return std::make_unique<DiagnosisClient>(comm);
  }
  std::shared_ptr<void> hold(int rank) override { return DumpPipe::hold(rank); }
  void beforeExit() override {
    process_totals::awaitWritten(kLastWords);
    DumpPipe::removeAtExit();
  }
};

}  // namespace

void observeProcess() {
  ProcessObserver::set(&neverDestroyed<Observation>());
}

}  // namespace torchcomms_pg
