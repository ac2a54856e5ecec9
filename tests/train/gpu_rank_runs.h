// Runs of ranks with a GPU each, over NCCL and over host memory, and what they have found.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "offloaded_run.h"
#include "tests/support/gpu_ranks.h"

namespace lm::gpu_rank_runs {

using namespace offloaded_run;

// Device memory by way of the host, over the group that processes of the CPU have.
class ThroughHost final : public Group {
 public:
  explicit ThroughHost(Group& peers) : peers_(peers) {}
  int rank() const override { return peers_.rank(); }
  int ranks() const override { return peers_.ranks(); }
  void begin_after(StreamView callers) override { compute_ = callers; }
  void all_gather_among(const Members& members, const char* what, std::byte* data,
                        std::span<const ByteRange> shards, int64_t longest) override {
    std::vector<std::byte> host = taken(data, shards);
    peers_.all_gather_among(members, what, host.data(), shards, longest);
    for (const ByteRange& run : shards) {
      if (run.bytes > 0) copy_bytes(data + run.begin, host.data() + run.begin, run.bytes, compute_);
    }
    synchronize(compute_);
  }
  void reduce_scatter_among(const Members& members, const char* what, const std::byte* data,
                            std::span<const ByteRange> shards, int64_t longest, const Add& add) override {
    const std::vector<std::byte> host = taken(data, shards);
    peers_.reduce_scatter_among(members, what, host.data(), shards, longest,
                                [&](int64_t offset, int64_t bytes, std::span<const std::byte* const> from) {
                                  std::vector<Memory> parts;
                                  std::vector<const std::byte*> device;
                                  for (const std::byte* const part : from) {
                                    parts.emplace_back(DeviceType::kCuda, bytes);
                                    copy_bytes(parts.back().data(), part, bytes, compute_);
                                    device.push_back(parts.back().data());
                                  }
                                  add(offset, bytes, device);
                                  synchronize(compute_);
                                });
  }

 private:
  std::vector<std::byte> taken(const std::byte* data, std::span<const ByteRange> shards) const {
    int64_t bytes = 0;
    for (const ByteRange& run : shards) bytes = std::max(bytes, run.begin + run.bytes);
    std::vector<std::byte> host(static_cast<size_t>(bytes));
    if (bytes > 0) copy_bytes(host.data(), data, bytes, compute_);
    synchronize(compute_);
    return host;
  }
  Group& peers_;
  StreamView compute_;
};

// What the ranks of a run have found, each in a file of its own: numbers, then the state that it has.
class Findings {
 public:
  Findings()
      : directory_(std::filesystem::temp_directory_path() / ("gpu_ranks_" + std::to_string(getpid()))) {
    std::filesystem::create_directories(directory_);
  }
  ~Findings() { std::filesystem::remove_all(directory_); }
  Findings(const Findings&) = delete;
  Findings& operator=(const Findings&) = delete;

  void write(int rank, const Outcome& outcome) const {
    std::ofstream file(path(rank), std::ios::binary);
    file.precision(17);
    for (const double x : outcome.losses) file << x << ' ';
    for (const double x : outcome.norms) file << x << ' ';
    file << outcome.evaluated << '\n' << outcome.state.size() << '\n';
    for (const auto& [name, bytes] : outcome.state) {
      file << name << ' ' << bytes.size() << '\n';
      file.write(reinterpret_cast<const char*>(bytes.data()), std::ssize(bytes));
    }
  }
  // The numbers, which agree, and all ranks' state together: what one does not have it has as zeros.
  std::string numbers;
  State state;
  void read(int ranks) {
    for (int r = 0; r < ranks; ++r) {
      std::ifstream file(path(r), std::ios::binary);
      std::string line;
      std::getline(file, line);
      if (r == 0) numbers = line;
      EXPECT_EQ(line, numbers) << "rank " << r;
      size_t arrays = 0, size = 0;
      file >> arrays;
      for (std::string name; arrays > 0; --arrays) {
        file >> name >> size;
        file.get();
        std::vector<std::byte> bytes(size);
        file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(size));
        std::vector<std::byte>& known = state[name];
        known.resize(std::max(known.size(), size));
        for (size_t i = 0; i < size; ++i) known[i] = r == 0 ? bytes[i] : known[i] | bytes[i];
      }
      EXPECT_TRUE(file.good()) << "rank " << r << " has found nothing";
    }
  }

 private:
  std::string path(int rank) const { return directory_ / std::to_string(rank); }
  std::filesystem::path directory_;
};

inline void run_gpus(const Variant& run, int ranks, bool nccl, Findings& out) {
  expect_good_ends(with_gpus({.ranks = ranks, .seconds = 300}, [&](GpuRank& rank) {
    ThroughHost host(rank.peers);
    Group& group = nccl ? static_cast<Group&>(rank.group) : host;
    Training training(run, {}, {}, &rank.peers, &group);
    EXPECT_EQ(training.rank().memory_of_others() > 0, run.one_copy) << run.text();
    out.write(rank.group.rank(), training.run());
  }));
  out.read(ranks);
}

inline void expect_same(const Findings& a, const Findings& b, const Variant& run) {
  EXPECT_EQ(a.numbers, b.numbers) << run.text();
  EXPECT_EQ(a.state.size(), b.state.size());
  for (const auto& [name, bytes] : b.state)
    EXPECT_TRUE(a.state.at(name) == bytes) << name << ", " << run.text();
}

inline Variant small_run() {
  Variant run;
  run.micro_batches = 4;
  run.steps = 2;
  run.recompute = true;
  run.group = 4;
  run.slots_on_device = true;
  return run;
}

}  // namespace lm::gpu_rank_runs
