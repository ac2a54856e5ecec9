// The link over messages in memory, which can stay away: ranks are threads.
#include "comm/mpi_link.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "comm/mpi_group.h"
#include "comm/mpi_worker.h"
#include "stopped.h"

namespace lm {
namespace {

// MPI as one process: a rank is the thread that joins.
struct Message {
  int from, to, tag;
  MpiChannel channel;
  std::vector<std::byte> bytes;
};
struct Request {
  bool sends = false;
  std::byte* data = nullptr;
  int64_t bytes = 0;
  int from = -1, at = 0;
  MpiChannel channel = MpiChannel::kData;
  bool gone = false;  // with its process
};
struct World {
  std::mutex mutex;
  std::condition_variable come;
  int wanted = 0, joined = 0, left = 0;
  std::vector<Message> messages;
  std::vector<bool> mute;      // what such a rank sends does not arrive
  std::vector<int> ends;       // words of an end that each has sent
  std::vector<uint64_t> told;  // the number of the last heartbeat of each
  std::set<void*> open;        // requests; those of a link that gave up stay, as MPI's do
  int abandoned = 0;           // links whose call has failed after it was begun
  int unfinished = 0;          // receives of theirs that were still open
};
World& world = *new World;  // a link's thread may outlive main
thread_local int this_rank = -1;

int join(int* rank, int* ranks, char* /*text*/, int /*size*/) {
  std::unique_lock lock(world.mutex);
  *rank = this_rank = world.joined++;
  *ranks = world.wanted;
  world.come.notify_all();
  world.come.wait_for(lock, std::chrono::seconds(5), [] { return world.joined >= world.wanted; });
  return 0;
}

void* send(const void* data, int64_t bytes, const MpiAddress* address, char* /*text*/, int /*size*/) {
  const std::lock_guard lock(world.mutex);
  const auto* const begin = static_cast<const std::byte*>(data);
  if (address->channel == MpiChannel::kNotices) {
    Notice notice;
    std::memcpy(&notice, data, sizeof notice);
    if (notice.kind == Notice::Kind::kEnd) ++world.ends[static_cast<size_t>(this_rank)];
    if (notice.kind == Notice::Kind::kHeartbeat) world.told[static_cast<size_t>(this_rank)] = notice.number;
  }
  if (!world.mute[static_cast<size_t>(this_rank)])
    world.messages.push_back(
        {this_rank, address->to, address->tag, address->channel, {begin, begin + bytes}});
  return *world.open.insert(new Request{.sends = true}).first;
}

void* receive(void* data, int64_t bytes, int from, MpiChannel channel, char* /*text*/, int /*size*/) {
  const std::lock_guard lock(world.mutex);
  auto* const request = new Request{.data = static_cast<std::byte*>(data),
                                    .bytes = bytes,
                                    .from = from,
                                    .at = this_rank,
                                    .channel = channel};
  return *world.open.insert(request).first;
}

int test(void* handle, MpiArrival* arrival, char* /*text*/, int /*size*/) {
  auto* const request = static_cast<Request*>(handle);
  const std::lock_guard lock(world.mutex);
  if (request->gone) return 0;
  if (!request->sends) {
    const auto found = std::find_if(world.messages.begin(), world.messages.end(), [&](const Message& one) {
      return one.to == request->at && one.channel == request->channel &&
             (request->from < 0 || one.from == request->from);
    });
    if (found == world.messages.end()) return 0;
    std::memcpy(request->data, found->bytes.data(), found->bytes.size());
    *arrival = {found->from, found->tag, std::ssize(found->bytes)};
    world.messages.erase(found);
  }
  world.open.erase(handle);
  delete request;
  return 1;
}

void leave() {
  const std::lock_guard lock(world.mutex);
  ++world.left;
}

const MpiApi in_memory{join, send, receive, test, leave};

// Whether a heartbeat of that rank has said that it is in this collective.
bool has_told(int rank, uint64_t number) {
  const std::lock_guard lock(world.mutex);
  return world.told[static_cast<size_t>(rank)] == number;
}

void mute(int rank) {
  const std::lock_guard lock(world.mutex);
  world.mute[static_cast<size_t>(rank)] = true;
}

// Receives of a rank into memory of its calls.
std::vector<Request*> open_receives(int rank) {
  std::vector<Request*> out;
  for (void* const one : world.open) {
    auto* const request = static_cast<Request*>(one);
    if (!request->sends && !request->gone && request->at == rank && request->channel == MpiChannel::kData)
      out.push_back(request);
  }
  return out;
}

// As the end of the rank's process.
void abandon(int rank) {
  const std::lock_guard lock(world.mutex);
  for (Request* const request : open_receives(rank)) request->gone = true, ++world.unfinished;
  ++world.abandoned;
}

// Each rank's error with its code; "" none. Whoever gives back memory of a call in which MPI may still write
// fails the test.
std::vector<std::string> with_links(int ranks, const std::function<void(MpiLink&, Group&)>& body,
                                    double silence = 20, double late = 3600,
                                    const std::function<bool(int)>& ended = {}) {
  {
    const std::lock_guard lock(world.mutex);
    world.wanted = ranks;
    world.joined = world.left = world.abandoned = world.unfinished = 0;
    world.messages.clear();
    world.mute.assign(static_cast<size_t>(ranks), false);
    world.ends.assign(static_cast<size_t>(ranks), 0);
    world.told.assign(static_cast<size_t>(ranks), 0);
  }
  std::vector<std::string> out(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int i = 0; i < ranks; ++i) {
    threads.emplace_back([&] {
      std::atomic<int> rank = -1;
      std::string failure;
      {
        LinkSetup setup{.api = in_memory, .silence = silence, .late = late, .host = "node"};
        if (ended) setup.ended = [&] { return rank >= 0 && ended(rank); };
        setup.abandon = [&](const Error& error) {
          abandon(rank);
          throw Error(error);  // a process would have ended
        };
        MpiLink link(setup);
        rank = link.rank();
        try {
          MpiGroup group(link);
          body(link, group);
        } catch (const Error& error) {
          const std::lock_guard lock(world.mutex);
          EXPECT_TRUE(open_receives(rank).empty()) << "rank " << rank << ": memory was given back";
          failure = std::to_string(static_cast<int>(error.code())) + " " + error.what();
        }
      }
      out[static_cast<size_t>(rank)] = failure;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return out;
}

bool says(const std::string& error, const std::string& text) {
  return error.find(text) != std::string::npos;
}

TEST(MpiLink, LeavesInOrderWithAllOthers) {
  for (const std::string& one : with_links(3, [](MpiLink&link, Group&group) {
         for (int i = 0; i < 100; ++i) group.barrier("barrier");
         link.leave();
       }))
    EXPECT_EQ(one, "");
  EXPECT_EQ(world.left, 3);
}

TEST(MpiLink, ASilentRankIsGivenUpByItsNeighbourWhoTellsTheOthers) {
  const std::vector<std::string> out = with_links(
      4,
      [](MpiLink& link, Group& group) {
        group.barrier("first");
        if (link.rank() == 1) {
          while (!has_told(1, 1)) std::this_thread::yield();
          mute(1);
        }
        group.barrier("second");
      },
      1.0);
  EXPECT_TRUE(says(out[2], "41 no heartbeat from rank 1 on node for")) << out[2];
  EXPECT_TRUE(says(out[2], "it was last in \"first\" (collective 1)")) << out[2];
  EXPECT_TRUE(says(out[2], ", in \"second\" (collective 2)")) << out[2];
  for (int rank : {0, 3})  // rank 1 itself has heard all the others
    EXPECT_TRUE(says(out[static_cast<size_t>(rank)],
                     "41 rank 2 on node has ended the run: no heartbeat from rank 1 on node"))
        << rank << ": " << out[static_cast<size_t>(rank)];
}

TEST(MpiLink, ARankThatWorksForLongIsWaitedFor) {
  for (const std::string& one : with_links(
           2,
           [](MpiLink&link, Group&group) {
             if (link.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(3000));
             group.barrier("after long work");
             link.leave();
           },
           1.5))
    EXPECT_EQ(one, "");
}

TEST(MpiLink, ARankThatLivesAndNeverComesIsNamed) {
  const std::vector<std::string> out = with_links(
      3,
      [](MpiLink& link, Group& group) {
        if (link.rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(2500));
        group.barrier("evaluation");
      },
      0.5, 1.0);
  EXPECT_TRUE(says(out[0], "rank 2 did not enter \"evaluation\" (collective 1) within ") ||
              says(out[1], "rank 2 did not enter \"evaluation\" (collective 1) within "))
      << out[0] << "\n"
      << out[1];
  for (const std::string& one : out) EXPECT_TRUE(says(one, "41 ")) << one;
}

TEST(MpiLink, TheTimeInWhichAllWereStoppedIsNotWaited) {
  const Work ranks = [] {
    std::vector<std::string> errors;
    for (const std::string& one : with_links(
             2,
             [](MpiLink&link, Group&group) {
               if (link.rank() == 1) work_a_second();
               group.barrier("after a stop");
               link.leave();
             },
             3, 3))
      errors.push_back(one);
    return errors;
  };
  expect_go_on_after(std::chrono::seconds(4), {ranks});
}

TEST(MpiLink, WhoEndsWithAnErrorEndsAllWithItsCode) {
  std::atomic<int> past_start = 0;  // an end seen inside "start" would name that
  const std::vector<std::string> out = with_links(3, [&](MpiLink& link, Group& group) {
    group.barrier("start");
    ++past_start;
    if (link.rank() == 0) {
      while (past_start < 3) std::this_thread::yield();
      link.end(Exit::kNoSpace, "the disk is full at /swap");
      throw Error(Exit::kNoSpace, {.area = "X", .what = "mine", .place = "", .next = "", .kept = ""});
    }
    group.barrier("gradients of block 3");
  });
  EXPECT_EQ(out[0], "20 mine");
  for (int rank : {1, 2}) {
    EXPECT_TRUE(says(out[static_cast<size_t>(rank)],
                     "20 rank 0 on node has ended the run: the disk is full at /swap"))
        << out[static_cast<size_t>(rank)];
    EXPECT_TRUE(says(out[static_cast<size_t>(rank)], "gradients of block 3"));
  }
}

// Each rank finds it for itself, rank 2 first and the leader last: the leader alone says it.
TEST(MpiLink, WhatAllEndWithTheLeaderSaysForAll) {
  std::array<std::atomic<bool>, 3> said = {false, false, false};
  const std::vector<std::string> out = with_links(3, [&](MpiLink& link, Group& group) {
    group.barrier("start");
    std::this_thread::sleep_for(std::chrono::milliseconds(100) * (2 - link.rank()));
    said[static_cast<size_t>(link.rank())] = link.end(Exit::kConfig, "too few sequences");
    throw Error(Exit::kConfig, {.area = "X", .what = "mine", .place = "", .next = "", .kept = ""});
  });
  EXPECT_FALSE(said[0]);
  EXPECT_TRUE(said[1]);
  EXPECT_TRUE(said[2]);
}

// The leader, in a call, hears why another rank has ended the run, and says it.
TEST(MpiLink, WhatTheLeaderHasPassedOnNeedNotBeSaidAgain) {
  bool said = false;
  std::string next;
  const std::vector<std::string> out = with_links(3, [&](MpiLink& link, Group& group) {
    group.barrier("start");
    if (link.rank() == 2) {
      said = link.end(Exit::kNoProgress, "stuck", "look at it");
      return;
    }
    try {
      group.barrier("weights");
    } catch (const Error& error) {
      if (link.rank() == 0)
        link.passed_on(error.code(), error.what(), error.text().next), next = error.text().next;
      throw;
    }
  });
  EXPECT_TRUE(says(out[0], "41 rank 2 on node has ended the run: stuck")) << out[0];
  EXPECT_EQ(next, "look at it");
  EXPECT_TRUE(said);
}

// Else a run that was stopped just as it ended says the same twice.
TEST(MpiLink, TheLeadersWordIsWaitedForWhileAllAreStopped) {
  expect_go_on_after(
      std::chrono::seconds(3), {[] {
        bool said = false;
        with_links(2, [&](MpiLink& link, Group& group) {
          group.barrier("start");
          if (link.rank() == 1) {
            std::this_thread::sleep_for(std::chrono::milliseconds(200));
            said = link.end(Exit::kNoProgress, "stuck");
            return;
          }
          try {
            group.barrier("weights");
          } catch (const Error& error) {
            for (int i = 0; i < 4; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(100));
            link.passed_on(error.code(), error.what(), error.text().next);
          }
        });
        return std::vector<std::string>{said ? "" : "rank 1 did not hear that the leader had said it"};
      }});
}

// As after a vote, of which rank 0 knows who has failed, and not why. Rank 1 says it on rank 0's word that it
// ends, and not when it has waited in vain: mpirun, a second after rank 0 has ended, kills who is left.
TEST(MpiLink, WhatTheLeaderHasNotSaidIsLeftToWhoKnows) {
  bool said = true;
  int words = 0;  // of the leader, when rank 1 goes on
  with_links(2, [&](MpiLink& link, Group& group) {
    group.barrier("start");
    if (link.rank() == 1) {
      said = link.end(Exit::kIo, "the log cannot be written");
      const std::lock_guard lock(world.mutex);
      words = world.ends[0];
      return;
    }
    try {
      group.barrier("weights");
    } catch (const Error&) {
      link.passed_on(Exit::kIo, "rank 1 has failed", "see that rank's message");
    }
  });
  EXPECT_FALSE(said);
  EXPECT_GT(words, 0);
}

TEST(MpiLink, ASilentRankIsNamedOnceWhereTheLeaderPassesItOn) {
  bool said = false;
  const std::vector<std::string> out = with_links(
      4,
      [&](MpiLink& link, Group& group) {
        group.barrier("first");
        if (link.rank() == 1) mute(1);
        try {
          group.barrier("second");
        } catch (const Error& error) {
          if (link.rank() == 0) link.passed_on(error.code(), error.what(), error.text().next);
          if (link.rank() == 2) said = link.end(error.code(), error.what());
          throw;
        }
      },
      1.0);
  EXPECT_TRUE(says(out[2], "41 no heartbeat from rank 1 on node for")) << out[2];
  EXPECT_TRUE(said);
}

// A call in two levels: who has finished both may end before another begins the second.
TEST(MpiLink, ACallInTwoLevelsIsFinishedWhenAnotherRankEnds) {
  const std::vector<std::string> out = with_links(2, [](MpiLink& link, Group& group) {
    group.barrier("start");
    std::byte first{}, second{};
    const bool sends = link.rank() == 1;
    const auto move = [&](std::byte& byte, bool continues) {
      const Transfer one{
          .to = sends ? nullptr : &byte, .from = sends ? &byte : nullptr, .bytes = 1, .peer = sends ? 0 : 1};
      link.move("votes", std::span(&one, 1), continues);
    };
    if (sends) first = second = std::byte{7};
    move(first, true);
    if (!sends) std::this_thread::sleep_for(std::chrono::milliseconds(30));  // told of the end meanwhile
    move(second, false);
    EXPECT_EQ(first, std::byte{7});
    EXPECT_EQ(second, std::byte{7});
    if (sends) link.end(Exit::kConfig, "too few sequences");
  });
  EXPECT_EQ(out[0], "");
}

TEST(MpiLink, WhatACliHasSeenEndsARankThatWaits) {
  const std::vector<std::string> out = with_links(
      2,
      [](MpiLink& link, Group& group) {
        if (link.rank() == 0) group.barrier("weights");
      },
      20, 3600, [](int rank) { return rank == 0; });
  EXPECT_TRUE(says(out[0], "40 another rank has ended during \"weights\"")) << out[0];
}

// A message that comes late would be written into memory that is another's by then.
TEST(MpiLink, MemoryOfACallThatFailedIsNotGivenBack) {
  const std::vector<std::string> out = with_links(
      2,
      [](MpiLink& link, Group& group) {
        group.barrier("first");
        if (link.rank() == 1) {
          mute(1);
          return;
        }
        std::byte late{};
        const Transfer one{.to = &late, .bytes = 1, .peer = 1};
        link.move("late", std::span(&one, 1));
      },
      1.0);
  EXPECT_TRUE(says(out[0], "41 no heartbeat from rank 1 on node for")) << out[0];
  EXPECT_EQ(world.abandoned, 1);
  EXPECT_EQ(world.unfinished, 1);
}

// Nothing of it is on its way: the error can be thrown.
TEST(MpiLink, ACallThatIsMadeAfterTheEndIsNotBegun) {
  const std::vector<std::string> out = with_links(2, [](MpiLink& link, Group& group) {
    group.barrier("first");
    if (link.rank() == 1) {
      link.end(Exit::kNoSpace, "the disk is full at /swap");
      return;
    }
    while (!link.lost()) std::this_thread::yield();
    group.barrier("second");
  });
  EXPECT_TRUE(says(out[0], "20 rank 1 on node has ended the run: the disk is full at /swap")) << out[0];
  EXPECT_EQ(world.abandoned, 0);
}

TEST(MpiLink, RanksThatComeForDifferentThingsNotice) {
  const std::vector<std::string> out = with_links(2, [](MpiLink& link, Group& group) {
    group.barrier(link.rank() == 0 ? "gather of weights" : "evaluation");
  });
  EXPECT_TRUE(says(out[0], "collective mismatch: rank 1 is not in ") ||
              says(out[1], "collective mismatch: rank 0 is not in "));
  for (const std::string& one : out) EXPECT_TRUE(says(one, "70 ")) << one;
}

TEST(MpiLink, AJobThatIsNotCompleteEnds) {
  world.wanted = 2;
  world.joined = world.left = 0;
  world.mute.assign(2, false);
  world.ends.assign(2, 0);
  try {
    MpiLink link({.api = in_memory, .silence = 0.5, .host = "node"});
    ADD_FAILURE() << "came through";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kNoProgress);
  }
  {  // its thread must not outlive what it uses
    const std::lock_guard lock(world.mutex);
    world.joined = 2;
  }
  world.come.notify_all();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
}

}  // namespace
}  // namespace lm
