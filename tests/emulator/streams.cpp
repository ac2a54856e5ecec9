// Streams, points and waits of the stand-in runtime, and the state they hang on.
#include <execinfo.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>

#include "state.h"

namespace emulator {

thread_local cudaError_t last_error = cudaSuccess;
thread_local int device = 0;
thread_local bool issues = false;

namespace {

thread_local const Operation* running = nullptr;
thread_local Stream* running_in = nullptr;
thread_local int64_t moved_bytes = 0, host_bytes = 0;  // by it; of them, in host memory

const char* environment(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != 0 ? value : otherwise;
}
bool on(const char* name, const char* otherwise) {
  return std::atoi(environment(name, otherwise)) != 0;
}

int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

[[noreturn]] void on_fault(int, siginfo_t* info, void*) {
  char text[200];
  const int n = std::snprintf(
      text, sizeof text, "\ntwin: %s dereferenced %s %p\n", running ? running->what.c_str() : "the HOST",
      is_device_address(info->si_addr) ? "the DEVICE address" : "the address", info->si_addr);
  [[maybe_unused]] const ssize_t written = write(2, text, static_cast<size_t>(n));
  void* frames[40];
  backtrace_symbols_fd(frames, backtrace(frames, 40), 2);
  signal(SIGSEGV, SIG_DFL);
  raise(SIGSEGV);
  _exit(139);
}

bool never_ends(const Stream& s, const Operation& op) {
  const Settings& settings = state().settings;
  const bool kernel = op.kind == Kind::kKernel || op.kind == Kind::kAten || op.kind == Kind::kGemm;
  return kernel && settings.hanging >= 0 && cuda_order()[static_cast<size_t>(s.device)] == settings.hanging &&
         access(settings.hang_file.c_str(), F_OK) == 0;
}

void run(Stream* s, const Operation& op) {
  while (never_ends(*s, op)) usleep(1000);
  running = &op;
  moved_bytes = host_bytes = 0;
  State& st = state();
  if (st.settings.trace) std::fprintf(stderr, "emulator: stream %zu runs %s\n", s->number, op.what.c_str());
  if (!op.accesses.empty() && st.settings.races > 0) check_order(op, *s);
  try {
    // After a fault nothing runs any more, but what waits must still be woken.
    if (st.sticky == 0 || op.kind == Kind::kOrder) op.work();
  } catch (const std::exception& e) {
    fault(op.what + ": " + e.what());
  }
  running = nullptr;
  if (moved_bytes > 0) count_moved(op, moved_bytes, host_bytes);
}

void run_stream(Stream* s) {
  const Settings& settings = state().settings;
  running_in = s;
  for (;;) {
    std::unique_lock lock(s->mutex);
    s->changed.wait(lock, [&] {
      return s->closing ||
             (!s->queue.empty() && (!settings.lazy || s->wanted >= s->queue.front().clock[s->number]));
    });
    if (s->queue.empty()) {
      s->ended = true;
      return s->changed.notify_all();
    }
    const Operation op = std::move(s->queue.front());
    s->queue.pop_front();
    lock.unlock();
    if (settings.delay_us > 0 && s->random() % 4 == 0) usleep(s->random() % settings.delay_us);
    run(s, op);
  }
}

// `point`: where the operation stands.
void push(Stream* s, Operation op, Point* point = nullptr) {
  State& st = state();
  issues = true;
  // One lock for both: the queue's order is the clock's.
  const std::lock_guard lock(st.mutex);
  join(s->clock, st.host);
  if (s->clock.size() <= s->number) s->clock.resize(s->number + 1);
  ++s->clock[s->number];
  op.clock = s->clock;
  if (point != nullptr) point->clock = op.clock, point->number = op.clock[s->number];
  if (st.settings.races > 0) {
    s->names.resize(op.clock[s->number]);
    s->names.push_back(op.what);
  }
  const std::lock_guard inner(s->mutex);
  s->queue.push_back(std::move(op));
  s->changed.notify_one();
}

}  // namespace

void join(Clock& a, const Clock& b) {
  if (a.size() < b.size()) a.resize(b.size());
  for (size_t i = 0; i < b.size(); ++i) a[i] = std::max(a[i], b[i]);
}

Settings::Settings()
    : trace(on("EMULATOR_TRACE", "0")),
      pin(!on("EMULATOR_NO_PIN", "0")),
      read_only(!on("EMULATOR_NO_READ_ONLY", "0")),
      lazy(on("EMULATOR_LAZY", "0")),
      poison(on("EMULATOR_POISON", "1")),
      pageable_waits(std::string(environment("EMULATOR_PAGEABLE", "late")) == "waits"),
      races(std::atoi(environment("EMULATOR_RACES", "0"))),
      peak_dir(environment("EMULATOR_PEAK", "")) {
  const std::vector<Card> all = emulator::cards();
  for (const int card : cuda_order()) cards.push_back(all[static_cast<size_t>(card)]);
  std::sscanf(environment("EMULATOR_DELAY", "0:0"), "%u:%u", &seed, &delay_us);
  const std::string hang = environment("EMULATOR_HANG", "");
  if (const size_t colon = hang.find(':'); colon != std::string::npos)
    hanging = std::atoi(hang.c_str()), hang_file = hang.substr(colon + 1);
}

State::State()
    : garbage(static_cast<int>(std::strtol(environment("EMULATOR_GARBAGE", "255"), nullptr, 0))),
      // EMULATOR_TAKEN=GIB: of each card, by another program, after NVML was asked.
      used(settings.cards.size(),
           static_cast<int64_t>(std::atof(environment("EMULATOR_TAKEN", "0")) * (int64_t{1} << 30))) {
  void* p = mmap(reinterpret_cast<void*>(kBase), kSpan + kAlias, PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  if (p == MAP_FAILED) std::fprintf(stderr, "emulator: no address space\n"), std::abort();
  struct sigaction action {};
  action.sa_sigaction = reinterpret_cast<void (*)(int, siginfo_t*, void*)>(on_fault);
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
}

State& state() {
  static std::atomic<State*> ready{nullptr};  // kernels ask often
  if (State* const r = ready.load(std::memory_order_acquire)) return *r;
  static State* const s = new State;
  static std::once_flag streams;
  static thread_local bool inside = false;  // make_stream asks for the state, too
  if (!inside) {
    inside = true;
    std::call_once(streams, [] {
      for (size_t d = 0; d < s->settings.cards.size(); ++d) make_stream(true, static_cast<int>(d));
      ready = s;
    });
    inside = false;
  }
  return *s;
}

cudaError_t failed(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}
cudaError_t ok() {
  return failed(static_cast<cudaError_t>(state().sticky.load()));
}
cudaError_t refused(cudaError_t error, const std::string& why) {
  std::fprintf(stderr, "emulator: %s\n", why.c_str());
  return failed(error);
}
void fault(const std::string& what) {
  std::fprintf(stderr, "emulator: FAULT: %s\n", what.c_str());
  state().sticky = cudaErrorIllegalAddress;
}
const char* current_operation() {
  return running ? running->what.c_str() : "";
}

void Point::reach() {
  const std::lock_guard lock(mutex);
  done = true;
  done_ns = now_ns();
  changed.notify_all();
}
bool Point::reached() {
  const std::lock_guard lock(mutex);
  return done;
}
void Point::wait() {
  stream->want(number);
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return done; });
}

void Stream::want(uint64_t upto) {
  const std::lock_guard lock(mutex);
  wanted = std::max(wanted, upto);
  changed.notify_one();
}

Stream* make_stream(bool blocking, int on_device) {
  State& st = state();
  auto* const s = new Stream;
  s->blocking = blocking;
  s->device = on_device;
  const std::lock_guard lock(st.mutex);
  s->number = st.streams.size();
  s->random.seed(st.settings.seed * 7919u + static_cast<unsigned>(s->number) + 1);
  st.streams.push_back(s);
  std::thread(run_stream, s).detach();
  return s;
}

Stream* find(cudaStream_t handle) {
  const bool null = reinterpret_cast<uintptr_t>(handle) <= 2;  // and the two names of it
  return null ? state().streams[static_cast<size_t>(device)] : reinterpret_cast<Stream*>(handle);
}

PointPtr mark(Stream* s) {
  auto point = std::make_shared<Point>();
  point->stream = s;
  push(s,
       {.kind = Kind::kOrder,
        .what = "record",
        .work = [point] { point->reach(); },
        .accesses = {},
        .clock = {}},
       point.get());
  return point;
}
void order_after(Stream* s, const PointPtr& point) {
  {
    const std::lock_guard lock(state().mutex);
    join(s->clock, point->clock);
  }
  push(s, {.kind = Kind::kOrder,
           .what = "wait",
           .work = [point] { point->wait(); },
           .accesses = {},
           .clock = {}});
}
void host_waited(const PointPtr& point) {
  const std::lock_guard lock(state().mutex);
  join(state().host, point->clock);
}
void host_wait(const PointPtr& point) {
  count_wait();
  point->wait();
  host_waited(point);
}

std::vector<Stream*> partners(Stream* s) {
  std::vector<Stream*> out;
  State& st = state();
  const std::lock_guard lock(st.mutex);
  const bool null = s->number < st.settings.cards.size();
  if (!null) {
    if (s->blocking) out.push_back(st.streams[static_cast<size_t>(s->device)]);
    return out;
  }
  for (Stream* other : st.streams) {
    if (other != s && other->blocking && other->device == s->device && !other->closing) out.push_back(other);
  }
  return out;
}

void submit(Stream* s, Operation op) {
  for (Stream* other : partners(s)) order_after(s, mark(other));
  count(op);
  push(s, std::move(op));
}

void synchronize_all() {
  std::vector<Stream*> all;
  {
    const std::lock_guard lock(state().mutex);
    all = state().streams;
  }
  for (Stream* s : all) {
    std::unique_lock lock(s->mutex);
    if (!s->closing) {
      lock.unlock();
      host_wait(mark(s));
      continue;
    }
    // What was queued before it was closed is still done.
    s->changed.wait(lock, [&] { return s->ended; });
    lock.unlock();
    const std::lock_guard guard(state().mutex);
    join(state().host, s->clock);
  }
}

bool any_busy() {
  const std::lock_guard lock(state().mutex);
  for (Stream* s : state().streams) {
    const std::lock_guard inner(s->mutex);
    if (!s->queue.empty()) return true;
  }
  return false;
}

void enqueue(void* stream, Kind kind, std::string what, std::function<void()> work,
             std::vector<Access> accesses) {
  submit(find(static_cast<cudaStream_t>(stream)), {.kind = kind,
                                                   .what = std::move(what),
                                                   .work = std::move(work),
                                                   .accesses = std::move(accesses),
                                                   .clock = {}});
}

bool checks_order() {
  return state().settings.races > 0;
}

void touched(const void* place, int64_t bytes, bool write) {
  if (running == nullptr || !checks_order()) return;
  auto a = reinterpret_cast<uintptr_t>(place);
  if (a - (kBase + kAlias) < kSpan) a -= kAlias;
  check_order(a, bytes, write, *running, *running_in);
}

void moved(int64_t bytes, int64_t of_host) {
  moved_bytes += bytes;
  host_bytes += of_host;
}

int garbage() {
  return state().garbage;
}
void set_garbage(int byte) {
  state().garbage = byte;
}

}  // namespace emulator
