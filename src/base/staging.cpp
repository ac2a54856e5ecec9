#include "base/staging.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace lm {

RegisteredMemory::RegisteredMemory(DeviceType device, int64_t bytes) : memory_(DeviceType::kCpu, bytes) {
  if (device == DeviceType::kCuda && bytes > 0)
    registered_ = cuda_register_host(memory_.data(), bytes, &refusal_);
}

RegisteredMemory::~RegisteredMemory() {
  if (registered_) cuda_unregister_host(memory_.data());
}

RegisteredMemory::RegisteredMemory(RegisteredMemory&& other) noexcept
    : memory_(std::move(other.memory_)),
      registered_(std::exchange(other.registered_, false)),
      refusal_(std::move(other.refusal_)) {}

RegisteredMemory& RegisteredMemory::operator=(RegisteredMemory&& other) noexcept {
  if (this == &other) return *this;
  if (registered_) cuda_unregister_host(memory_.data());
  memory_ = std::move(other.memory_);
  registered_ = std::exchange(other.registered_, false);
  refusal_ = std::move(other.refusal_);
  return *this;
}

void warn_not_registered(const std::string& what, int64_t bytes, const std::string& refusal) {
  rlimit limit{};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  const bool unlimited = limit.rlim_cur == RLIM_INFINITY;
  log_warning("MEM-17", format_bytes(bytes) + " of host memory for " + what +
                            " could not be locked for the GPU: " + refusal +
                            ". Copies then stop the computation and run at a fraction of the link's speed. " +
                            "The memlock limit is " +
                            (unlimited ? "unlimited" : format_bytes(static_cast<int64_t>(limit.rlim_cur))) +
                            ": raise it (ulimit -l unlimited; for a container --ulimit memlock=-1), or leave "
                            "more host memory free");
}

Staging::Staging(StreamView stream, int64_t bytes)
    : stream_(stream),
      bytes_(round_up(bytes, 2 * Arena::kAlignment)),
      halves_{Half(stream.device), Half(stream.device)} {}

Staging::~Staging() {
  try {
    finish();
  } catch (const Error&) {
    // The caller that needed the bytes got the error.
  }
}

void Staging::make_buffer() {
  if (buffer_.data() != nullptr) return;
  buffer_ = RegisteredMemory(stream_.device, bytes_);
  if (!buffer_.refusal().empty()) warn_not_registered("loading and saving", bytes_, buffer_.refusal());
  halves_[0].data = buffer_.data();
  halves_[1].data = buffer_.data() + piece_bytes();
}

std::byte* Staging::next() {
  make_buffer();
  half(piece_).copied.record(stream_);
  Half& free = half(++piece_);
  free.copied.synchronize();
  return free.data;
}

void Staging::send(std::byte* to, const std::byte* from, int64_t bytes) {
  const Half& filled = half(piece_);
  LM_CHECK(from >= filled.data && from + bytes <= filled.data + piece_bytes(), "bytes of another half");
  copy_bytes(to, from, bytes, stream_);
}

void Staging::finish() {
  if (buffer_.data() == nullptr) return;
  half(piece_).copied.record(stream_);
  half(piece_).copied.synchronize();
}

void Staging::write(std::byte* to, int64_t bytes, const Fill& fill) {
  if (!used()) return fill(0, {to, static_cast<size_t>(bytes)});
  for (int64_t done = 0; done < bytes; done += piece_bytes()) {
    const int64_t size = std::min(piece_bytes(), bytes - done);
    std::byte* const piece = next();
    fill(done, {piece, static_cast<size_t>(size)});
    send(to + done, piece, size);
  }
}

void Staging::read(const std::byte* from, int64_t bytes, const Take& take) {
  if (!used()) return take(0, {from, static_cast<size_t>(bytes)});
  make_buffer();
  finish();
  const int64_t pieces = ceil_div(bytes, piece_bytes());
  const auto size = [&](int64_t i) { return std::min(piece_bytes(), bytes - i * piece_bytes()); };
  const auto start = [&](int64_t i) {
    copy_bytes(half(i).data, from + i * piece_bytes(), size(i), stream_);
    half(i).copied.record(stream_);
  };
  if (pieces > 0) start(0);
  for (int64_t i = 0; i < pieces; ++i) {
    if (i + 1 < pieces) start(i + 1);
    half(i).copied.synchronize();
    take(i * piece_bytes(), {half(i).data, static_cast<size_t>(size(i))});
  }
}

void Staging::read_into(void* to, const void* from, int64_t bytes) {
  read(static_cast<const std::byte*>(from), bytes, [&](int64_t offset, std::span<const std::byte> piece) {
    std::memcpy(static_cast<std::byte*>(to) + offset, piece.data(), piece.size());
  });
}

}  // namespace lm
