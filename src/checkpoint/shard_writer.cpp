#include "checkpoint/shard_writer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/bytes.h"
#include "base/checksum.h"
#include "base/error.h"
#include "base/parallel.h"
#include "offload/io_failure.h"

namespace lm {
namespace {

constexpr int64_t kAlignment = 4096;
constexpr int64_t kBlock = kMiB;
constexpr int kDepth = 32;

// Returns 0, or the errno if space cannot be reserved. If the file system has no fallocate, only writing
// shows whether there is space.
int reserve(int fd, int64_t bytes) {
  rlimit limit{};  // fallocate would answer with SIGXFSZ, which ends the process
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < static_cast<rlim_t>(bytes)) return EFBIG;
  constexpr int kTries = 30;  // when a signal comes in between
  int status = 0;
  for (int i = 0; i < kTries; ++i) {
    status = ::fallocate(fd, 0, 0, bytes);
    if (status == 0 || errno != EINTR) break;
  }
  if (status == 0) return 0;
  if (errno != EOPNOTSUPP && errno != ENOSYS) return errno;
  return ::ftruncate(fd, bytes) == 0 ? 0 : errno;
}

// Reads are verified by whole chunks: short enough that other ranks, whose shards begin anywhere in this one,
// read little beyond their own; and long enough to be worth a checksum. The manifest lists them all: the more
// ranks share an array, the fewer chunks each has.
int64_t checked_bytes(int64_t array, int ranks) {
  constexpr int64_t kOfAll = 1024, kFewest = 8, kMost = 512, kLeast = 64 * kKiB;
  const int64_t parts = std::clamp(kOfAll / ranks, kFewest, kMost);
  return std::clamp(round_up(array / parts, kAlignment), kLeast, ShardWriter::kChunk);
}

// Bytes and scales of quantized state are unaligned: its tiles cannot use direct I/O.
bool has_pages_only(const std::vector<TensorInfo>& arrays) {
  return std::ranges::all_of(arrays, [](const TensorInfo& array) {
    return array.dtype != DType::kU8 && array.bytes() % kAlignment == 0;
  });
}

}  // namespace

// One file, open for direct I/O if requested and supported by its file system.
class ShardWriter::Files : public IoFiles {
 public:
  Files(std::string path, int64_t bytes, bool direct)
      : path_(std::move(path)), alignment_(direct ? kAlignment : 1) {
    constexpr int kFlags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC;
    int fd = ::open(path_.c_str(), kFlags | (direct ? O_DIRECT : 0), 0666);
    if (fd < 0 && errno == EINVAL) fd = ::open(path_.c_str(), kFlags, 0666);
    if (fd < 0) throw disk_error(errno, "cannot create", path_);
    files_.push_back({.descriptor = fd, .bytes = bytes});
    if (const int error = reserve(fd, bytes); error != 0) {
      ::close(fd);
      throw disk_error(error, "cannot reserve " + format_bytes(bytes), path_);
    }
  }
  ~Files() override { ::close(descriptor()); }
  Files(const Files&) = delete;
  Files& operator=(const Files&) = delete;

  int descriptor() const { return files_.front().descriptor; }
  // Some file systems accept O_DIRECT at open and refuse the transfers.
  void try_direct(std::span<const std::byte> page) {
    if (::pwrite(descriptor(), page.data(), page.size(), 0) >= 0 || errno != EINVAL) return;
    ::fcntl(descriptor(), F_SETFL, ::fcntl(descriptor(), F_GETFL) & ~O_DIRECT);
  }

  const std::vector<IoFile>& files() const override { return files_; }
  const std::string& path(int) const override { return path_; }
  int64_t alignment() const override { return alignment_; }

 private:
  std::string path_;
  int64_t alignment_;
  std::vector<IoFile> files_;
};

ShardWriter::ShardWriter(ShardSetup setup) : setup_(std::move(setup)) {
  const std::string header = safetensors_beginning(setup_.arrays, {{"format", "pt"}}, kAlignment);
  int64_t end = std::ssize(header);
  for (const TensorInfo& array : setup_.arrays) {
    offsets_.push_back(std::exchange(end, end + array.bytes()));
  }
  offsets_.push_back(end);
  buffers_.resize(static_cast<size_t>(save_buffers(end, setup_.copies)));
  if (setup_.buffers != nullptr) memory_ = std::move(*setup_.buffers);
  const int64_t needed = std::ssize(buffers_) * kChunk;
  if (memory_ == nullptr || memory_->capacity() < needed)
    memory_ = std::make_unique<PinnedPool>(DeviceType::kCpu, needed);
  file_.name = setup_.path.substr(setup_.path.rfind('/') + 1);
  file_.bytes = end;
  const bool direct = has_pages_only(setup_.arrays);
  files_ = std::make_unique<Files>(setup_.path, end, direct);
  std::memcpy(memory_->memory().data(), header.data(), kAlignment);
  if (direct) files_->try_direct(memory_->memory().first(kAlignment));
  const auto make = [this] {
    const std::span<std::byte> buffers[] = {memory_->memory()};
    const EngineSetup engine{.files = files_->files(), .buffers = buffers, .depth = kDepth};
    return setup_.make_engine ? setup_.make_engine(engine) : make_engine(setup_.engine, engine, nullptr);
  };
  queue_ = std::make_unique<IoQueue>(*files_, make, kBlock);
  put(0, std::as_bytes(std::span(header)), kChunk, nullptr, 1);
}

ShardWriter::~ShardWriter() {
  try {
    queue_->drain();
  } catch (const Error&) {
    // The caller that wrote got the error.
  }
  if (!queue_->hangs()) {
    if (setup_.buffers != nullptr) *setup_.buffers = std::move(memory_);
    return;
  }
  // Memory and files of its requests must stay until the process ends.
  [[maybe_unused]] const void* const stay[] = {queue_.release(), memory_.release(), files_.release()};
}

void ShardWriter::write(size_t array, int64_t offset, std::span<const std::byte> bytes,
                        std::vector<Ticket>* lent, int threads) {
  LM_CHECK(offset >= 0 && offset + std::ssize(bytes) <= setup_.arrays[array].bytes(),
           setup_.arrays[array].name);
  LM_CHECK(offset % files_->alignment() == 0 && std::ssize(bytes) % files_->alignment() == 0,
           setup_.arrays[array].name);
  // Direct I/O also needs an aligned address.
  const auto address = reinterpret_cast<uintptr_t>(bytes.data());
  const bool in_place = address % static_cast<uintptr_t>(files_->alignment()) == 0;
  put(offsets_[array] + offset, bytes, checked_bytes(setup_.arrays[array].bytes(), setup_.ranks),
      in_place ? lent : nullptr, threads);
}

void ShardWriter::put(int64_t offset, std::span<const std::byte> bytes, int64_t checked,
                      std::vector<Ticket>* lent, int threads) {
  for (size_t done = 0; done < bytes.size(); done += kChunk) {
    const std::span<const std::byte> piece =
        bytes.subspan(done, std::min<size_t>(kChunk, bytes.size() - done));
    const int64_t at = offset + static_cast<int64_t>(done);
    if (lent != nullptr) {
      lent->push_back(start(at, piece, nullptr, checked, threads));
      continue;
    }
    const size_t b = take_buffer();
    std::byte* const buffer = memory_->memory().data() + static_cast<int64_t>(b) * kChunk;
    queue_->wait(buffers_[b].written);
    const Ticket written = start(at, piece, buffer, checked, threads);
    const std::lock_guard lock(mutex_);
    buffers_[b] = {.written = written, .filling = false};
  }
}

// Bytes are checksummed right after the copy, while they are in the core's cache.
Ticket ShardWriter::start(int64_t at, std::span<const std::byte> piece, std::byte* buffer, int64_t checked,
                          int threads) {
  const int64_t size = std::ssize(piece);
  std::vector<FileChunk> chunks(static_cast<size_t>(ceil_div(size, checked)));
  parallel_for(threads, std::ssize(chunks), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t from = i * checked, length = std::min(checked, size - from);
      std::span<const std::byte> chunk =
          piece.subspan(static_cast<size_t>(from), static_cast<size_t>(length));
      if (buffer != nullptr) {
        std::memcpy(buffer + from, chunk.data(), chunk.size());
        chunk = {buffer + from, chunk.size()};
      }
      chunks[static_cast<size_t>(i)] = {at + from, length, chunk_checksum(chunk)};
    }
  });
  {
    const std::lock_guard lock(mutex_);
    file_.chunks.insert(file_.chunks.end(), chunks.begin(), chunks.end());
  }
  const Extent place{.pieces = {{.file = 0, .offset = at, .bytes = size}}, .bytes = size};
  return queue_->write(place, buffer != nullptr ? buffer : piece.data(), size, "the checkpoint");
}

void ShardWriter::wait(std::span<const Ticket> writes) {
  for (const Ticket written : writes) queue_->wait(written);
}

// The buffer submitted longest ago; no other thread fills it: there are more buffers than writers.
size_t ShardWriter::take_buffer() {
  const std::lock_guard lock(mutex_);
  while (buffers_[next_].filling) next_ = (next_ + 1) % buffers_.size();
  buffers_[next_].filling = true;
  return std::exchange(next_, (next_ + 1) % buffers_.size());
}

CheckpointFile ShardWriter::finish() {
  queue_->drain();
  // An fdatasync that failed must not be repeated: the kernel has dropped the pages.
  if (::fdatasync(files_->descriptor()) != 0) throw disk_error(errno, "fdatasync", setup_.path);
  std::ranges::sort(file_.chunks, {}, &FileChunk::offset);
  int64_t end = 0;
  for (const FileChunk& chunk : file_.chunks) {
    LM_CHECK(chunk.offset == end, fmt::format("bytes at {} of the checkpoint", end));
    end += chunk.bytes;
  }
  LM_CHECK(end == file_.bytes, "the checkpoint is incomplete");
  return file_;
}

}  // namespace lm
