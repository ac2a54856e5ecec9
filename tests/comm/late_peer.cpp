// A message that comes when the call that waited for it has been given up, over Open MPI and under the
// address sanitizer, which knows what Open MPI writes by its own replacements of memcpy and readv. Under
// `mpirun -n 3`:
//
// `late_peer keep`: the call ends its process, as lmlaunch does, and the message comes into memory that is
// there. `late_peer give` is the mistake that is to be seen: the error is thrown, and unwinding gives the
// memory back.
//
// Rank 2 is a link that waits for rank 1 and gives it up; rank 1 sends what it owed when it is told to, after
// that. Rank 0 would have to speak for all, and says nothing.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/process.h"
#include "comm/mpi_link.h"
#include "comm/mpi_worker.h"

namespace lm {
namespace {

constexpr size_t kBytes = 1024;
constexpr char kLate = 'L';
char text[512];

void wait_for(const MpiApi& api, void* request) {
  MpiArrival arrival;
  while (api.test(request, &arrival, text, sizeof text) == 0) std::this_thread::yield();
}

// What it owes, once it is told to, and that it has sent it: the link's thread still takes one such notice.
void be_late(const MpiApi& api) {
  char go = 0;
  wait_for(api, api.receive(&go, sizeof go, 2, MpiChannel::kData, text, sizeof text));
  const std::vector<char> bytes(kBytes, kLate);
  const MpiAddress data{.to = 2}, notices{.to = 2, .channel = MpiChannel::kNotices};
  wait_for(api, api.send(bytes.data(), kBytes, &data, text, sizeof text));
  const Notice notice;
  for (int i = 0; i < 2; ++i) wait_for(api, api.send(&notice, sizeof notice, &notices, text, sizeof text));
}

void receive(MpiLink& link, std::byte* to) {
  const Transfer one{.to = to, .bytes = kBytes, .peer = 1};
  link.move("late", std::span(&one, 1));
}

// The call has failed, and memory is given back or not: the link's thread ends, and then the message comes,
// in calls of MPI that this one makes.
void let_it_come(MpiLink& link, const MpiApi& api) {
  link.end(Exit::kNoProgress, "given up");
  const char go = 1;
  const MpiAddress peer{.to = 1};
  wait_for(api, api.send(&go, sizeof go, &peer, text, sizeof text));
  Notice notice;
  wait_for(api, api.receive(&notice, sizeof notice, 1, MpiChannel::kNotices, text, sizeof text));
}

void give_up_on_it(const MpiApi& api, bool keep) {
  auto memory = std::make_unique<std::vector<std::byte>>(kBytes);
  MpiLink* made = nullptr;
  LinkSetup setup{.api = api, .late = 1, .host = "here"};
  if (keep) {
    setup.abandon = [&](const Error&) {
      let_it_come(*made, api);
      if (memory->front() == std::byte{kLate})
        std::puts("the late message has come into memory that is there");
      std::fflush(stdout);
      _exit(0);
    };
  }
  MpiLink link(setup);
  made = &link;
  try {
    receive(link, memory->data());
  } catch (const Error&) {
    memory.reset();
    let_it_come(link, api);
  }
}

}  // namespace
}  // namespace lm

int main(int argc, char** argv) {
  const lm::MpiApi& api = lm::load_mpi(lm::beside_this_program("lmlaunch-mpi.so"));
  const std::string place = std::getenv("OMPI_COMM_WORLD_RANK");
  if (place == "2") {
    lm::give_up_on_it(api, argc > 1 && std::strcmp(argv[1], "keep") == 0);
  } else {
    int rank = 0, ranks = 0;
    api.join(&rank, &ranks, lm::text, sizeof lm::text);
    if (rank == 1) lm::be_late(api);
    while (getppid() > 1) pause();  // until mpirun ends it
  }
  _exit(0);
}
