#include "launcher/worker/ranks.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>

#include "base/error.h"
#include "base/log.h"
#include "launcher/environment.h"
#include "launcher/machine/survey.h"
#include "launcher/refusal_text.h"
#include "launcher/status.h"

namespace lm {
namespace {

// Redirects standard error to that file.
void speak_into(const std::string& path, bool create = true) {
  const int fd =
      open(path.c_str(), create ? O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC : O_WRONLY | O_CLOEXEC, 0600);
  if (fd < 0 || dup2(fd, STDERR_FILENO) < 0) {
    throw Error(Exit::kIo, {.area = "FILE-33",
                            .what = "the rank's log cannot be written",
                            .place = path,
                            .next = "see that the run's directory can be written"});
  }
  close(fd);
}

std::string log_of(const CommandLine& line, int64_t rank) {
  return fmt::format("{}/log.rank{}.txt", line.value("--run-dir").value(), rank);
}

void write_console(int console, const Error& error) {
  const std::string report = error_lines(error);
  [[maybe_unused]] const ssize_t written = write(console, report.data(), report.size());
}

// Machine of a rank: ranks of one boot of one kernel share a machine, whatever its name.
struct Place {
  char boot[64] = "";
  cpu_set_t cores{};
};

Place own_place() {
  Place place;
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  boot.copy(place.boot, sizeof place.boot - 1);
  sched_getaffinity(0, sizeof place.cores, &place.cores);
  return place;
}

}  // namespace

Ranks::Ranks(const CommandLine& line, const Abandon& abandon) : Ranks() {
  const std::optional<int64_t> rank = line.integer("--rank"), fd = line.integer("--ranks-fd");
  if (!rank || !fd) return;
  const bool mpi = line.has("--mpi");
  // Only rank 0 prints on the console.
  if (*rank > 0) {
    console_ = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);
    if (mpi) {
      speak_into("/dev/null", false);  // until the run directory is known to be ours
    } else {
      speak_into(log_of(line, *rank));
    }
  }
  region_.emplace(SharedRegion::attach(static_cast<int>(*fd)));
  if (mpi) {
    join(line, abandon);
    return;
  }
  group_ = std::make_unique<SharedGroup>(*region_, static_cast<int>(*rank),
                                         silence_seconds().value_or(SharedGroup::kSilence));
  on_machine_ = group_->ranks();
}

void Ranks::join(const CommandLine& line, const Abandon& abandon) {
  try {
    link_ = std::make_unique<MpiLink>(
        LinkSetup{.api = load_mpi(line.value("--mpi").value()),
                  .silence = silence_seconds().value_or(SharedGroup::kSilence),
                  .late = SharedGroup::kLate,
                  .ended = [this] { return region_->ended(); },
                  .host = host_name(),
                  .abandon = [this, abandon](const Error& error) { abandon(error, *this); }});
  } catch (const Error& error) {
    if (console_ >= 0) write_console(console_, error);  // no other process can report it
    throw;
  }
  const auto here = [this](const char* what) { region_->arrive(0, what); };
  group_ = std::make_unique<MpiGroup>(*link_, MpiGroup::kStaging, here);
  try {
    agree_on_version(*group_, LM_VERSION);
  } catch (const Error& error) {
    if (error.text().area == "RANK-32") link_->leave();
    throw;
  }
  const std::vector<std::string> refusals =
      gather_texts(*group_, kRefusalCall, line.value("--refused").value_or(""));
  const auto first = std::ranges::find_if(refusals, [](const std::string& text) { return !text.empty(); });
  if (first != refusals.end()) {
    ErrorText text = parse_refusal(*first).text();
    const auto by = first - refusals.begin();
    if (by > 0) text.place += (text.place.empty() ? "rank " : ", rank ") + std::to_string(by);
    link_->leave();
    throw Error(parse_refusal(*first).code(), text);
  }
  try {
    together(*group_, "opening the ranks' logs", [&] {
      if (console_ >= 0) speak_into(log_of(line, group_->rank()));
    });
  } catch (const Error& error) {
    tell(error);
    throw;
  }
  meet_neighbours();
}

void Ranks::meet_neighbours() {
  const Place mine = own_place();
  const std::vector<Place> all = group_->gather("machines", mine);
  cpu_set_t leaders;
  CPU_ZERO(&leaders);
  for (const Place& one : all) {
    const auto here = std::ranges::count_if(
        all, [&](const Place& other) { return std::strcmp(one.boot, other.boot) == 0; });
    on_machine_ = std::max(on_machine_, static_cast<int>(here));
    if (std::strcmp(one.boot, all.front().boot) == 0) CPU_OR(&leaders, &leaders, &one.cores);
  }
  for (size_t r = 0; r < all.size(); ++r) {
    const size_t first = r - r % static_cast<size_t>(on_machine_);
    by_machine_ = by_machine_ && std::strcmp(all[r].boot, all[first].boot) == 0;
  }
  by_machine_ = by_machine_ && count() % on_machine_ == 0;
  if (by_machine_) group_->set_machines(on_machine_);
  machine_cores_ = CPU_COUNT(&leaders);
  // A container's CPU quota applies to all ranks together.
  affinity_decides_ = CPU_COUNT(&mine.cores) == survey_host().cpu.cores;
}

Ranks::~Ranks() {
  if (console_ >= 0) close(console_);
}

void Ranks::share_memory() {
  if (on_machine_ == 1) return;
  if (by_machine_) memory_.emplace(*group_, on_machine_);
  if (memory_ && memory_->works()) return;
  memory_.reset();
  if (!leads()) return;
  log_note("RANK-16", std::string("each rank has its own copy of the frozen weights: ") +
                          (by_machine_ ? "some rank cannot open the memory of its machine's first one by "
                                         "/proc, as in containers of their own"
                                       : "ranks are not numbered machine by machine (mpirun --map-by slot, "
                                         "srun --distribution=block)"));
}

void Ranks::tell(const Error& error) {
  ErrorText text = error.text();
  if (text.area == "PEER-32") {
    if (link_ && leads()) link_->passed_on(error.code(), error.what(), text.advice());
    return;
  }
  const bool said = link_ && link_->end(error.code(), error.what(), text.advice());
  const bool follows = error.code() == Exit::kPeerLost && text.area != "NCCL-10";
  if (said || console_ < 0 || follows) return;
  const std::string rank = fmt::format("rank {}", group_->rank());
  if (text.place.find(rank) == std::string::npos) text.place += (text.place.empty() ? "" : ", ") + rank;
  write_console(console_, Error(error.code(), text));
}

Group& Ranks::device_group(DeviceType device) {
  if (device == DeviceType::kCpu || count() == 1) return *group_;
  NcclSetup setup{.api = load_nccl(), .peers = *group_, .host = host_name()};
  if (link_) {
    setup.lost = [this](const std::string&) { return link_->lost(); };
  } else {
    setup.lost = static_cast<const SharedGroup&>(*group_).watch();
    setup.region = &*region_;
  }
  gpus_ = std::make_unique<NcclGroup>(std::move(setup));
  if (by_machine_) gpus_->set_machines(on_machine_);
  return *gpus_;
}

void Ranks::leave() {
  if (gpus_) gpus_->leave();
  if (!link_) return;
  group_->barrier("the end");
  link_->leave();
}

std::string Ranks::from_leader(const char* what, const std::function<std::string()>& make) {
  std::string text = leads() ? make() : "";
  const int64_t bytes = group_->gather(what, std::ssize(text)).front();
  text.resize(static_cast<size_t>(bytes));
  if (bytes > 0) group_->broadcast(what, std::as_writable_bytes(std::span(text)));
  return text;
}

void Ranks::in_turn(const char* what, const std::function<void()>& work) {
  if (!leads()) group_->barrier(what);
  work();
  if (leads()) group_->barrier(what);
}

bool Ranks::any(const char* what, bool here) {
  const std::vector<char> all = group_->gather(what, static_cast<char>(here));
  return std::any_of(all.begin(), all.end(), [](char one) { return one != 0; });
}

void Ranks::agree(const char* what, const std::string& mine, const std::string& next) {
  const std::vector<size_t> all = group_->gather(what, std::hash<std::string>()(mine));
  const auto other = std::ranges::find_if(all, [&](size_t one) { return one != all.front(); });
  if (other == all.end()) return;
  throw Error(Exit::kConfig,
              {.area = "RANK-32",
               .what = fmt::format("rank {} has another {} than rank 0", other - all.begin(), what),
               .place = "",
               .next = next});
}

}  // namespace lm
