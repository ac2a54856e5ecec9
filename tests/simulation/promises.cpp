// What a job's end must not break.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <set>

#include "base/error.h"
#include "checkpoint/restore.h"
#include "simulated_job.h"

namespace lm::test {
namespace {

bool names(const std::string& text, int rank) {
  const std::string name = fmt::format("rank {}", rank);
  for (size_t at = text.find(name); at != std::string::npos; at = text.find(name, at + 1)) {
    if (at + name.size() == text.size() || !std::isdigit(static_cast<unsigned char>(text[at + name.size()])))
      return true;
  }
  return false;
}

// Codes with which a rank may end after this one.
bool explains(const Fault& fault, int code) {
  using enum Fault::Kind;
  switch (fault.kind) {
    case kError:
      return code == static_cast<int>(Exit::kInput);
    case kFailedSave:
      return code == static_cast<int>(Exit::kNoSpace);
    case kDeath:
    case kStop:
    case kCutLink:
      return code == static_cast<int>(Exit::kNoProgress);
    case kStraggler:  // one that others have given up
      return code == static_cast<int>(Exit::kNoProgress);
    case kOtherList:
      return code == static_cast<int>(Exit::kInternal);
    case kClockJump:
    case kSlowLink:
      return false;
  }
  return false;
}

// Who waits for one that waits may speak first: of a lost message, and of one that is late where ranks meet
// among a few.
bool hides(const Fault& fault, const Job& job) {
  const bool among_few = job.each > 0 || (job.shape.copies > 1 && job.shape.copies < job.ranks);
  return fault.kind == Fault::Kind::kCutLink || (fault.kind == Fault::Kind::kStraggler && among_few);
}

std::string broken_failure(const Job& job, const JobEnd& end) {
  std::set<int> codes;
  std::vector<int> speakers;
  for (int r = 0; r < job.ranks; ++r) {
    const RankEnd& one = end.ranks[static_cast<size_t>(r)];
    if (one.kind != RankEnd::Kind::kFailed) continue;
    codes.insert(one.code);
    if (one.speaks) speakers.push_back(r);
    const bool explained = std::ranges::any_of(job.faults, [&](const Fault& fault) {
      return !fault.harmless && explains(fault, one.code) &&
             (hides(fault, job) || fault.rank == r || names(one.text, fault.rank));
    });
    if (!explained) return fmt::format("rank {} ends with {}: {}", r, one.code, one.text);
  }
  const auto fatal = std::ranges::count_if(job.faults, [](const Fault& fault) { return !fault.harmless; });
  if (fatal == 1 && codes.size() > 1)
    return fmt::format("the ranks end with {} and {}", *codes.begin(), *codes.rbegin());
  // Rank 0 speaks for all; of a vote it knows who has failed, and that one says why. Who does not hear it, or
  // is stopped meanwhile, speaks, too.
  if (fatal == 1 && speakers.size() > 1 && speakers.front() == 0) {
    const Fault& fault = *std::ranges::find(job.faults, false, &Fault::harmless);
    const bool vote =
        fault.kind == Fault::Kind::kFailedSave && speakers.size() == 2 && speakers.back() == fault.rank;
    // One that is late, or in another collective, all notice at the same time, and each says where.
    const bool apart = fault.kind == Fault::Kind::kCutLink || fault.kind == Fault::Kind::kStop ||
                       fault.kind == Fault::Kind::kStraggler || fault.kind == Fault::Kind::kOtherList;
    // Who computes, or is reached late, says it when it is next asked for something: others have waited a
    // second.
    const bool busy = std::ranges::any_of(
        job.faults, [](const Fault& one) { return one.harmless && one.kind != Fault::Kind::kClockJump; });
    if (!vote && !apart && !busy)
      return fmt::format("{} ranks say it, the last is {}", speakers.size(), speakers.back());
  }
  return "";
}

}  // namespace

std::string broken_promise(const Job& job, const JobEnd& end, const std::vector<float>& undisturbed) {
  if (!end.ended) return fmt::format("not all ranks have ended after {:.0f} s", end.seconds);
  const bool alike = std::ranges::find(job.faults, Fault::Kind::kOtherList, &Fault::kind) == job.faults.end();
  if (alike && !end.differs.empty()) return end.differs;
  if (end.weights_differ) return "two ranks that are done have other weights";
  if (!end.weights.empty() && !undisturbed.empty() &&
      std::memcmp(end.weights.data(), undisturbed.data(), undisturbed.size() * sizeof(float)) != 0)
    return "the weights are not those of an undisturbed run";
  const bool harmless = std::ranges::all_of(job.faults, &Fault::harmless);
  int64_t saved = 0;
  for (const RankEnd& one : end.ranks) {
    saved = std::max(saved, one.saved);
    if (harmless && one.kind != RankEnd::Kind::kDone) return "a rank ends: " + one.text;
    // Of the last collective nobody can know whether all have left it.
    const bool any_failed = std::ranges::any_of(end.ranks, [](const RankEnd& other) {
      return other.kind == RankEnd::Kind::kFailed && other.text.find("the end") == std::string::npos;
    });
    if (one.kind == RankEnd::Kind::kDone && any_failed) return "a rank is done, and another has failed";
  }
  if (saved > 0 && !job.directory.empty()) {
    int64_t found = 0;
    for (const FoundCheckpoint& one : find_checkpoints(job.directory)) {
      if (one.manifest) found = std::max(found, one.step);
    }
    if (found < saved) return fmt::format("step {} was acknowledged, and step {} is saved", saved, found);
  }
  return broken_failure(job, end);
}

}  // namespace lm::test
