// Runs a grid: each thread of a block is a fiber of this host thread; a fiber gives way at barriers and warp
// calls only. Compiled WITHOUT sanitizers: it tells them of its stack switches through weak symbols, so that
// ASan, UBSan and TSan (which then sees every CUDA thread as a thread: races between barriers, and between
// blocks of kernels that have no barrier) work inside kernels.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_runtime.h"

extern "C" {
#define EMU_WEAK __attribute__((weak))
EMU_WEAK void __sanitizer_start_switch_fiber(void** save, const void* bottom, size_t size);
EMU_WEAK void __sanitizer_finish_switch_fiber(void* saved, const void** bottom, size_t* size);
EMU_WEAK void __asan_unpoison_memory_region(void const volatile*, size_t);
EMU_WEAK void* __tsan_get_current_fiber();
EMU_WEAK void* __tsan_create_fiber(unsigned flags);
EMU_WEAK void __tsan_destroy_fiber(void*);
EMU_WEAK void __tsan_switch_to_fiber(void* fiber, unsigned flags);
EMU_WEAK void __tsan_acquire(void*);
EMU_WEAK void __tsan_release(void*);
EMU_WEAK extern char __start_emu_shared[], __stop_emu_shared[];
// Saves the callee-saved registers and the stack pointer, and goes on where `to` was saved.
void emu_switch(void** from, void* to);
}
asm(R"(
.text
.type emu_switch,@function
emu_switch:
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

namespace emu {
namespace {

constexpr size_t kStack = 128 << 10;  // ASan's frames are large
constexpr int kMostThreads = 1024;

enum class State { kReady, kBarrier, kWarp, kDone };

struct Thread {
  State state = State::kDone;
  uint3 index{};
  const char* file = "";  // of the barrier or warp call it waits at
  int line = 0;
  Warp what{};
  uint32_t mask = 0;
  uint64_t value = 0, result = 0;
  int parameter = 0, width = 32;
};

struct Fiber {
  char* stack = nullptr;
  void* sp = nullptr;
  void* asan = nullptr;
  void* tsan = nullptr;
  Thread* thread = nullptr;
};

void acquire(void* at) {
  if (__tsan_acquire) __tsan_acquire(at);
}
void release(void* at) {
  if (__tsan_release) __tsan_release(at);
}

std::string text(uint3 i) {
  return "(" + std::to_string(i.x) + "," + std::to_string(i.y) + "," + std::to_string(i.z) + ")";
}

// The one grid that runs. (Callers hold the runtime's lock.)
struct Machine {
  std::vector<Fiber> fibers;
  std::vector<Thread> threads;
  Fiber* current = nullptr;
  void* host_sp = nullptr;
  void* host_asan = nullptr;
  void* host_tsan = nullptr;
  const void* host_bottom = nullptr;
  size_t host_size = 0;
  const std::function<void()>* body = nullptr;
  const char* kernel = "";
  uint3 block{};
  dim3 block_dim, grid_dim;
  std::string failure;
  int64_t barrier_number = 0;
  bool had_barrier = false;
  char start = 0, end = 0, barrier[2] = {};  // addresses that TSan's edges go through
} m;

void to_host(bool last = false) {
  Fiber& fiber = *m.current;
  if (__sanitizer_start_switch_fiber)
    __sanitizer_start_switch_fiber(last ? nullptr : &fiber.asan, m.host_bottom, m.host_size);
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(m.host_tsan, 1);
  emu_switch(&fiber.sp, m.host_sp);
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(fiber.asan, nullptr, nullptr);
}

void fiber_main() {
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(nullptr, &m.host_bottom, &m.host_size);
  for (;;) {
    acquire(&m.start);
    (*m.body)();
    release(&m.end);
    m.current->thread->state = State::kDone;
    to_host();
  }
}

void start_fiber(Fiber& fiber) {
  if (fiber.stack == nullptr) {
    void* memory = mmap(nullptr, kStack + 4096, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mprotect(memory, 4096, PROT_NONE);  // a stack that runs over faults
    fiber.stack = static_cast<char*>(memory) + 4096;
  }
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(fiber.stack, kStack);
  void** top =
      reinterpret_cast<void**>(fiber.stack + kStack) - 1;  // as after a call: 8 beyond a multiple of 16
  *--top = reinterpret_cast<void*>(fiber_main);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.sp = top;
  if (__tsan_create_fiber && fiber.tsan == nullptr) fiber.tsan = __tsan_create_fiber(0);
}

void to_fiber(Fiber& fiber) {
  m.current = &fiber;
  if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&m.host_asan, fiber.stack, kStack);
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(fiber.tsan, 1);
  emu_switch(&m.host_sp, fiber.sp);
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(m.host_asan, nullptr, nullptr);
}

void wait_as(State state, const char* file, int line) {
  Thread& t = *m.current->thread;
  t.state = state, t.file = file, t.line = line;
  to_host();
}

void fail(const std::string& what) {
  if (m.failure.empty()) m.failure = what;
}

// Completes the warp calls whose lanes have all arrived. Lanes that are done must not be named by a mask:
// reading them is undefined, and a kernel that relies on less is fragile.
bool finish_warp_calls() {
  bool any = false;
  for (size_t first = 0; first < m.threads.size(); first += 32) {
    const size_t lanes = std::min<size_t>(32, m.threads.size() - first);
    Thread* lane = &m.threads[first];
    for (size_t l = 0; l < lanes; ++l) {
      if (lane[l].state != State::kWarp) continue;
      const uint32_t mask = lane[l].mask;
      bool all = true;
      if (!(mask >> l & 1)) fail("a lane calls with a mask that does not name it");
      for (size_t o = 0; o < 32; ++o) {
        if (!(mask >> o & 1)) continue;
        if (o >= lanes || lane[o].state == State::kDone) {
          fail("the mask of a warp call names lane " + std::to_string(o) + ", which has exited");
        } else if (lane[o].state != State::kWarp) {
          all = false;
        } else if (lane[o].mask != mask || lane[o].what != lane[l].what || lane[o].line != lane[l].line) {
          fail("lanes of one warp wait at different warp calls");
        }
      }
      if (!m.failure.empty()) {
        m.failure += " (" + std::string(lane[l].file) + ":" + std::to_string(lane[l].line) + ", thread " +
                     text(lane[l].index) + ")";
        return false;
      }
      if (!all) continue;
      uint64_t ballot = 0;
      for (size_t o = 0; o < lanes; ++o) {
        if (mask >> o & 1 && lane[o].value != 0) ballot |= uint64_t{1} << o;
      }
      for (int o = 0; o < static_cast<int>(lanes); ++o) {
        if (!(mask >> o & 1)) continue;
        Thread& t = lane[o];
        const int begin = o / t.width * t.width, end = begin + t.width;
        int from = o;
        if (t.what == Warp::kIndex) from = begin + t.parameter % t.width;
        if (t.what == Warp::kXor) from = (o ^ t.parameter) < end ? o ^ t.parameter : o;
        if (t.what == Warp::kUp) from = o - t.parameter >= begin ? o - t.parameter : o;
        if (t.what == Warp::kDown) from = o + t.parameter < end ? o + t.parameter : o;
        if (!(mask >> from & 1))
          fail("a shuffle reads lane " + std::to_string(from) + ", which is not in its mask");
        t.result = t.what == Warp::kBallot ? ballot : lane[from].value;
      }
      for (size_t o = 0; o < lanes; ++o) {
        if (mask >> o & 1) lane[o].state = State::kReady;
      }
      any = true;
    }
  }
  return any;
}

// Lets everybody pass the barrier when all threads of the block are there.
bool finish_barrier() {
  const Thread* first = nullptr;
  const Thread* other = nullptr;
  size_t there = 0;
  for (const Thread& t : m.threads) {
    if (t.state != State::kBarrier) {
      other = &t;
      continue;
    }
    if (first == nullptr) first = &t;
    if (t.line != first->line) fail("threads of one block wait at different barriers");
    ++there;
  }
  if (there == 0) return false;
  const std::string at = std::string(first->file) + ":" + std::to_string(first->line);
  if (there < m.threads.size()) {
    fail("barrier " + at + ": thread " + text(first->index) + " waits and thread " + text(other->index) +
         (other->state == State::kDone ? " has exited"
                                       : " waits at a warp call, line " + std::to_string(other->line)));
  }
  ++m.barrier_number;
  m.had_barrier = true;
  ++counts().barriers;
  for (Thread& t : m.threads) t.state = State::kReady;
  return true;
}

void run_block(std::vector<int>& order, std::mt19937& random, int64_t number) {
  const size_t n = m.threads.size();
  for (volatile char* p = __start_emu_shared; p != __stop_emu_shared; ++p)
    *p = static_cast<char>(settings().garbage);
  for (size_t t = 0; t < n; ++t) {
    const auto i = static_cast<unsigned>(t);
    m.threads[t] = {};
    m.threads[t].state = State::kReady;
    m.threads[t].index = {i % m.block_dim.x, i / m.block_dim.x % m.block_dim.y,
                          i / m.block_dim.x / m.block_dim.y};
    // Another fiber for each block, so that TSan does not take equal thread indices for one thread.
    m.fibers[(t + static_cast<size_t>(number) * 37) % n].thread = &m.threads[t];
  }
  m.had_barrier = false;
  for (size_t done = 0; done < n;) {
    if (settings().order == Order::kRandom) std::shuffle(order.begin(), order.end(), random);
    done = 0;
    bool ran = false;
    for (int f : order) {
      Fiber& fiber = m.fibers[static_cast<size_t>(f)];
      if (fiber.thread->state == State::kReady) to_fiber(fiber), ran = true;
      if (fiber.thread->state == State::kDone) ++done;
    }
    if (!finish_warp_calls() && m.failure.empty() && !ran) finish_barrier();
    if (!m.failure.empty()) {
      const std::string what = m.failure + "\n  block " + text(m.block) + " of kernel " + m.kernel;
      for (Fiber& fiber : m.fibers) start_fiber(fiber);  // abandons what they were in
      m.failure.clear();
      throw std::runtime_error(what);
    }
  }
  if (m.had_barrier)
    acquire(&m.end), release(&m.start);  // shared memory is one copy: the next block comes after
}

}  // namespace

uint3 thread_index() {
  return m.current->thread->index;
}
uint3 block_index() {
  return m.block;
}
uint3 block_size() {
  return {m.block_dim.x, m.block_dim.y, m.block_dim.z};
}
uint3 grid_size() {
  return {m.grid_dim.x, m.grid_dim.y, m.grid_dim.z};
}

void sync_threads(const char* file, int line) {
  char* const at = &m.barrier[m.barrier_number % 2];
  release(at);
  wait_as(State::kBarrier, file, line);
  acquire(at);
}

uint64_t warp_call(Warp what, uint32_t mask, uint64_t value, int parameter, int width, const char* file,
                   int line) {
  Thread& t = *m.current->thread;
  t.what = what, t.mask = mask, t.value = value, t.parameter = parameter, t.width = width;
  ++counts().warp_calls;
  wait_as(State::kWarp, file, line);  // a shuffle orders no memory; __syncwarp would, and is not used here
  return m.current->thread->result;
}

Settings& settings() {
  static Settings s = [] {
    Settings r;
    const auto is = [](const char* name, const char* value) {
      const char* given = getenv(name);
      return given != nullptr && std::string(given) == value;
    };
    if (is("EMU_ORDER", "reverse")) r.order = Order::kReverse;
    if (is("EMU_ORDER", "random")) r.order = Order::kRandom;
    if (is("EMU_STREAMS", "lazy")) r.streams = Streams::kLazy;
    if (is("EMU_STREAMS", "random")) r.streams = Streams::kRandom;
    r.pageable_async = is("EMU_PAGEABLE", "async");
    if (const char* seed = getenv("EMU_SEED")) r.seed = static_cast<uint32_t>(atoi(seed));
    return r;
  }();
  return s;
}
Counts& counts() {
  static Counts c;
  return c;
}

void run_grid(const char* kernel, dim3 grid, dim3 block, const std::function<void()>& thread) {
  const size_t n = static_cast<size_t>(block.x) * block.y * block.z;
  m.kernel = kernel, m.grid_dim = grid, m.block_dim = block, m.body = &thread;
  m.threads.resize(n);
  // A fiber's count is the block's: TSan holds state for each, so they are kept.
  static std::vector<Fiber> pool;
  while (pool.size() < n) start_fiber(pool.emplace_back());
  m.fibers.assign(pool.begin(), pool.begin() + static_cast<std::ptrdiff_t>(n));
  if (__tsan_get_current_fiber) m.host_tsan = __tsan_get_current_fiber();
  release(&m.start);
  std::mt19937 random(settings().seed);
  std::vector<int> order(n);
  for (size_t i = 0; i < n; ++i)
    order[i] = static_cast<int>(settings().order == Order::kReverse ? n - 1 - i : i);
  const int64_t blocks = int64_t{grid.x} * grid.y * grid.z;
  std::vector<int64_t> block_order(settings().order == Order::kRandom ? static_cast<size_t>(blocks) : 0);
  for (size_t i = 0; i < block_order.size(); ++i) block_order[i] = static_cast<int64_t>(i);
  std::shuffle(block_order.begin(), block_order.end(), random);
  try {
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t b = settings().order == Order::kForward   ? i
                        : settings().order == Order::kReverse ? blocks - 1 - i
                                                              : block_order[static_cast<size_t>(i)];
      m.block = {static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y),
                 static_cast<unsigned>(b / grid.x / grid.y)};
      run_block(order, random, i);
    }
  } catch (...) {
    acquire(&m.end);
    std::copy(m.fibers.begin(), m.fibers.end(), pool.begin());
    throw;
  }
  acquire(&m.end);
  std::copy(m.fibers.begin(), m.fibers.end(), pool.begin());
  ++counts().launches, counts().blocks += blocks, counts().threads += blocks * static_cast<int64_t>(n);
}

}  // namespace emu
