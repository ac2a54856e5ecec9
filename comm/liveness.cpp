#include "comm/liveness.h"

#include <fmt/format.h>
#include <algorithm>
#include <utility>

namespace lm {
namespace {

// "2.5 s", "60 s"
std::string seconds_text(double seconds) {
  return seconds < 10 ? fmt::format("{:.1f} s", seconds) : fmt::format("{:.0f} s", seconds);
}

}  // namespace

std::string RankName::text() const {
  if (rank < 0) return host;
  return host.empty() ? fmt::format("rank {}", rank) : fmt::format("rank {} on {}", rank, host);
}

std::string CollectiveName::text() const {
  return number == 0 ? fmt::format("\"{}\"", what) : fmt::format("\"{}\" (collective {})", what, number);
}

std::optional<int> awaited(const DeviceProgress& mine, std::span<const DeviceProgress> all) {
  const auto last = std::ranges::min_element(all, {}, &DeviceProgress::begun);
  if (!mine.inside() || last == all.end() || last->begun >= mine.begun) return std::nullopt;
  return static_cast<int>(last - all.begin());
}

Liveness::Liveness(RankName self, int ranks, Patience patience, double now)
    : self_(std::move(self)),
      patience_(patience),
      heartbeats_(static_cast<size_t>(ranks), StallTimer(now, std::min(patience.silence / 2, Waited::kMost))),
      waited_(now) {}

void Liveness::enter(CollectiveName here, double now) {
  here_ = std::move(here);
  waited_ = Waited(now);
}

std::optional<Error> Liveness::silent(int rank, const Posted& posted, double now) {
  const double seconds = heartbeats_[static_cast<size_t>(rank)].look(posted.heartbeats, now);
  if (seconds < patience_.silence) return std::nullopt;
  const std::string last = posted.last.number > 0 ? ": it was last in " + posted.last.text() : "";
  return Error(
      Exit::kNoProgress,
      {.area = "HANG-09",
       .what = fmt::format("no heartbeat from {} for {}{}", RankName{rank, posted.host}.text(),
                           seconds_text(seconds), last),
       .place = self_.text() + ", in " + here_.text(),
       .next = "see whether that process is stopped, waits for a disk or is on a machine out of reach; then "
               "start the same command again"});
}

std::optional<Error> Liveness::late(int rank, double now) {
  const double seconds = waited_.look(now);
  if (seconds < patience_.late) return std::nullopt;
  return not_entered(self_, RankName{rank}.text(), here_, seconds);
}

Error peer_ended(const RankName& self, const std::string& when) {
  return Error(Exit::kPeerLost, {.area = "PEER-08",
                                 .what = "another rank has ended" + (when.empty() ? "" : " " + when),
                                 .place = self.text(),
                                 .next = "see that rank's message"});
}

Error not_entered(const RankName& self, const std::string& who, const CollectiveName& here, double seconds) {
  return Error(Exit::kNoProgress,
               {.area = "HANG-09",
                .what = fmt::format("{} did not enter {} within {}", who, here.text(), seconds_text(seconds)),
                .place = self.text(),
                .next = "see the other ranks' logs"});
}

Error no_progress(const RankName& self, const std::string& doing, double seconds, double allowed,
                  const std::string& device) {
  return Error(
      Exit::kNoProgress,
      {.area = "HANG-09",
       .what = fmt::format("{} has made no progress for {:.1f} s: it is stuck in {}, with {:.1f} s "
                           "allowed{}",
                           self.text(), seconds, doing, allowed, device.empty() ? "" : "; its GPU " + device),
       .place = RankName{self.rank}.text(),
       .next = "see whether its GPU, its disk or a debugger holds that process (its stack: gdb -p, or "
               "/proc/PID/stack); then start the same command again"});
}

}  // namespace lm
