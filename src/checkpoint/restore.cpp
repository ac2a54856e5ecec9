#include "checkpoint/restore.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <filesystem>
#include <mutex>
#include <thread>

#include "base/log.h"
#include "config/config_text.h"
#include "offload/checksum.h"
#include "offload/io_failure.h"
#include "weights/safetensors_header.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

// Calls body(i) for each i below `count`; the first exception is thrown when all threads have ended.
void each_in_parallel(size_t count, int threads, const std::function<void(size_t)>& body) {
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    for (size_t i = next++; i < count; i = next++) {
      try {
        body(i);
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

// None where there is no directory; one that cannot be read is not taken for an empty one.
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
    : directory_(std::move(directory)), manifest_(read_manifest(directory_)), threads_(threads) {
  for (const CheckpointFile& file : manifest_.files) files_.emplace_back(directory_ + "/" + file.name);
  for (const SavedArray& array : manifest_.arrays) arrays_[array.name] = &array;
  check_headers();
}

// What lies before the first array is read by nobody who restores, and by everyone who exports.
void CheckpointReader::check_headers() const {
  for (size_t f = 0; f < files_.size(); ++f) {
    int64_t first = manifest_.files[f].bytes;
    for (const SavedArray& array : manifest_.arrays) {
      if (array.file == f) first = std::min(first, array.offset);
    }
    for (const FileChunk& chunk : manifest_.files[f].chunks) {
      if (chunk.offset >= first) break;
      std::vector<std::byte> bytes(static_cast<size_t>(chunk.bytes));
      read_chunk(f, chunk, bytes);
    }
  }
}

const SavedArray* CheckpointReader::find(const std::string& array) const {
  const auto found = arrays_.find(array);
  return found == arrays_.end() ? nullptr : found->second;
}

void CheckpointReader::read_chunk(size_t file, const FileChunk& chunk, std::span<std::byte> bytes) const {
  try {
    files_[file].read_at(chunk.offset, bytes);
  } catch (const Error& error) {
    if (error.code() == Exit::kInput) throw Error(Exit::kIntegrity, error.text());  // it was longer
    throw;
  }
  const uint64_t found = chunk_checksum(bytes);
  if (found == chunk.checksum) return;
  throw Error(Exit::kIntegrity, {.area = "INT-07",
                                 .what = "bytes are not those that were saved: checksum " +
                                         checksum_text(found) + ", expected " + checksum_text(chunk.checksum),
                                 .place = files_[file].path() + ", offset " + std::to_string(chunk.offset) +
                                          ", " + std::to_string(chunk.bytes) + " bytes",
                                 .next = "check the disk; an earlier checkpoint may be whole",
                                 .kept = "the other checkpoints"});
}

void CheckpointReader::read(const std::string& array, int64_t offset, std::span<std::byte> bytes) {
  const SavedArray* const saved = find(array);
  const int64_t first = saved == nullptr ? 0 : saved->first * static_cast<int64_t>(dtype_size(saved->dtype));
  if (saved == nullptr || offset < first || offset + std::ssize(bytes) > first + saved->bytes()) {
    throw Error(Exit::kIncompatible,
                {.area = "CKPT-26",
                 .what = "the checkpoint does not have " + array + (saved == nullptr ? "" : " of this size"),
                 .place = directory_,
                 .next = "start with the configuration that it was saved with, or in another run.dir",
                 .kept = "the checkpoint"});
  }
  const std::vector<FileChunk>& chunks = manifest_.files[saved->file].chunks;
  const int64_t begin = saved->offset + offset - first, end = begin + std::ssize(bytes);
  auto chunk = std::ranges::upper_bound(chunks, begin, {}, &FileChunk::offset);
  const auto from = static_cast<size_t>(std::max<int64_t>(chunk - chunks.begin() - 1, 0));
  const auto to =
      static_cast<size_t>(std::ranges::lower_bound(chunks, end, {}, &FileChunk::offset) - chunks.begin());
  each_in_parallel(to - from, threads_, [&](size_t i) {
    const FileChunk& here = chunks[from + i];
    const int64_t a = std::max(begin, here.offset), b = std::min(end, here.offset + here.bytes);
    if (a >= b) return;
    std::byte* const out = bytes.data() + (a - begin);
    const auto part = static_cast<size_t>(b - a);
    if (b - a == here.bytes) return read_chunk(saved->file, here, {out, part});
    std::vector<std::byte> whole(static_cast<size_t>(here.bytes));
    read_chunk(saved->file, here, whole);
    std::memcpy(out, whole.data() + (a - here.offset), part);
  });
}

void CheckpointReader::verify() {
  for (size_t f = 0; f < files_.size(); ++f) {
    const std::vector<FileChunk>& chunks = manifest_.files[f].chunks;
    each_in_parallel(chunks.size(), threads_, [&](size_t i) {
      std::vector<std::byte> bytes(static_cast<size_t>(chunks[i].bytes));
      read_chunk(f, chunks[i], bytes);
    });
  }
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
    // One that cannot be read now may be whole: it counts for nothing, and goes when enough newer ones do.
    if (wanted || whole < keep || (whole == keep && found.manifest)) continue;
    // First the name goes: a crash leaves no checkpoint of which a part is gone.
    const std::string nameless = found.path + ".tmp-deleted";
    std::error_code error;
    fs::rename(found.path, nameless, error);
    remove(error ? found.path : nameless);
  }
}

}  // namespace lm
