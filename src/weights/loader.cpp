#include "weights/loader.h"

#include <fmt/format.h>
#include <algorithm>
#include <cstring>
#include <list>
#include <unordered_set>

#include "base/error.h"
#include "weights/base_copies.h"
#include "weights/convert.h"
#include "weights/read_part.h"
#include "weights/stored.h"

namespace lm {
namespace {

constexpr int64_t kChunkBytes = int64_t{4} << 20;  // per thread; larger reads are no faster from a page cache
constexpr size_t kMostDifferences = 20;

// One read: a range of a tensor and its destination.
struct Chunk {
  FilePart part;
  int64_t first = 0;  // element of the part
  int64_t elements = 0;
  std::byte* to = nullptr;
  DType to_type = DType::kBF16;
};

struct LoadItem {
  const Parameter* parameter = nullptr;
  LoadTarget target;
};

// The adapter's tensors of a layout, or the model's.
std::vector<LoadItem> items_of(const ModelLayout& layout, bool adapter, const FindTarget& target) {
  std::vector<LoadItem> items;
  for (size_t b = 0; b < layout.blocks.size(); ++b) {
    for (const TensorPlace& place : layout.blocks[b].tensors) {
      if (is_start(place.parameter.role)) continue;
      if (in_adapter(place.parameter.role) == adapter) items.push_back({&place.parameter, target(b, place)});
    }
    // Checked, and not read.
    for (const Parameter& parameter : layout.blocks[b].elsewhere)
      if (!adapter) items.push_back({&parameter, {}});
  }
  return items;
}

// The tensors that are trained whole beside an adapter, as the base's files have them. A list: items point to
// them.
std::list<Parameter> whole_in_base(const ModelLayout& layout) {
  std::list<Parameter> out;
  for (const BlockLayout& block : layout.blocks) {
    for (const TensorPlace& place : block.tensors) {
      if (place.parameter.role == TrainableRole::kWhole) out.push_back(stored_in_base(place.parameter));
    }
  }
  return out;
}

// For messages: the source of the expected tensors, and the advice if the files differ.
struct Description {
  const char* source;
  const char* next;
};
constexpr Description kOfModel = {"config.json describes",
                                  "check that config.json and the weights belong together and are complete"};
constexpr Description kOfAdapter = {
    "adapter_config.json and the base model describe",
    "use the base model that the adapter was trained on, and the adapter's files as they were written"};

class Differences {
 public:
  void add(const std::string& line) {
    if (lines_.size() < kMostDifferences) lines_.push_back(line);
    ++count_;
  }
  void fail_if_any(const std::string& directory, const Description& description) const {
    if (count_ == 0) return;
    std::string what = fmt::format("{}{} from what {}:", count_,
                                   count_ == 1 ? " tensor differs" : " tensors differ", description.source);
    for (const std::string& line : lines_) what += "\n    " + line;
    if (count_ > lines_.size()) what += fmt::format("\n    and {} more", count_ - lines_.size());
    throw Error(Exit::kInput,
                {.area = "FILE-23", .what = what + "\n ", .place = directory, .next = description.next});
  }

 private:
  std::vector<std::string> lines_;
  size_t count_ = 0;
};

// Extra tensors that are allowed.
using AllowedExtra = std::function<bool(const ModelFiles::Tensor& tensor)>;

// Checks that the files have every part with its shape and nothing else.
void check(const ModelFiles& files, const std::vector<LoadItem>& items, const AllowedExtra& allowed,
           const Description& description) {
  Differences differences;
  std::unordered_set<std::string> wanted;
  for (const LoadItem& item : items) {
    for (const ParameterPart& part : item.parameter->parts) {
      // Parts of one tensor are checked with the first of them.
      if (!wanted.insert(part.tensor()).second) {
        LM_CHECK(!part.file.empty(), part.name);
        continue;
      }
      if (item.parameter->kind == ParameterKind::kMatrix && !in_adapter(item.parameter->role)) {
        if (const auto stored = find_stored(files, part, item.parameter->columns)) {
          wanted.insert(stored->beside.begin(), stored->beside.end());
          continue;
        }
      }
      const auto tensor = files.find(part.tensor());
      if (!tensor) {
        differences.add("missing: " + part.tensor());
        continue;
      }
      const std::vector<int64_t> shape = item.parameter->file_shape(part);
      if (tensor->entry->shape != shape) {
        differences.add("shape: " + part.tensor() + " is " + shape_text(tensor->entry->shape) +
                        ", the model needs " + shape_text(shape));
      } else if (!is_weight_type(tensor->entry->dtype)) {
        differences.add("type: " + part.tensor() + " is " + safetensors_dtype(tensor->entry->dtype) +
                        ", only F32, BF16 and F16 are supported");
      }
    }
  }
  for (const ModelFiles::Tensor& tensor : files.tensors()) {
    if (wanted.contains(tensor.name) || allowed(tensor)) continue;
    differences.add("unexpected: " + tensor.entry->name.substr(0, 200) + " " +
                    shape_text(tensor.entry->shape));
  }
  differences.fail_if_any(files.directory(), description);
}

std::vector<Chunk> chunks_of(const ModelFiles& files, const std::vector<LoadItem>& items) {
  std::vector<Chunk> chunks;
  for (const LoadItem& item : items) {
    if (!item.target.memory || item.target.encoded != nullptr) continue;
    const int64_t size = static_cast<int64_t>(dtype_size(item.target.dtype));
    const int64_t columns = item.parameter->columns, first_row = item.target.first_row;
    const int64_t end_row = item.target.rows > 0 ? first_row + item.target.rows : item.parameter->rows;
    for (const ParameterPart& part : item.parameter->parts) {
      const FilePart stored = file_part(files, *item.parameter, part);
      if (!stored.scales && !is_weight_type(stored.entry->dtype)) {
        throw Error(Exit::kInput,
                    {.area = "FILE-23",
                     .what = part.name + " is quantized, but must be unquantized here",
                     .place = stored.file->path(),
                     .next = "set train.method = \"qlora\"; embedding and head must be bf16, fp16 or fp32"});
      }
      // Of codes as many as of the smallest elements.
      const int64_t most =
          kChunkBytes / (stored.scales ? 2 : static_cast<int64_t>(dtype_size(stored.entry->dtype)));
      // The requested elements of the part.
      const int64_t begin = (std::max(part.first, first_row) - part.first) * columns;
      const int64_t end = (std::min(part.first + part.rows, end_row) - part.first) * columns;
      for (int64_t first = begin; first < end; first += most) {
        chunks.push_back({.part = stored,
                          .first = first,
                          .elements = std::min(most, end - first),
                          .to = item.target.memory + ((part.first - first_row) * columns + first) * size,
                          .to_type = item.target.dtype});
      }
    }
  }
  // In file order, for read-ahead.
  std::sort(chunks.begin(), chunks.end(), [](const Chunk& a, const Chunk& b) {
    if (a.part.file != b.part.file) return a.part.file->path() < b.part.file->path();
    if (a.part.entry != b.part.entry) return a.part.entry->begin < b.part.entry->begin;
    return a.part.begin + a.first < b.part.begin + b.first;
  });
  return chunks;
}

void read_chunk(const Chunk& chunk) {
  read_part(chunk.part, chunk.first, chunk.elements, chunk.to_type, chunk.to);
}

int64_t bytes_at_target(const Chunk& chunk) {
  return chunk.elements * static_cast<int64_t>(dtype_size(chunk.to_type));
}

void read_by_threads(std::span<const Chunk> chunks, int threads) {
  for_each_range(threads, std::ssize(chunks), 1,
                 [&](int64_t i, int64_t) { read_chunk(chunks[static_cast<size_t>(i)]); });
}

// Reads as many chunks as fit into a half of the staging buffer and enqueues their copies, which overlap with
// the next reads. Returns their number.
size_t read_piece(std::span<const Chunk> chunks, Staging& staging, int threads) {
  std::byte* const half = staging.next();
  std::vector<Chunk> piece;
  int64_t bytes = 0;
  while (piece.size() < chunks.size()) {
    const Chunk& chunk = chunks[piece.size()];
    if (bytes + bytes_at_target(chunk) > staging.piece_bytes()) break;
    piece.push_back(chunk);
    piece.back().to = half + bytes;
    bytes += bytes_at_target(chunk);
  }
  LM_CHECK(!piece.empty(), "a chunk is larger than half of the staging buffer");
  read_by_threads(piece, threads);
  // Chunks that are contiguous both in the half and at their target are one copy.
  for (size_t i = 0; i < piece.size();) {
    int64_t run = 0;
    const size_t first = i;
    do {
      run += bytes_at_target(piece[i++]);
    } while (i < piece.size() && chunks[i].to == chunks[first].to + run);
    staging.send(chunks[first].to, piece[first].to, run);
  }
  return piece.size();
}

// Returns the bytes read.
int64_t read_chunks(std::span<const Chunk> chunks, const LoadOptions& options) {
  int64_t bytes = 0;
  for (const Chunk& chunk : chunks) bytes += chunk.part.stored_bytes(chunk.elements);
  if (options.staging == nullptr) {
    read_by_threads(chunks, options.threads);
  } else {
    while (!chunks.empty()) chunks = chunks.subspan(read_piece(chunks, *options.staging, options.threads));
  }
  return bytes;
}

// Nothing is quantized to MXFP4 here.
void require_encodable(const LoadItem& item, const ParameterPart& part) {
  if (item.target.encoded->encoding().kind != EncodingKind::kMxfp4) return;
  throw Error(Exit::kInput, {.area = "FILE-23",
                             .what = part.tensor() + " is not in MXFP4, and config.json says that it is",
                             .place = "quantization_config",
                             .next = "remove quantization_config from config.json if the weights are bf16"});
}

// Quantizes each matrix with a quantization format, one at a time. Returns the bytes read.
int64_t read_encoded(const ModelFiles& files, const std::vector<LoadItem>& items,
                     const LoadOptions& options) {
  int64_t bytes = 0;
  for (const LoadItem& item : items) {
    if (!item.target.memory || item.target.encoded == nullptr) continue;
    const std::vector<ParameterPart>& parts = item.parameter->parts;
    for (size_t p = 0; p < parts.size(); ++p) {
      // What is quantized lies as the program has it, whichever way the file's others lie.
      const auto stored = find_stored(files, parts[p], item.parameter->columns);
      if (!stored) require_encodable(item, parts[p]);
      write_encoded(*item.target.encoded, p, item.target.memory, options.staging,
                    [&](const EncodedMatrix& matrix) {
                      if (stored) return read_stored(*stored, matrix);
                      encode(matrix, item.target.dtype,
                             elements_of(files, *item.parameter, p, item.target.dtype), options.threads);
                    });
      bytes += stored ? stored->bytes()
                      : files.find(parts[p].tensor())->entry->bytes() / std::max<int64_t>(parts[p].slices, 1);
    }
  }
  return bytes;
}

// A stored head with a tied embedding is accepted if it is the same matrix; a different one means that
// config.json does not describe these weights.
void check_tied_head(const ModelFiles& files, const NameMap& names) {
  const std::string head_name = names.head + std::string(".weight");
  const std::string embedding_name = names.embedding + std::string(".weight");
  const auto head = files.find(head_name), embedding = files.find(embedding_name);
  if (!head || !embedding) return;
  bool equal = head->entry->shape == embedding->entry->shape && head->entry->dtype == embedding->entry->dtype;
  std::vector<std::byte> a(equal ? kChunkBytes : 0), b(a.size());
  for (int64_t offset = 0; equal && offset < head->entry->bytes(); offset += kChunkBytes) {
    const size_t n = static_cast<size_t>(std::min(kChunkBytes, head->entry->bytes() - offset));
    head->file->read(*head->entry, offset, std::span(a).first(n));
    embedding->file->read(*embedding->entry, offset, std::span(b).first(n));
    equal = std::memcmp(a.data(), b.data(), n) == 0;
  }
  if (equal) return;
  throw Error(Exit::kInput,
              {.area = "FILE-23",
               .what = "tie_word_embeddings is true, but " + head_name + " and " + embedding_name +
                       " are both stored and differ",
               .place = files.directory(),
               .next = "set tie_word_embeddings to false in config.json if the head is its own matrix"});
}

AllowedExtra allowed_for(const ModelSpec& spec) {
  return [unread = unread_modules(spec), wrapped = !spec.wrapper.empty(), tied = spec.tied,
          head = spec.names.head + std::string(".weight"), scores = spec.scores(),
          vocabulary_head = spec.score.unread + ".weight"](const ModelFiles::Tensor& tensor) {
    switch (tensor.use) {
      case TensorUse::kTower:
        return wrapped;
      case TensorUse::kUnused:
        return true;
      case TensorUse::kText:
        break;
    }
    if (belongs_to(tensor.name, unread)) return true;
    if (scores && (tensor.name == head || tensor.name == vocabulary_head)) return true;
    return tied && tensor.name == head;
  };
}

// A head of scores that the files do not have begins with random values.
void leave_fresh_head(const ModelFiles& files, const ModelSpec& spec, std::vector<LoadItem>& items) {
  if (!spec.score.fresh || files.find(spec.names.head + std::string(".weight"))) return;
  std::erase_if(items, [](const LoadItem& item) { return item.parameter->name == "head"; });
}

}  // namespace

std::vector<std::string> unread_modules(const ModelSpec& spec) {
  std::vector<std::string> out;
  const NameMap& names = spec.names;
  for (int64_t i = 0; i < spec.layer_count(); ++i) {
    const auto* const attention = spec.layer(i).find<AttentionSpec>();
    if (attention == nullptr || !attention->borrows()) continue;
    const std::string layer = fmt::format("{}{}.", names.layers, i);
    for (const ModuleName& module : names.modules) {
      const std::string_view part = module.first;
      if (part == "attn.k" || part == "attn.v") out.push_back(layer + module.path);
    }
    for (const NormName& norm : names.norms)
      if (norm.ours == std::string_view("attn.k_norm")) out.push_back(layer + norm.path);
  }
  for (int64_t i = 0; i < spec.predictors; ++i)
    out.push_back(fmt::format("{}{}", names.layers, spec.layer_count() + i));
  return out;
}

bool belongs_to(const std::string& tensor, const std::vector<std::string>& modules) {
  return std::ranges::any_of(modules,
                             [&](const std::string& path) { return tensor.starts_with(path + "."); });
}

Parameter stored_in_base(Parameter parameter) {
  if (parameter.role != TrainableRole::kWhole) return parameter;
  parameter.role = TrainableRole::kWeight;
  for (ParameterPart& part : parameter.parts) part.name.erase(0, kAdapterPrefix.size());
  return parameter;
}

int64_t load_adapter_tensors(const ModelFiles& files, const ModelLayout& layout, const FindTarget& target,
                             const LoadOptions& options) {
  const std::vector<LoadItem> items = items_of(layout, true, target);
  const auto own = [&](const std::string& name) {
    return std::ranges::any_of(items, [&](const LoadItem& item) {
      return std::ranges::find(item.parameter->parts, name, &ParameterPart::name) !=
             item.parameter->parts.end();
    });
  };
  const std::vector<BaseCopy> copies =
      options.base == nullptr ? std::vector<BaseCopy>() : base_copies(files, *options.base, own);
  check(
      files, items,
      [&](const ModelFiles::Tensor& tensor) {
        return std::ranges::find(copies, tensor.name, &BaseCopy::name) != copies.end();
      },
      kOfAdapter);
  require_equal(files, copies, options.base_directory);
  return read_chunks(chunks_of(files, items), options);
}

int64_t load_model(const ModelFiles& files, const ModelSpec& spec, const ModelLayout& layout,
                   const FindTarget& target, const LoadOptions& options) {
  std::vector<LoadItem> items = items_of(layout, false, target);
  // Checked here, and read by themselves (load_whole_tensors).
  const std::list<Parameter> whole = whole_in_base(layout);
  for (const Parameter& parameter : whole) items.push_back({&parameter, {}});
  leave_fresh_head(files, spec, items);
  check(files, items, allowed_for(spec), kOfModel);
  // Checked once, by the call that reads the embedding.
  if (spec.tied && items.front().target.memory != nullptr) check_tied_head(files, spec.names);
  return read_chunks(chunks_of(files, items), options) + read_encoded(files, items, options);
}

int64_t load_whole_tensors(const ModelFiles& files, const ModelSpec& spec, const ModelLayout& layout,
                           const FindTarget& target, const LoadOptions& options) {
  const std::list<Parameter> whole = whole_in_base(layout);
  std::vector<LoadItem> items;
  auto stored = whole.begin();
  for (size_t b = 0; b < layout.blocks.size(); ++b) {
    for (const TensorPlace& place : layout.blocks[b].tensors) {
      if (place.parameter.role == TrainableRole::kWhole) items.push_back({&*stored++, target(b, place)});
    }
  }
  leave_fresh_head(files, spec, items);
  if (spec.tied && !items.empty() && items.front().target.memory != nullptr)
    check_tied_head(files, spec.names);
  return read_chunks(chunks_of(files, items), options);
}

MatrixElements elements_of(const ModelFiles& files, const Parameter& parameter, size_t part, DType dtype) {
  return [stored = file_part(files, parameter, parameter.parts[part]), dtype](
             int64_t first, int64_t n, std::byte* to) { read_part(stored, first, n, dtype, to); };
}

void check_model_files(const ModelFiles& files, const ModelSpec& spec) {
  const std::vector<BlockParameters> blocks = list_parameters(spec, nullptr);
  std::vector<LoadItem> items;
  for (const BlockParameters& block : blocks) {
    for (const Parameter& parameter : block.trainable) items.push_back({&parameter, {}});
    for (const Parameter& parameter : block.frozen) items.push_back({&parameter, {}});
  }
  leave_fresh_head(files, spec, items);
  check(files, items, allowed_for(spec), kOfModel);
}

}  // namespace lm
