#include "train/event_file.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <climits>
#include <cstring>
#include <filesystem>

#include "base/clock.h"
#include "base/log.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

static_assert(std::endian::native == std::endian::little, "records are little-endian");

constexpr char kPrefix[] = "events.out.tfevents.";

constexpr std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? 0x82F63B78u : 0u);
    table[i] = value;
  }
  return table;
}

template <class T>
std::string raw(T value) {
  std::string out(sizeof value, '\0');
  std::memcpy(out.data(), &value, sizeof value);
  return out;
}

// Fields of a protocol buffer.
std::string varint(uint64_t value) {
  std::string out;
  for (; value >= 128; value >>= 7) out += static_cast<char>(value | 128);
  return out + static_cast<char>(value);
}
std::string number_field(int field, int64_t value) {
  return varint(static_cast<uint64_t>(field) << 3) + varint(static_cast<uint64_t>(value));
}
std::string text_field(int field, std::string_view bytes) {
  return varint(static_cast<uint64_t>(field) << 3 | 2) + varint(bytes.size()) + std::string(bytes);
}
std::string double_field(int field, double value) {
  return varint(static_cast<uint64_t>(field) << 3 | 1) + raw(value);
}
std::string float_field(int field, float value) {
  return varint(static_cast<uint64_t>(field) << 3 | 5) + raw(value);
}

// Readers process a directory in the order of names, which begin with the time in seconds: must exceed all
// existing ones.
int64_t next_number(const fs::path& directory) {
  auto number = static_cast<int64_t>(unix_seconds());
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(directory, ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(kPrefix))
      number = std::max<int64_t>(number, std::atoll(name.c_str() + sizeof kPrefix - 1) + 1);
  }
  return number;
}

std::string host_name() {
  char name[HOST_NAME_MAX + 1] = {};
  return gethostname(name, sizeof name - 1) == 0 && name[0] != '\0' ? name : "localhost";
}

}  // namespace

uint32_t masked_crc32c(std::string_view bytes) {
  static constexpr std::array<uint32_t, 256> kTable = crc_table();
  uint32_t crc = ~0u;
  for (const char byte : bytes) crc = (crc >> 8) ^ kTable[(crc ^ static_cast<uint8_t>(byte)) & 255];
  crc = ~crc;
  return ((crc >> 15) | (crc << 17)) + 0xA282EAD8u;
}

EventFile::EventFile(const std::string& directory) {
  std::error_code error;
  fs::create_directories(directory, error);
  char number[32];
  std::snprintf(number, sizeof number, "%010ld", static_cast<long>(next_number(directory)));
  path_ = fmt::format("{}/{}{}.{}.{}.0", directory, kPrefix, number, host_name(), getpid());
  file_ = std::fopen(path_.c_str(), "wxe");
  if (file_ == nullptr) give_up("cannot create the event file");
  write_event(0, text_field(3, "brain.Event:2"));
}

EventFile::~EventFile() {
  if (file_ != nullptr) std::fclose(file_);
}

void EventFile::give_up(const std::string& what) {
  const std::string why = std::strerror(errno);
  log_warning("IO-05", path_ + ": " + what + ": " + why +
                           "; TensorBoard gets no more of this start, metrics.jsonl has every row");
  if (file_ != nullptr) std::fclose(file_);
  file_ = nullptr;
}

void EventFile::write_event(int64_t step, const std::string& what) {
  if (file_ == nullptr) return;
  const std::string event = double_field(1, unix_seconds()) + number_field(2, step) + what;
  const std::string length = raw(static_cast<uint64_t>(event.size()));
  const std::string record = length + raw(masked_crc32c(length)) + event + raw(masked_crc32c(event));
  if (std::fwrite(record.data(), 1, record.size(), file_) != record.size() || std::fflush(file_) != 0)
    give_up("cannot append an event");
}

void EventFile::write(int64_t step, std::span<const Scalar> scalars) {
  std::string summary;
  for (const Scalar& scalar : scalars) {
    const auto value = static_cast<float>(scalar.value);
    summary += text_field(1, text_field(1, scalar.tag) + float_field(2, value));
  }
  write_event(step, text_field(5, summary));
}

void EventFile::go_on_after(int64_t step) {
  // SessionLog {status: START}: readers drop what they have from its step on.
  write_event(step + 1, text_field(7, number_field(1, 1)));
}

}  // namespace lm
