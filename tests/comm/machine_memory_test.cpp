// Ranks as threads, which find one another's memory in /proc as processes do, and as processes.
#include "comm/machine_memory.h"

#include <gtest/gtest.h>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "comm/shared_group.h"
#include "tests/support/machine_mapping.h"

namespace lm {
namespace {

constexpr int64_t kBytes = (int64_t{9} << 20) + 4096;

using Body = std::function<void(SharedGroup&)>;

// Each rank in a thread of its own; what it threw. One that throws has ended.
std::vector<std::string> with_ranks(int ranks, const Body& body) {
  SharedRegion region = SharedRegion::create(ranks);
  std::vector<std::string> errors(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        SharedGroup group(region, r, 20);
        body(group);
      } catch (const Error& error) {
        errors[static_cast<size_t>(r)] = std::to_string(static_cast<int>(error.code())) + " " + error.what();
        region.end();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// Each rank in a process of its own, which ends with what `body` returns; their statuses of waitpid.
std::vector<int> in_processes(int ranks, const std::function<int(SharedGroup&)>& body) {
  SharedRegion region = SharedRegion::create(ranks);
  std::vector<pid_t> children;
  for (int r = 0; r < ranks; ++r) {
    const pid_t child = fork();
    if (child == 0) {
      int code = 99;
      try {
        SharedGroup group(region, r, 20);
        code = body(group);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", r, error.what());
      }
      _exit(code);
    }
    children.push_back(child);
  }
  std::vector<int> out;
  for (const pid_t child : children) {
    int status = -1;
    waitpid(child, &status, 0);
    out.push_back(status);
  }
  return out;
}

std::byte value(int machine, size_t at) {
  return static_cast<std::byte>((at * 7 + at / 4096 + static_cast<size_t>(machine)) & 0xff);
}

TEST(MachineMemory, TheFirstRankOfEveryMachineFillsIt) {
  for (const auto& [ranks, each] : {std::pair(2, 2), std::pair(4, 4), std::pair(4, 2), std::pair(6, 3)}) {
    const auto errors = with_ranks(ranks, [each = each](SharedGroup& group) {
      MachineMemory memory(group, each);
      ASSERT_TRUE(memory.works());
      EXPECT_EQ(memory.first(), group.rank() % each == 0);
      const std::span<std::byte> bytes = memory.map(kBytes);
      ASSERT_EQ(bytes.size(), static_cast<size_t>(kBytes));
      const int machine = group.rank() / each;
      for (size_t i = 0; memory.first() && i < bytes.size(); ++i) bytes[i] = value(machine, i);
      memory.filled();
      size_t wrong = 0;
      for (size_t i = 0; i < bytes.size(); ++i) wrong += bytes[i] == value(machine, i) ? 0 : 1;
      EXPECT_EQ(wrong, 0U) << "rank " << group.rank();
      EXPECT_EQ(memory.of_others(), kBytes - kBytes / each);
      group.barrier("the end");
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
  }
}

// The memory of a machine is that of one copy, and of each rank it is the whole that is resident.
TEST(MachineMemory, ProcessesHaveItOnceAndItHasNoName) {
  const std::vector<int> statuses = in_processes(3, [](SharedGroup& group) {
    MachineMemory memory(group, 3);
    if (!memory.works()) return 1;
    const std::span<std::byte> bytes = memory.map(kBytes);
    if (memory.first()) std::memset(bytes.data(), 1, bytes.size());
    memory.filled();
    group.barrier("all have it resident");
    const Mapping mapping = own_mapping();
    const int64_t all = kBytes / 1024;
    const bool whole = mapping.resident == all, third = std::abs(mapping.share - all / 3) <= all * 3 / 100;
    if (!whole || !third || !mapping.nameless)
      std::fprintf(stderr, "resident %ld, share %ld kB of %ld\n", static_cast<long>(mapping.resident),
                   static_cast<long>(mapping.share), static_cast<long>(all));
    group.barrier("all have looked");
    return whole && third && mapping.nameless ? 0 : 2;
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
}

// What is used where it lies and what GPUs fetch are mapped one after the other.
TEST(MachineMemory, ComesInSeveralPieces) {
  const auto errors = with_ranks(2, [](SharedGroup& group) {
    MachineMemory memory(group, 2);
    const std::span<std::byte> one = memory.map(5000), other = memory.map(kBytes);
    if (memory.first()) std::ranges::fill(one, std::byte{1}), std::ranges::fill(other, std::byte{2});
    memory.filled();
    EXPECT_EQ(std::ranges::count(one, std::byte{1}), 5000);
    EXPECT_EQ(std::ranges::count(other, std::byte{2}), kBytes);
    EXPECT_EQ(memory.of_others(), 2500 + kBytes / 2);
    group.barrier("the end");
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

// As the kernel leaves it where memory is short: in the memory of the machine or in its swap, and not
// resident here. What is not counted is not to be taken away.
TEST(MachineMemory, WhatIsNotResidentIsNotOfOthers) {
  constexpr int64_t kAll = int64_t{64} << 20, kAbout = int64_t{4} << 20;
  const std::vector<int> statuses = in_processes(2, [](SharedGroup& group) {
    MachineMemory memory(group, 2);
    if (memory.of_others() != 0) return 1;
    const std::span<std::byte> bytes = memory.map(kAll);
    if (memory.first()) std::memset(bytes.data(), 1, bytes.size());
    memory.filled();
    const int64_t whole = memory.of_others();
    if (madvise(bytes.data(), bytes.size() * 3 / 4, MADV_DONTNEED) != 0) return 2;
    const int64_t part = memory.of_others();
    const bool right = std::abs(whole - kAll / 2) < kAbout && std::abs(part - kAll / 8) < kAbout;
    if (!right)
      std::fprintf(stderr, "of others: %ld and %ld\n", static_cast<long>(whole), static_cast<long>(part));
    group.barrier("all have looked");
    return right && bytes[0] == std::byte{1} ? 0 : 3;
  });
  for (const int status : statuses) EXPECT_EQ(status, 0);
}

// Compute that wrote to it would change the weights of all ranks.
TEST(MachineMemory, NobodyWritesToItAfterwards) {
  for (const int writer : {0, 1}) {
    const std::vector<int> statuses = in_processes(2, [writer](SharedGroup& group) {
      MachineMemory memory(group, 2);
      const std::span<std::byte> bytes = memory.map(kBytes);
      if (memory.first()) bytes[5] = std::byte{3};
      memory.filled();
      if (group.rank() == writer) *static_cast<volatile std::byte*>(bytes.data()) = std::byte{1};
      return bytes[5] == std::byte{3} ? 0 : 1;
    });
    for (int rank : {0, 1}) {
      const int status = statuses[static_cast<size_t>(rank)];
      EXPECT_EQ(rank == writer, WIFSIGNALED(status) || WEXITSTATUS(status) != 0) << rank << " " << status;
    }
  }
}

// Of a rank that ends while it fills the memory, or waits for that.
TEST(MachineMemory, TheEndOfARankWhileItLoadsEndsTheOthers) {
  for (const int dies : {0, 1}) {
    const auto errors = with_ranks(3, [dies](SharedGroup& group) {
      MachineMemory memory(group, 3);
      memory.map(kBytes);
      if (group.rank() == dies)
        throw Error(Exit::kInput, {.area = "X", .what = "a file", .place = "", .next = "", .kept = ""});
      memory.filled();
      ADD_FAILURE() << "rank " << group.rank() << " goes on";
    });
    for (int rank = 0; rank < 3; ++rank)
      EXPECT_TRUE(errors[static_cast<size_t>(rank)].starts_with(rank == dies ? "11 a file" : "40 "))
          << errors[static_cast<size_t>(rank)];
  }
}

}  // namespace
}  // namespace lm
