// A save without a training run: what power_cut.py kills and cuts the power of, and the judge of what is
// left.
//
//   save_tool save DIRECTORY STEP SEED uring|threads direct|buffered [delete-first]
//   save_tool check DIRECTORY
//   save_tool verify CHECKPOINT
//   save_tool cut MOUNT drop-journal|keep-journal
//
// `save` is what a rank does: save, COMMITTED, and only then the older checkpoints go. delete-first is the
// mistake that has them go before. `check` has a line for each checkpoint: "<step> <seed>", or "<step>
// damaged: <why>"; `verify` takes a run's, too. `cut` is the power cut, for ext4 and XFS on a loop device.
#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "base/error.h"
#include "checkpoint/restore.h"
#include "checkpoint/save.h"
#include "synthetic_state.h"

namespace lm {
namespace {

using namespace synthetic_state;

// Takes from the engine's files what makes them bypass the page cache, as a file system does that knows no
// direct transfers.
std::unique_ptr<IoEngine> buffered_engine(IoEngineKind kind, const EngineSetup& setup) {
  for (const IoFile& file : setup.files)
    ::fcntl(file.descriptor, F_SETFL, ::fcntl(file.descriptor, F_GETFL) & ~O_DIRECT);
  return make_engine(kind, setup, nullptr);
}

void save(const std::string& directory, int64_t step, int64_t seed, const std::string& engine, bool buffered,
          bool delete_first) {
  const IoEngineKind kind = engine_kind(engine);
  const StateCatalogue catalogue = small_catalogue();
  SaveSetup setup{.directory = directory, .step = step, .catalogue = catalogue, .engine = kind};
  if (buffered) setup.make_engine = [kind](const EngineSetup& s) { return buffered_engine(kind, s); };
  Save save(setup);
  write_state(catalogue, seed, save);
  save.commit(manifest_of(step, seed), [&] {
    if (!delete_first) return;
    for (const FoundCheckpoint& found : find_checkpoints(directory)) std::filesystem::remove_all(found.path);
  });
  std::printf("COMMITTED step %ld\n", static_cast<long>(step));
  std::fflush(stdout);
  retain_checkpoints(directory, 1, step, {});
}

void check(const std::string& directory) {
  for (const FoundCheckpoint& found : find_checkpoints(directory)) {
    std::string problem = found.problem;
    int64_t seed = 0;
    if (problem.empty()) {
      try {
        seed = verified_seed(found.path);
      } catch (const Error& error) {
        problem = error.what();
      }
    }
    std::printf("%ld ", static_cast<long>(found.step));
    std::printf(problem.empty() ? "%ld\n" : "damaged: ", static_cast<long>(seed));
    if (!problem.empty()) std::printf("%s\n", problem.c_str());
  }
}

int cut(const std::string& mount, bool keep_journal) {
  const auto go_down = _IOR('X', 125, uint32_t);  // of ext4 and XFS alike
  uint32_t how = keep_journal ? 1 : 2;
  const int directory = ::open(mount.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory >= 0 && ::ioctl(directory, go_down, &how) == 0) return 0;
  std::fprintf(stderr, "%s: %s\n", mount.c_str(), std::strerror(errno));
  return 1;
}

int run(const std::vector<std::string>& words) {
  const std::string verb = words.empty() ? "" : words[0];
  if (verb == "save" && words.size() >= 6) {
    save(words[1], std::stoll(words[2]), std::stoll(words[3]), words[4], words[5] == "buffered",
         words.size() > 6 && words[6] == "delete-first");
  } else if (verb == "check" && words.size() == 2) {
    check(words[1]);
  } else if (verb == "verify" && words.size() == 2) {
    CheckpointReader(words[1]).verify();
  } else if (verb == "cut" && words.size() == 3) {
    return cut(words[1], words[2] == "keep-journal");
  } else {
    std::fprintf(stderr, "save_tool: see the beginning of save_tool.cpp\n");
    return static_cast<int>(Exit::kUsage);
  }
  return 0;
}

}  // namespace
}  // namespace lm

int main(int argc, char** argv) {
  try {
    return lm::run({argv + 1, argv + argc});
  } catch (const lm::Error& error) {
    std::fprintf(stderr, "%s\n", error.report().c_str());
    return static_cast<int>(error.code());
  }
}
