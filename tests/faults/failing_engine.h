// A real engine whose n-th operation fails: what goes wrong is decided in front of it, everything else is
// done by the disk. Used like any engine, by one thread; the counts outlive it.
#pragma once

#include <atomic>
#include <cerrno>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "offload/io_engine.h"
#include "tests/support/sim_disk.h"

namespace lm {

struct OperationCounts {
  std::atomic<int64_t> operations{0}, injected{0};
};

// Takes kEio, kEnospc (of writes), kEintr, kEagain and kShort, each on an operation in the order handed in,
// from 0.
class FailingEngine final : public IoEngine {
 public:
  FailingEngine(std::unique_ptr<IoEngine> inner, std::optional<SimFaultAt> fault, OperationCounts& counts)
      : inner_(std::move(inner)), fault_(fault), counts_(counts) {}

  int depth() const override { return inner_->depth(); }
  void submit(const IoRequest& request) override {
    const int64_t n = counts_.operations++;
    const bool write = request.direction == IoDirection::kWrite;
    if (!fault_ || (n != fault_->operation && !(fault_->for_ever && n > fault_->operation)) ||
        (fault_->fault == SimFault::kEnospc && !write))
      return pass_on(request);
    ++counts_.injected;
    if (fault_->fault == SimFault::kShort) {
      IoRequest part = request;
      // Of one unit all is moved, and half of it reported: no disk moves a part of a sector.
      if (request.bytes >= 2 * kUnit) part.bytes = request.bytes / 2 / kUnit * kUnit;
      if (part.bytes == request.bytes) halves_[request.id] = request.bytes / 2;
      return pass_on(part);
    }
    refused_.push_back({request.id, -error()});
  }
  void wait(std::vector<IoResult>& results) override {
    if (!refused_.empty()) {
      results.insert(results.end(), refused_.begin(), refused_.end());
      return refused_.clear();
    }
    const size_t before = results.size();
    inner_->wait(results);
    for (size_t i = before; i < results.size(); ++i) {
      if (const auto half = halves_.find(results[i].id); half != halves_.end() && results[i].result > 0) {
        results[i].result = half->second;
        halves_.erase(half);
      }
    }
  }
  void wake() override { inner_->wake(); }
  std::string description() const override { return inner_->description(); }

 private:
  static constexpr int64_t kUnit = 4096;
  void pass_on(const IoRequest& request) { inner_->submit(request); }
  int error() const {
    switch (fault_->fault) {
      case SimFault::kEnospc:
        return ENOSPC;
      case SimFault::kEintr:
        return EINTR;
      case SimFault::kEagain:
        return EAGAIN;
      default:
        return EIO;
    }
  }

  std::unique_ptr<IoEngine> inner_;
  const std::optional<SimFaultAt> fault_;
  OperationCounts& counts_;
  std::vector<IoResult> refused_;                 // not passed on
  std::unordered_map<uint64_t, int64_t> halves_;  // what is reported of them
};

}  // namespace lm
