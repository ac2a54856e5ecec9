// Any bytes as a file with a matrix that bitsandbytes quantized: refused with Error(11), or its pieces can be
// read, into their own encoding alone. The first two bytes are the matrix's rows and columns, less one; the
// rest is the file.
#include "weights/stored.h"

#include "tests/fuzz/support.h"

namespace {

using lm::fuzz::require;

// What read_stored fills has exactly the bytes that the encoding says.
void read_as(const lm::StoredMatrix& stored, lm::EncodingKind kind, int64_t rows, int64_t columns) {
  const lm::Encoding& encoding = lm::encoding_of(kind);
  lm::EncodedMatrix matrix{.encoding = &encoding, .rows = rows, .columns = columns};
  std::vector<std::vector<std::byte>> pieces;
  pieces.reserve(lm::kMostPieces);
  for (const int64_t bytes : encoding.piece_bytes(rows, columns)) {
    const size_t k = pieces.size();
    pieces.emplace_back(static_cast<size_t>(bytes));
    matrix.pieces[k] = pieces[k].data();
    matrix.bytes[k] = bytes;
  }
  const bool read = lm::fuzz::parse(lm::Exit::kInput, [&] {
                      read_stored(stored, matrix);
                      return true;
                    }).has_value();
  require(read == (kind == stored.kind));
}

void check(const lm::StoredMatrix& stored, int64_t rows, int64_t columns) {
  require(stored.codes.entry != nullptr && stored.scales.entry != nullptr && !stored.beside.empty());
  require(has_double_scales(stored.kind) == (stored.nested.entry != nullptr));
  read_as(stored, stored.kind, rows, columns);
  read_as(stored, stored.kind == lm::EncodingKind::kInt8 ? lm::EncodingKind::kNf4 : lm::EncodingKind::kInt8,
          rows, columns);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static lm::fuzz::MemoryFile file;
  static lm::fuzz::Directory directory;
  static const bool linked = (directory.link("model.safetensors", file), true);
  if (size < 2 || !linked) return 0;
  const int64_t rows = data[0] + 1, columns = data[1] + 1;
  file.set({lm::fuzz::text_of(data + 2, size - 2)});
  const auto files =
      lm::fuzz::parse(lm::Exit::kInput, [&] { return std::make_unique<lm::ModelFiles>(directory.path()); });
  if (!files) return 0;
  for (const char* name : {"m.weight", "m"}) {
    const auto stored =
        lm::fuzz::parse(lm::Exit::kInput, [&] { return find_stored(**files, name, rows, columns); });
    if (stored && *stored) check(**stored, rows, columns);
  }
  return 0;
}
