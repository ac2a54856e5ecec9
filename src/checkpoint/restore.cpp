#include "checkpoint/restore.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <mutex>
#include <thread>

#include "base/bytes.h"
#include "base/checksum.h"
#include "base/log.h"
#include "checkpoint/shard_writer.h"
#include "config/config_text.h"
#include "offload/io_failure.h"
#include "weights/safetensors_header.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

// Alignment of offsets, sizes and memory for direct I/O.
constexpr int64_t kAlignment = 4096;
// Limit of one read call, of contiguous chunks; no chunk is longer.
constexpr int64_t kMostAtOnce = ShardWriter::kChunk;

bool aligned(const void* memory) {
  return reinterpret_cast<uintptr_t>(memory) % kAlignment == 0;
}

}  // namespace

// A thread's aligned memory; it only grows.
class CheckpointReader::Scratch {
 public:
  std::span<std::byte> of(int64_t bytes) {
    if (bytes > bytes_) {
      bytes_ = round_up(bytes, kAlignment);
      memory_.reset(static_cast<std::byte*>(std::aligned_alloc(kAlignment, static_cast<size_t>(bytes_))));
      if (memory_ == nullptr) throw std::bad_alloc();
    }
    return {memory_.get(), static_cast<size_t>(bytes)};
  }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  int64_t bytes_ = 0;
};

namespace {

// Calls body(i, the thread's memory) for each i below `count`; the first exception is thrown when all threads
// have ended.
template <class Scratch>
void each_in_parallel(size_t count, int threads, const std::function<void(size_t, Scratch&)>& body) {
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    Scratch scratch;
    for (size_t i = next++; i < count; i = next++) {
      try {
        body(i, scratch);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
        next = count;
      }
    }
  };
  std::vector<std::thread> others;
  for (size_t i = 1; i < std::min<size_t>(static_cast<size_t>(threads), count); ++i)
    others.emplace_back(work);
  work();
  for (std::thread& thread : others) thread.join();
  if (failure) std::rethrow_exception(failure);
}

// Empty if there is no directory; throws if it cannot be read.
std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> out;
  std::error_code error;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error))
    out.push_back(entry->path().filename().string());
  if (!error || error == std::errc::no_such_file_or_directory) return out;
  throw disk_error(error.value(), "cannot read the directory", directory);
}

}  // namespace

CheckpointReader::CheckpointReader(std::string directory, int threads)
    : directory_(std::move(directory)),
      manifest_(read_manifest(directory_)),
      threads_(std::max(threads, kReaders)) {
  for (const CheckpointFile& file : manifest_.files) {
    files_.emplace_back(directory_ + "/" + file.name);
    direct_.emplace_back(files_.back().path());
  }
  for (const SavedArray& array : manifest_.arrays) arrays_[array.name].push_back(&array);
  for (auto& [name, parts] : arrays_) std::ranges::sort(parts, {}, &SavedArray::first);
  check_headers();
}

// Verifies the bytes before the first array: restoring does not read them, but exporting does.
void CheckpointReader::check_headers() const {
  for (size_t f = 0; f < files_.size(); ++f) {
    int64_t first = manifest_.files[f].bytes;
    for (const SavedArray& array : manifest_.arrays) {
      if (array.file == f) first = std::min(first, array.offset);
    }
    for (const FileChunk& chunk : manifest_.files[f].chunks) {
      if (chunk.offset >= first) break;
      std::vector<std::byte> bytes(static_cast<size_t>(chunk.bytes));
      read_chunks(f, {&chunk, 1}, bytes);
    }
  }
}

const SavedArray* CheckpointReader::find(const std::string& array) const {
  const auto found = arrays_.find(array);
  return found == arrays_.end() ? nullptr : found->second.front();
}

void CheckpointReader::read_chunks(size_t file, std::span<const FileChunk> chunks,
                                   std::span<std::byte> bytes) const {
  const int64_t begin = chunks.front().offset;
  try {
    if (!read_direct(file, begin, bytes)) files_[file].read_at(begin, bytes);
  } catch (const Error& error) {
    if (error.code() == Exit::kInput) throw Error(Exit::kIntegrity, error.text());  // the file was longer
    throw;
  }
  read_bytes_ += std::ssize(bytes);
  for (const FileChunk& chunk : chunks) {
    const uint64_t found = chunk_checksum(
        bytes.subspan(static_cast<size_t>(chunk.offset - begin), static_cast<size_t>(chunk.bytes)));
    if (found == chunk.checksum) continue;
    throw Error(Exit::kIntegrity, {.area = "INT-07",
                                   .what = "corrupted bytes: checksum " + checksum_text(found) +
                                           ", expected " + checksum_text(chunk.checksum),
                                   .place = fmt::format("{}, offset {}, {} bytes", files_[file].path(),
                                                        chunk.offset, chunk.bytes),
                                   .next = "check the disk; an earlier checkpoint may be intact",
                                   .kept = "the other checkpoints"});
  }
}

CheckpointReader::DirectFile::DirectFile(const std::string& path)
    : descriptor(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_DIRECT)) {}

CheckpointReader::DirectFile::~DirectFile() {
  if (descriptor >= 0) ::close(descriptor);
}

// Returns false for anything but a complete aligned transfer: reading through the page cache then reports the
// reason, if there is one.
bool CheckpointReader::read_direct(size_t file, int64_t offset, std::span<std::byte> bytes) const {
  const int fd = direct_[file].descriptor;
  if (fd < 0 || offset % kAlignment != 0 || std::ssize(bytes) % kAlignment != 0 || !aligned(bytes.data()))
    return false;
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t n =
        ::pread(fd, bytes.data() + done, bytes.size() - done, offset + static_cast<int64_t>(done));
    if (n <= 0 || n % kAlignment != 0) return false;
    done += static_cast<size_t>(n);
  }
  return true;
}

// Appends the chunks of the part, from each of the ranks' shards that it overlaps.
void CheckpointReader::add_pieces(const Part& part, std::vector<Piece>& out) const {
  const auto shards = arrays_.find(part.array);
  int64_t at = part.offset;  // in the whole array; everything before it has been found
  const int64_t end = part.offset + std::ssize(part.bytes);
  for (size_t s = 0; shards != arrays_.end() && s < shards->second.size() && at < end; ++s) {
    const SavedArray& saved = *shards->second[s];
    const int64_t first = saved.first * static_cast<int64_t>(dtype_size(saved.dtype));
    const int64_t here = std::min(end, first + saved.bytes()) - at;
    if (at < first || here <= 0) continue;
    const auto skip = static_cast<size_t>(at - part.offset);
    add_chunks(saved, at - first, part.bytes.subspan(skip, static_cast<size_t>(here)), out);
    at += here;
  }
  if (at == end) return;
  throw Error(Exit::kIncompatible,
              {.area = "CKPT-26",
               .what = "the checkpoint does not have " + part.array +
                       (shards == arrays_.end() ? "" : " of this size"),
               .place = directory_,
               .next = "start with the configuration that it was saved with, or in another run.dir",
               .kept = "the checkpoint"});
}

void CheckpointReader::add_chunks(const SavedArray& saved, int64_t offset, std::span<std::byte> bytes,
                                  std::vector<Piece>& out) const {
  const std::vector<FileChunk>& chunks = manifest_.files[saved.file].chunks;
  const int64_t begin = saved.offset + offset, end = begin + std::ssize(bytes);
  auto chunk = std::ranges::upper_bound(chunks, begin, {}, &FileChunk::offset);
  if (chunk != chunks.begin()) --chunk;
  for (; chunk != chunks.end() && chunk->offset < end; ++chunk) {
    const int64_t a = std::max(begin, chunk->offset), b = std::min(end, chunk->offset + chunk->bytes);
    if (a < b)
      out.push_back({.file = saved.file,
                     .chunk = *chunk,
                     .skip = a - chunk->offset,
                     .bytes = bytes.subspan(static_cast<size_t>(a - begin), static_cast<size_t>(b - a))});
  }
}

void CheckpointReader::read_pieces(std::span<const Piece> pieces) const {
  // Starts of runs: chunks that are contiguous, or the same, and together not too long.
  std::vector<size_t> starts;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    const bool first = starts.empty();
    const Piece &head = pieces[first ? i : starts.back()], &before = pieces[first ? i : i - 1];
    const bool joins =
        !first && piece.file == before.file &&
        (piece.chunk.offset == before.chunk.offset || piece.chunk.offset == before.chunk.end()) &&
        piece.chunk.end() - head.chunk.offset <= kMostAtOnce;
    if (!joins) starts.push_back(i);
  }
  starts.push_back(pieces.size());
  each_in_parallel<Scratch>(starts.size() - 1, threads_, [&](size_t i, Scratch& scratch) {
    read_run(pieces.subspan(starts[i], starts[i + 1] - starts[i]), scratch);
  });
}

void CheckpointReader::read_run(std::span<const Piece> run, Scratch& scratch) const {
  std::vector<FileChunk> chunks;
  std::byte* const memory = run.front().bytes.data();
  const int64_t begin = run.front().chunk.offset;
  bool in_place = aligned(memory);  // the run is read directly to its destination
  for (const Piece& piece : run) {
    in_place = in_place && std::ssize(piece.bytes) == piece.chunk.bytes &&
               piece.bytes.data() == memory + (piece.chunk.offset - begin);
    if (chunks.empty() || chunks.back().offset != piece.chunk.offset) chunks.push_back(piece.chunk);
  }
  const int64_t bytes = chunks.back().end() - begin;
  if (in_place) return read_chunks(run.front().file, chunks, {memory, static_cast<size_t>(bytes)});
  const std::span<std::byte> whole = scratch.of(bytes);
  read_chunks(run.front().file, chunks, whole);
  for (const Piece& piece : run) {  // without bytes: only verified
    const auto at = static_cast<size_t>(piece.chunk.offset - begin + piece.skip);
    std::ranges::copy(whole.subspan(at, piece.bytes.size()), piece.bytes.begin());
  }
}

void CheckpointReader::read(const std::string& array, int64_t offset, std::span<std::byte> bytes) {
  std::vector<Piece> pieces;
  add_pieces({array, offset, bytes}, pieces);
  if (!pieces.empty() && take_kept(pieces.front())) pieces.erase(pieces.begin());
  if (pieces.empty()) return;
  const Piece last = pieces.back();
  const bool goes_on = last.skip + std::ssize(last.bytes) < last.chunk.bytes;
  if (goes_on) pieces.pop_back();
  read_pieces(pieces);
  if (goes_on) keep(last);
}

// Serves the rest of the last chunk to a caller that reads an array in small parts.
bool CheckpointReader::take_kept(const Piece& piece) {
  const auto kept = std::ranges::find_if(kept_, [&](const Kept& one) {
    return one.file == piece.file && one.chunk.offset == piece.chunk.offset;
  });
  if (kept == kept_.end()) return false;
  std::memcpy(piece.bytes.data(), kept->bytes.data() + piece.skip, piece.bytes.size());
  std::rotate(kept, kept + 1, kept_.end());
  if (piece.skip + std::ssize(piece.bytes) == piece.chunk.bytes) kept_.pop_back();
  return true;
}

void CheckpointReader::keep(const Piece& piece) {
  if (kept_.size() == kMostKept) kept_.erase(kept_.begin());
  const auto memory = std::make_shared<Scratch>();
  const Kept kept{piece.file, piece.chunk, memory, memory->of(piece.chunk.bytes)};
  read_chunks(kept.file, {&kept.chunk, 1}, kept.bytes);
  kept_.push_back(kept);
  take_kept(piece);
}

void CheckpointReader::read(std::span<const Part> parts) {
  std::vector<Piece> pieces;
  for (const Part& part : parts) add_pieces(part, pieces);
  // In file order.
  std::ranges::sort(pieces, [](const Piece& a, const Piece& b) {
    return std::pair(a.file, a.chunk.offset) < std::pair(b.file, b.chunk.offset);
  });
  read_pieces(pieces);
}

void CheckpointReader::verify() {
  std::vector<Piece> all;  // without a destination
  for (size_t f = 0; f < files_.size(); ++f) {
    for (const FileChunk& chunk : manifest_.files[f].chunks)
      all.push_back({.file = f, .chunk = chunk, .skip = 0, .bytes = {}});
  }
  read_pieces(all);
}

std::vector<FoundCheckpoint> find_checkpoints(const std::string& directory) {
  std::vector<FoundCheckpoint> out;
  for (const std::string& name : names_in(directory)) {
    if (const std::optional<int64_t> step = checkpoint_step(name))
      out.push_back({.path = directory + "/" + name, .step = *step, .manifest = {}, .problem = ""});
  }
  std::ranges::sort(out, std::greater(), &FoundCheckpoint::step);
  for (FoundCheckpoint& found : out) {
    try {
      found.manifest = read_manifest(found.path);
    } catch (const Error& problem) {
      found.problem = problem.what();
    }
  }
  return out;
}

std::vector<std::string> interrupted_saves(const std::string& directory) {
  std::vector<std::string> out;
  for (const std::string& name : names_in(directory)) {
    const size_t dot = name.find(".tmp-");
    if (dot != std::string::npos && checkpoint_step(name.substr(0, dot))) out.push_back(name);
  }
  std::ranges::sort(out);
  return out;
}

namespace {

void remove(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) log_warning("CKPT-03", "cannot delete " + path + ": " + error.message());
}

}  // namespace

void retain_checkpoints(const std::string& directory, int64_t keep, int64_t newest,
                        const std::vector<int64_t>& kept) {
  std::vector<FoundCheckpoint> all;
  try {
    for (const std::string& name : interrupted_saves(directory)) remove(directory + "/" + name);
    all = find_checkpoints(directory);
  } catch (const Error& error) {
    log_warning("CKPT-03", std::string("nothing is deleted: ") + error.what());
  }
  int64_t whole = 0;
  for (const FoundCheckpoint& found : all) {
    whole += found.manifest.has_value();
    const bool wanted = std::ranges::find(kept, found.step) != kept.end() || found.step == newest;
    // One that cannot be read now may be intact: it is not counted, and is deleted once enough newer ones
    // exist.
    if (wanted || whole < keep || (whole == keep && found.manifest)) continue;
    // Renames first: a crash then leaves no partly deleted checkpoint.
    const std::string nameless = found.path + ".tmp-deleted";
    std::error_code error;
    fs::rename(found.path, nameless, error);
    remove(error ? found.path : nameless);
  }
}

}  // namespace lm
