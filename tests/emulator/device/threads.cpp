// Runs a grid: a thread of a block that meets others (at a barrier or in a warp call) is a fiber of this host
// thread. A fiber gives way there only, and goes straight on to the next thread of its warp; one whose thread
// is done runs the next, so kernels without such meetings are plain calls on one stack.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <new>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "../emulator.h"
#include "grid.h"

extern "C" {
__attribute__((weak)) extern char __start_emulator_shared[], __stop_emulator_shared[];
// Saves the callee-saved registers and the stack pointer, and goes on where `to` was saved.
void emulator_switch(void** from, void* to);
}
asm(R"(
.text
.type emulator_switch,@function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace emulator::simt {
namespace {

constexpr size_t kStack = 64 << 10, kGuard = 4096, kWarp = 32;

struct Fiber {
  char* stack = nullptr;
  void* sp = nullptr;
};

enum class State : uint8_t { kReady, kBarrier, kWarp, kDone };

struct Thread {
  State state = State::kDone;
  Fiber* fiber = nullptr;  // null before it begins and after its end
  unsigned index[3] = {};
  // Where it waits, and what for.
  const char* file = "";
  int line = 0;
  Warp what{};
  uint32_t mask = 0;
  uint64_t value = 0, result = 0;
  int parameter = 0, width = 32;
};

// The one grid that runs.
struct Machine {
  const char* kernel = "";
  const std::function<void()>* body = nullptr;
  unsigned block[3] = {}, block_size[3] = {}, grid_size[3] = {};
  std::vector<Thread> threads;   // of the block
  std::vector<unsigned> warps;   // in the order in which they run
  std::vector<unsigned> lanes;   // of every warp, likewise
  size_t position = 0, end = 0;  // in `lanes`: what is left of the pass over one warp
  std::vector<Fiber*> free;
  Thread* current = nullptr;
  void* host_sp = nullptr;
  std::string failure;
} m;

std::string text(const unsigned (&i)[3]) {
  return "(" + std::to_string(i[0]) + "," + std::to_string(i[1]) + "," + std::to_string(i[2]) + ")";
}
std::string text(const Thread& waiting) {
  return waiting.file + (":" + std::to_string(waiting.line)) + ", thread " + text(waiting.index);
}

void fail(const std::string& what) {
  if (m.failure.empty()) m.failure = what;
}

// ---- fibers

void fiber_main();

void reset(Fiber& fiber) {
  // As after a call: 8 beyond a multiple of 16.
  void** top = reinterpret_cast<void**>(fiber.stack + kStack) - 1;
  *--top = reinterpret_cast<void*>(fiber_main);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.sp = top;
}

Fiber* take_fiber() {
  if (m.free.empty()) {
    void* memory = mmap(nullptr, kStack + kGuard, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mprotect(memory, kGuard, PROT_NONE);  // a stack that runs over faults
    auto* const fiber = new Fiber{.stack = static_cast<char*>(memory) + kGuard};
    reset(*fiber);
    return fiber;
  }
  Fiber* const fiber = m.free.back();
  m.free.pop_back();
  return fiber;
}

// The next thread of the pass that can run; null at its end.
Thread* next_thread() {
  while (m.position < m.end) {
    Thread& t = m.threads[m.lanes[m.position++]];
    if (t.state == State::kReady) return &t;
  }
  return nullptr;
}

// Goes on with a thread, or with the host, where null.
void go_on(void** leave, Thread* t) {
  m.current = t;
  if (t == nullptr) return emulator_switch(leave, m.host_sp);
  if (t->fiber == nullptr) t->fiber = take_fiber();
  emulator_switch(leave, t->fiber->sp);
}

void fiber_main() {
  for (;;) {
    (*m.body)();
    Fiber* const fiber = m.current->fiber;
    m.current->state = State::kDone;
    m.current->fiber = nullptr;
    Thread* const next = next_thread();
    if (next != nullptr && next->fiber == nullptr) {
      next->fiber = fiber;
      m.current = next;
      continue;
    }
    m.free.push_back(fiber);
    go_on(&fiber->sp, next);
  }
}

void wait_as(State state, const char* file, int line) {
  Thread& t = *m.current;
  t.state = state, t.file = file, t.line = line;
  go_on(&t.fiber->sp, next_thread());
}

// ---- meetings

// The lane from which lane `to` takes its result.
int source_of(const Thread& t, int to) {
  const int begin = to / t.width * t.width, end = begin + t.width, p = t.parameter;
  switch (t.what) {
    case Warp::kIndex:
      return begin + p % t.width;
    case Warp::kXor:
      return (to ^ p) < end ? to ^ p : to;
    case Warp::kUp:
      return to - p >= begin ? to - p : to;
    case Warp::kDown:
      return to + p < end ? to + p : to;
    default:
      return to;
  }
}

// Whether all lanes that `caller`'s mask names are there. Lanes that are done must not be named: reading them
// is undefined, and a kernel that relies on less is fragile.
bool all_called(const Thread* lane, size_t lanes, size_t caller) {
  const Thread& c = lane[caller];
  bool all = true;
  if (!(c.mask >> caller & 1)) fail("a lane calls with a mask that does not name it");
  for (size_t o = 0; o < kWarp; ++o) {
    if (!(c.mask >> o & 1)) continue;
    if (o >= lanes || lane[o].state == State::kDone) {
      fail("the mask of a warp call names lane " + std::to_string(o) + ", which has exited");
    } else if (lane[o].state != State::kWarp) {
      all = false;
    } else if (lane[o].mask != c.mask || lane[o].what != c.what || lane[o].line != c.line) {
      fail("lanes of one warp wait at different warp calls");
    }
  }
  if (!m.failure.empty()) m.failure += " (" + text(c) + ")";
  return all && m.failure.empty();
}

void complete(Thread* lane, uint32_t mask, size_t lanes) {
  uint64_t ballot = 0;
  for (size_t o = 0; o < lanes; ++o) {
    if (mask >> o & 1 && lane[o].value != 0) ballot |= uint64_t{1} << o;
  }
  for (size_t o = 0; o < lanes; ++o) {
    if (!(mask >> o & 1)) continue;
    const int from = source_of(lane[o], static_cast<int>(o));
    if (!(mask >> from & 1))
      fail("a shuffle reads lane " + std::to_string(from) + ", which is not in its mask");
    lane[o].result = lane[o].what == Warp::kBallot ? ballot : lane[from].value;
    lane[o].state = State::kReady;
  }
}

// Completes the warp calls whose lanes have all arrived; whether there were any.
bool finish_warp_calls(size_t warp) {
  bool any = false;
  const size_t first = warp * kWarp, lanes = std::min(kWarp, m.threads.size() - first);
  Thread* const lane = &m.threads[first];
  for (size_t l = 0; l < lanes && m.failure.empty(); ++l) {
    if (lane[l].state != State::kWarp || !all_called(lane, lanes, l)) continue;
    complete(lane, lane[l].mask, lanes);
    any = true;
  }
  return any;
}

// Lets everybody pass the barrier; all threads of the block must be there.
void finish_barrier() {
  const Thread* first = nullptr;
  const Thread* other = nullptr;
  for (const Thread& t : m.threads) {
    if (t.state != State::kBarrier) {
      other = &t;
      continue;
    }
    if (first == nullptr) first = &t;
    if (t.line != first->line) fail("threads of one block wait at different barriers");
  }
  if (first == nullptr) return fail("lanes of a warp call wait for each other: " + text(*other));
  if (other != nullptr) {
    fail("barrier " + text(*first) + ": waits, and thread " + text(other->index) +
         (other->state == State::kDone ? " has exited"
                                       : " waits at a warp call, line " + std::to_string(other->line)));
  }
  for (Thread& t : m.threads) t.state = State::kReady;
}

// ---- blocks

// Runs a warp until all its lanes are done or at a barrier; whether any lane ran.
bool run_warp(size_t warp) {
  bool any = false;
  do {
    m.position = warp * kWarp, m.end = std::min(m.position + kWarp, m.threads.size());
    Thread* const first = next_thread();
    if (first == nullptr) break;
    any = true;
    go_on(&m.host_sp, first);
  } while (m.failure.empty() && finish_warp_calls(warp));
  return any;
}

void run_block(std::minstd_rand& random) {
  if (__start_emulator_shared != nullptr) {
    memset(__start_emulator_shared, garbage(),
           static_cast<size_t>(__stop_emulator_shared - __start_emulator_shared));
  }
  if (settings().order == Order::kRandom) {
    std::shuffle(m.warps.begin(), m.warps.end(), random);
    for (size_t w = 0; w < m.threads.size(); w += kWarp) {
      const auto at = m.lanes.begin() + static_cast<std::ptrdiff_t>(w);
      std::shuffle(at, at + static_cast<std::ptrdiff_t>(std::min(kWarp, m.threads.size() - w)), random);
    }
  }
  for (Thread& t : m.threads) t.state = State::kReady;
  const auto all_done = [] {
    return std::all_of(m.threads.begin(), m.threads.end(),
                       [](const Thread& t) { return t.state == State::kDone; });
  };
  do {
    bool any = false;
    for (const unsigned w : m.warps) {
      if (m.failure.empty()) any = run_warp(w) || any;
    }
    if (m.failure.empty() && !any) finish_barrier();
    if (!m.failure.empty()) {
      const std::string what = m.failure + "\n  block " + text(m.block) + " of " + m.kernel;
      for (Thread& t : m.threads) {  // what they were in is abandoned
        if (t.fiber == nullptr) continue;
        reset(*t.fiber);
        m.free.push_back(t.fiber);
        t.fiber = nullptr;
      }
      m.failure.clear();
      throw std::runtime_error(what);
    }
  } while (!all_done());
}

void prepare(const char* kernel, dim3 grid, dim3 block, const std::function<void()>& thread) {
  m.kernel = kernel, m.body = &thread;
  const unsigned g[] = {grid.x, grid.y, grid.z}, b[] = {block.x, block.y, block.z};
  std::copy_n(g, 3, m.grid_size);
  std::copy_n(b, 3, m.block_size);
  m.threads.resize(size_t{block.x} * block.y * block.z);
  m.lanes.resize(m.threads.size());
  m.warps.resize((m.threads.size() + kWarp - 1) / kWarp);
  std::iota(m.lanes.begin(), m.lanes.end(), 0u);
  std::iota(m.warps.begin(), m.warps.end(), 0u);
  if (settings().order == Order::kReverse) {
    std::reverse(m.warps.begin(), m.warps.end());
    for (size_t w = 0; w < m.lanes.size(); w += kWarp) {
      std::reverse(&m.lanes[w], m.lanes.data() + std::min(w + kWarp, m.lanes.size()));
    }
  }
  for (unsigned t = 0; t < m.threads.size(); ++t) {
    const unsigned index[] = {t % b[0], t / b[0] % b[1], t / b[0] / b[1]};
    std::copy_n(index, 3, m.threads[t].index);
  }
}

}  // namespace

unsigned place(Place what, int axis) {
  switch (what) {
    case Place::kThread:
      return m.current->index[axis];
    case Place::kBlock:
      return m.block[axis];
    case Place::kBlockSize:
      return m.block_size[axis];
    default:
      return m.grid_size[axis];
  }
}

void sync_threads(const char* file, int line) {
  wait_as(State::kBarrier, file, line);
}

uint64_t warp_call(Warp what, uint32_t mask, uint64_t value, int parameter, int width, const char* file,
                   int line) {
  Thread& t = *m.current;
  t.what = what, t.mask = mask, t.value = value, t.parameter = parameter, t.width = width;
  wait_as(State::kWarp, file, line);
  return t.result;
}

void stop(const std::string& what) {
  fail("thread " + text(m.current->index) + " " + what);
  void* abandoned;
  emulator_switch(&abandoned, m.host_sp);
  std::abort();
}

Settings& settings() {
  static Settings s = [] {
    Settings r;
    const char* const given = getenv("EMULATOR_THREADS");
    const std::string order = given != nullptr ? given : "forward";
    if (order == "reverse") r.order = Order::kReverse;
    if (order.starts_with("random:")) {
      r.order = Order::kRandom, r.seed = static_cast<uint32_t>(atoi(order.c_str() + 7));
    }
    return r;
  }();
  return s;
}

void run_grid(const char* kernel, dim3 grid, dim3 block, const std::function<void()>& thread) {
  prepare(kernel, grid, block, thread);
  const Settings& s = settings();
  std::minstd_rand random(s.seed);
  const int64_t blocks = int64_t{grid.x} * grid.y * grid.z;
  std::vector<int64_t> shuffled(s.order == Order::kRandom ? static_cast<size_t>(blocks) : 0);
  std::iota(shuffled.begin(), shuffled.end(), int64_t{0});
  std::shuffle(shuffled.begin(), shuffled.end(), random);
  for (int64_t i = 0; i < blocks; ++i) {
    int64_t b = s.order == Order::kReverse ? blocks - 1 - i : i;
    if (s.order == Order::kRandom) b = shuffled[static_cast<size_t>(i)];
    m.block[0] = static_cast<unsigned>(b % grid.x);
    m.block[1] = static_cast<unsigned>(b / grid.x % grid.y);
    m.block[2] = static_cast<unsigned>(b / grid.x / grid.y);
    run_block(random);
  }
}

}  // namespace emulator::simt
