#include "checkpoint/shard_writer.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/bytes.h"
#include "base/error.h"
#include "offload/checksum.h"
#include "offload/io_failure.h"

namespace lm {
namespace {

constexpr int64_t kAlignment = 4096;
constexpr int64_t kBlock = kMiB;
constexpr int kDepth = 32;

// 0, or why the bytes cannot be had. Where a file system cannot reserve space, writing shows whether there is
// some.
int reserve(int fd, int64_t bytes) {
  rlimit limit{};  // fallocate would answer with SIGXFSZ, which ends the process
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < static_cast<rlim_t>(bytes)) return EFBIG;
  int status = 0;
  do {
    status = ::fallocate(fd, 0, 0, bytes);
  } while (status != 0 && errno == EINTR);
  if (status == 0) return 0;
  if (errno != EOPNOTSUPP && errno != ENOSYS) return errno;
  return ::ftruncate(fd, bytes) == 0 ? 0 : errno;
}

}  // namespace

// One file, open for direct transfers where its file system has them.
class ShardWriter::Files : public IoFiles {
 public:
  Files(std::string path, int64_t bytes) : path_(std::move(path)) {
    constexpr int kFlags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC;
    int fd = ::open(path_.c_str(), kFlags | O_DIRECT, 0666);
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
  // Some file systems open a file for direct transfers, and refuse these.
  void try_direct(std::span<const std::byte> page) {
    if (::pwrite(descriptor(), page.data(), page.size(), 0) >= 0 || errno != EINVAL) return;
    ::fcntl(descriptor(), F_SETFL, ::fcntl(descriptor(), F_GETFL) & ~O_DIRECT);
  }

  const std::vector<IoFile>& files() const override { return files_; }
  const std::string& path(int) const override { return path_; }
  int64_t alignment() const override { return kAlignment; }

 private:
  std::string path_;
  std::vector<IoFile> files_;
};

ShardWriter::ShardWriter(ShardSetup setup)
    : setup_(std::move(setup)),
      memory_(std::make_unique<PinnedPool>(DeviceType::kCpu, kMemory)),
      written_(kBuffers, 0) {
  const std::string header = safetensors_beginning(setup_.arrays, {{"format", "pt"}}, kAlignment);
  int64_t end = std::ssize(header);
  for (const TensorInfo& array : setup_.arrays) {
    LM_CHECK(array.bytes() % kAlignment == 0, array.name);
    offsets_.push_back(std::exchange(end, end + array.bytes()));
  }
  offsets_.push_back(end);
  file_.name = setup_.path.substr(setup_.path.rfind('/') + 1);
  file_.bytes = end;
  files_ = std::make_unique<Files>(setup_.path, end);
  std::memcpy(memory_->memory().data(), header.data(), kAlignment);
  files_->try_direct(memory_->memory().first(kAlignment));
  const auto make = [this] {
    const std::span<std::byte> buffers[] = {memory_->memory()};
    const EngineSetup engine{.files = files_->files(), .buffers = buffers, .depth = kDepth};
    return setup_.make_engine ? setup_.make_engine(engine) : make_engine(setup_.engine, engine, nullptr);
  };
  queue_ = std::make_unique<IoQueue>(*files_, make, kBlock);
  put(0, std::as_bytes(std::span(header)));
}

ShardWriter::~ShardWriter() {
  try {
    queue_->drain();
  } catch (const Error&) {
    // Whoever wrote has been told.
  }
  if (!queue_->hangs()) return;
  // What its requests use stays to the process's end.
  [[maybe_unused]] const void* const stay[] = {queue_.release(), memory_.release(), files_.release()};
}

void ShardWriter::write(size_t array, int64_t offset, std::span<const std::byte> bytes) {
  LM_CHECK(offset >= 0 && offset + std::ssize(bytes) <= setup_.arrays[array].bytes(),
           setup_.arrays[array].name);
  LM_CHECK(offset % kAlignment == 0 && std::ssize(bytes) % kAlignment == 0, setup_.arrays[array].name);
  put(offsets_[array] + offset, bytes);
}

void ShardWriter::put(int64_t offset, std::span<const std::byte> bytes) {
  for (size_t done = 0; done < bytes.size();) {
    const std::span<const std::byte> piece =
        bytes.subspan(done, std::min<size_t>(kChunk, bytes.size() - done));
    std::byte* const buffer = memory_->memory().data() + static_cast<int64_t>(next_) * kChunk;
    queue_->wait(written_[next_]);
    std::memcpy(buffer, piece.data(), piece.size());
    const int64_t at = offset + static_cast<int64_t>(done), size = std::ssize(piece);
    file_.chunks.push_back({at, size, chunk_checksum({buffer, piece.size()})});
    const Extent place{.pieces = {{.file = 0, .offset = at, .bytes = size}}, .bytes = size};
    written_[next_] = queue_->write(place, buffer, size, "the checkpoint");
    next_ = (next_ + 1) % kBuffers;
    done += piece.size();
  }
}

CheckpointFile ShardWriter::finish() {
  queue_->drain();
  // An fdatasync that failed must not be repeated: the kernel has dropped the pages.
  if (::fdatasync(files_->descriptor()) != 0) throw disk_error(errno, "fdatasync", setup_.path);
  std::ranges::sort(file_.chunks, {}, &FileChunk::offset);
  int64_t end = 0;
  for (const FileChunk& chunk : file_.chunks) {
    LM_CHECK(chunk.offset == end, "bytes at " + std::to_string(end) + " of the checkpoint");
    end += chunk.bytes;
  }
  LM_CHECK(end == file_.bytes, "the checkpoint is incomplete");
  return file_;
}

}  // namespace lm
