#include "plan/sizes.h"

#include <fmt/format.h>
#include <algorithm>

#include "base/batch.h"
#include "base/bytes.h"
#include "base/staging.h"
#include "kernels/attention_chunks.h"
#include "model/embedding.h"
#include "model/head_loss.h"
#include "model/key_value_cache.h"
#include "model/routers.h"
#include "plan/class_table.h"
#include "plan/device_reserve.h"
#include "plan/gemm_library.h"
#include "plan/generation.h"
#include "plan/limits.h"
#include "plan/parallel_experts.h"
#include "plan/recompute_level.h"
#include "plan/shared_memory.h"
#include "plan/start_bytes.h"
#include "plan/state_catalogue.h"
#include "plan/tier_space.h"
#include "plan/update_work.h"
#include "plan/weight_rows.h"

namespace lm {
namespace {

constexpr int64_t kStepBytesPerToken = 20;  // of a step's batches in host memory (base/batch.h)
constexpr int64_t kWeightBytes = 4;         // of a target
constexpr int64_t kLeastPrompt = 32;        // a plan of fewer tokens has no room for the arrays of one
// Spare room of a swap file: this part of what is on disk, or so many blocks; not much for a small run.
constexpr int64_t kSpareShare = 100, kSpareBlocks = 2, kLeastSpare = 512 * kKiB;

std::string per_parameter(DType type) {
  return fmt::format("{}, {} B per parameter", dtype_name(type), size_of(type));
}

// Upper bound of the embedding rows that one step updates.
UpdatedRows updated_rows(const PlanInput& in) {
  if (!in.trains()) return {};
  const int64_t length = in.config.data.max_length;
  return trained_rows(updated_rows(in.spec, in.config.train.global_batch * length, length),
                      in.layout.blocks.front());
}

// Numbers in host memory by which a step's tokens reach the rows of a table (model/embedding.h); 0 rows:
// none.
int64_t order_numbers(int64_t table, int64_t rows, int64_t step_tokens, int64_t micro_batches) {
  return rows == 0 ? 0 : table + step_tokens + micro_batches * rows;
}

// cos and sin, granule norms, batches, the order in which a step's tokens reach their rows, and a GPU's sums
// over routers' choices.
int64_t table_bytes(const PlanInput& in, const NumericsPlan& n) {
  const int64_t angles = RopeTable::bytes(in.spec, in.config.data.max_length);
  const int64_t per_token = kStepBytesPerToken + (in.data.weighted ? kWeightBytes : 0);
  if (!in.trains()) return angles + micro_tokens(in, n) * per_token;
  const int64_t step_tokens = in.config.train.global_batch * in.config.data.max_length;
  int64_t bytes = angles + in.layout.flat_elements / kGranule * 8 + step_tokens * per_token;
  if (in.device == DeviceType::kCuda) bytes += Routers::device_bytes(in.spec, in.world.ranks);
  const UpdatedRows rows = updated_rows(in);
  const int64_t micro_batches = n.micro_batches;
  // Of chosen rows the order has these alone, and a list the place of every row of the table.
  const int64_t places = rows.chosen > 0 ? in.spec.vocab : 0;
  return bytes + 4 * (order_numbers(in.spec.vocab, rows.tokens, step_tokens, micro_batches) + places +
                      order_numbers(rows.chosen, rows.chosen, step_tokens, micro_batches) +
                      order_numbers(in.spec.vocab, rows.pairs, step_tokens, micro_batches) +
                      order_numbers(in.spec.embedding.positions, rows.positions, step_tokens, micro_batches) +
                      order_numbers(in.spec.embedding.inputs.vocab, rows.inputs, step_tokens, micro_batches));
}

// A micro-batch's arrays in one copy (model/context.h), the order in which its tokens reach their rows in
// another, and once the rows (model/embedding.h); each copy begins at a multiple of 64.
int64_t upload_bytes(const PlanInput& in, const NumericsPlan& n, int64_t micro_tokens) {
  const auto copy = [](int64_t numbers) { return round_up(numbers * 4, 64); };
  const int64_t batch =
      copy((in.data.weighted ? 6 : 5) * micro_tokens + document_starts(micro_tokens, micro_documents(in, n)));
  const UpdatedRows updated = updated_rows(in);
  int64_t bytes = (in.trains() ? n.micro_batches : 1) * batch;
  for (const int64_t rows :
       {updated.tokens, updated.chosen, updated.positions, updated.inputs, updated.pairs}) {
    if (rows > 0) bytes += n.micro_batches * copy(micro_tokens + rows + 1) + copy(rows);
  }
  return bytes;
}

// What an export holds at once (export/export_source.h): an adapter, and the largest tensor that it may be
// added to as it is in the file and in fp32; of others some rows.
int64_t export_bytes(const ModelLayout& layout) {
  int64_t adapter = 0, tensor = 16 * kMiB;
  for (const BlockLayout& block : layout.blocks) {
    const auto adapts = [](const Trainable& entry) { return in_adapter(entry.role); };
    if (!std::ranges::any_of(block.trainables, adapts)) continue;
    adapter += block.flat_elements * 4 * (block.starts.empty() ? 1 : 3);  // of these also as plain ones
    for (const TensorPlace& place : block.tensors) {
      if (place.frozen) tensor = std::max(tensor, place.parameter.elements() * 4);
    }
  }
  return adapter + 2 * tensor;
}

// Of a step's operations, this step's and the next one's, with their transfers: short lists are no matter.
int64_t step_list_bytes(const PlanInput& in, const StepConfig& step) {
  constexpr int64_t kShort = 100'000, kOfMicroBatch = 4, kLists = 3, kWithShards = 5;
  const int64_t operations =
      in.trains() ? step.micro_batches * kOfMicroBatch * (in.spec.layer_count() + 2) : 0;
  const int64_t lists = step.moves_shards() ? kWithShards : kLists;
  return operations > kShort ? operations * lists * static_cast<int64_t>(sizeof(Operation)) : 0;
}

// A rank's total and its offloaded part, in bytes or elements.
struct Share {
  int64_t all = 0;
  OffDeviceBytes off;
  void add(int64_t n, bool off_device, TierId tier_id) {
    all += n;
    if (!off_device) return;
    off.at[tier_index(tier_id)] += n;
    off.whole += n;
  }
};

// Calls body(block, first element, elements, whether off the device, tier) for each tile.
template <class Body>
void each_tile(const PlacementPlan& p, const Body& body) {
  const PoolPlan& pool = p.pool(Pool::kOptimizer);
  for (size_t b = 0; b + 1 < p.first_tile.size(); ++b) {
    for (auto a = static_cast<size_t>(p.first_tile[b]); a < static_cast<size_t>(p.first_tile[b + 1]); ++a)
      body(b, p.first_granule[a] * kGranule, p.granules[a] * kGranule, pool.off_device[a] != 0,
           pool.tier_id_of(a));
  }
}

// Of a stream of the optimizer's state; `elements` of the tiles.
Share stream_bytes(const PlanInput& in, const PlacementPlan& p, const StateTensor& stream,
                   const Share& elements) {
  const auto of = [&](int64_t n) { return stream.bytes(Elements{n}); };
  if (stream.of == StateTensorOf::kAll) {
    Share out{.all = of(elements.all), .off = {.whole = of(elements.off.whole)}};
    for (size_t t = 0; t < kTierCount; ++t) out.off.at[t] = of(elements.off.at[t]);
    return out;
  }
  Share out;
  each_tile(p, [&](size_t b, int64_t first, int64_t n, bool off_device, TierId tier_id) {
    out.add(stream.bytes(in.layout.blocks[b].count(first, first + n)), off_device, tier_id);
  });
  return out;
}

// How a state is kept, by the last of its streams.
std::string kept_as(const StateTensor& stream) {
  switch (stream.of) {
    case StateTensorOf::kSmall:
      return "codes, scales; fp32 of small tensors";
    case StateTensorOf::kVectors:
      return std::string(dtype_name(stream.type)) + " of rows, columns and vectors";
    case StateTensorOf::kOutside:
      return std::string(dtype_name(stream.type)) + " of vectors, embedding and head";
    default:
      return stream.type == DType::kI16 ? "low half beside the weight" : dtype_name(stream.type);
  }
}

// A row for each state: those in codes and of rows and columns consist of several streams.
void add_state(const PlanInput& in, const PlacedPlan& plan, ClassTable& table) {
  const StateTensors streams = plan.numerics.state();
  Share elements, sum;
  each_tile(plan.placement, [&](size_t, int64_t, int64_t n, bool off_device, TierId tier_id) {
    elements.add(n, off_device, tier_id);
  });
  for (size_t s = 0; s < streams.size(); ++s) {
    const Share bytes = stream_bytes(in, plan.placement, streams[s], elements);
    sum.all += bytes.all;
    sum.off.whole += bytes.off.whole;
    for (size_t t = 0; t < kTierCount; ++t) sum.off.at[t] += bytes.off.at[t];
    if (s + 1 < streams.size() && streams[s + 1].title == streams[s].title) continue;
    table.add(streams[s].title, sum.all, sum.off, kept_as(streams[s]));
    sum = {};
  }
}

// What the arena has beside saved activations.
std::string temporaries_note(const PlanInput& in, const PlacedPlan& plan, const PlanSizes& sizes) {
  if (!in.trains()) return "of one micro-batch, forward alone";
  const std::string note =
      fmt::format("logits of {} rows at once: {}", std::min(plan.numerics.row_chunk, sizes.micro_tokens),
                  format_bytes(sizes.arena.logits));
  return note + (plan.placement.defer_tied_gradient ? "; at the end the table's gradient" : "");
}

// What computes, and what that keeps.
void add_libraries(const PlanInput& in, const PlacedPlan& plan, int64_t gemm_shapes, ClassTable& table) {
  const NumericsPlan& n = plan.numerics;
  const bool cpu = in.device == DeviceType::kCpu;
  if (const int64_t code = gemm_shapes * gemm_shape_bytes(in.machine); code > 0)
    table.host("GEMM code", code, fmt::format("{} shapes", gemm_shapes));
  const bool host_products = is_muon(n.rule) && (cpu || plan.placement.update_on_host);
  // Muon's products are of bf16 matrices.
  const int64_t panels = std::max(cpu ? gemm_panel_bytes(n.dtype, in.machine, n.threads) : 0,
                                  host_products ? gemm_panel_bytes(DType::kBF16, in.machine, n.threads) : 0);
  if (panels > 0) table.host("GEMM panels", panels, fmt::format("{} threads multiply in them", n.threads));
  table.host("libraries", host_library_bytes(in.machine, in.device),
             cpu ? "LibTorch and GEMM workspaces" : "LibTorch, CUDA");
}

// What a GPU uses in host memory.
void add_embedding(const PlanInput& in, const PlacementPlan& p, ClassTable& table) {
  const int sharers = in.layout.blocks.front().frozen_bytes > 0 ? p.frozen_sharers : 1;
  const std::string note = "the GPU looks up rows where they lie";
  table.host("embedding", ceil_div(p.embedding_in_host, sharers),
             sharers == 1 ? note : fmt::format("{}, one copy for the {} ranks of a machine", note, sharers));
}

// What adapters need that begin with what the base is.
void add_starts(const PlanInput& in, const ArenaNeed& arena, ClassTable& table) {
  const LoraConfig& lora = in.config.lora;
  // On a CPU this memory is the temporaries' afterwards.
  const int64_t of_arena = in.device == DeviceType::kCpu ? arena.bytes : 0;
  if (in.trains() && (lora.start == LoraStart::kLoftq || (lora.dora && lora.init.empty()))) {
    if (const int64_t more = loftq_bytes(in.layout) - of_arena; more > 0)
      table.host("start of adapters", more, "a matrix that was quantized, in fp32");
  }
  if (const int64_t pair = principal_pair_bytes(in.layout); pair > 0) {
    // A run writes them in the end as a plain adapter (export/plain_adapter.h), beside its temporaries.
    const int64_t more = in.trains() ? pair + in.layout.flat_elements * 2 * 4 : pair - of_arena;
    if (more > 0) table.host("principal parts", more, "the largest matrix in fp32, and adapters to write");
  }
}

// The documents of streamed rows, each with 4 bytes of id and a mark per token.
void add_streamed(const PlanInput& in, ClassTable& table) {
  const DataConfig& data = in.config.data;
  if (!data.streaming) return;
  const int64_t sequences = in.config.train.global_batch + (data.packing ? kOpenSequences : 0);
  table.host("documents", 5 * data.max_length * (data.shuffle_window + sequences),
             fmt::format("at most, of data.shuffle_window = {}", data.shuffle_window));
}

std::vector<ClassBytes> classes_of(const PlanInput& in, const PlacedPlan& plan, const PlanSizes& sizes) {
  const NumericsPlan& n = plan.numerics;
  const PlacementPlan& p = plan.placement;
  ClassTable table(p);
  if (in.purpose == PlanPurpose::kExport) {
    table.host("export", export_bytes(in.layout), "the adapter, and a tensor at a time");
    table.host("libraries", host_library_bytes(in.machine, DeviceType::kCpu), "LibTorch and GEMM workspaces");
    return table.take();
  }
  const auto name = [](StateClass state) { return state_class_name(state); };
  const int64_t embedding = p.embedding_in_host;
  add_weights(in, plan, table);
  if (embedding > 0) add_embedding(in, p, table);
  if (in.trains()) {
    table.add(name(StateClass::kGradients), p.gradient_elements(in.layout) * size_of(n.gradient_dtype),
              off_device_bytes(p.pool(Pool::kGradients), p.pool(Pool::kGradientShards)),
              per_parameter(n.gradient_dtype) + (p.in_backward() ? ", of one block at a time" : ""));
    add_state(in, plan, table);
    const PoolPlan& inputs = p.pool(Pool::kActivations);
    table.add(name(StateClass::kActivations), sizes.arena.saved + inputs.off_device_bytes(),
              off_device_bytes(inputs), saved_text(plan.recompute(), p.keep_norms));
    table.other_ranks();
  }
  // The arena has the slot of gradients, too, where a tied table's takes its place.
  const int64_t slot = p.defer_tied_gradient ? p.gradient_elements(in.layout) * size_of(n.gradient_dtype) : 0;
  table.device("temporaries", sizes.arena.bytes - sizes.arena.saved - slot,
               temporaries_note(in, plan, sizes));
  add_generation(in, n, sizes, table);
  table.slots();
  const UpdatedRows rows = updated_rows(in);
  const TensorPlace* const pairs = in.layout.blocks.front().find("embed.lora_A");
  const int64_t row_elements = rows.all() * in.spec.hidden + rows.inputs * in.spec.embedding.inputs.all() +
                               rows.pairs * (pairs == nullptr ? 0 : pairs->parameter.rows);
  table.device("embedding rows", row_elements * 4,
               in.spec.embedding.positions > 0 ? "fp32 sums of a step's distinct tokens and positions"
                                               : "fp32 sums of a step's distinct tokens");
  if (const int64_t scratch = in.trains() ? update_scratch_bytes(in.layout, n.rule) : 0; scratch > 0) {
    // On both where both update.
    const bool products = is_muon(n.rule);
    const std::string name = products ? "products" : "sums",
                      note = products ? "of the matrix whose momentum is made orthogonal"
                                      : "of rows and columns of the matrix whose weights are updated";
    table.device(name, scratch, note);
    if (p.update_on_host) table.host(name, scratch, note);
  }
  table.device("tables", table_bytes(in, n), "angles, norms, order of tokens, batches");
  const bool cpu = in.device == DeviceType::kCpu;
  if (!cpu) table.device("context", kContextBytes, "CUDA's own");
  if (!cpu) table.device("LibTorch", sizes.library_device_bytes, "attention while it runs, GEMM workspaces");
  if (!cpu)
    table.host("uploads and results", sizes.upload_bytes + sizes.result_bytes + router_result_bytes(in.spec),
               "batches up, norms down");
  if (!cpu) table.host("load buffer", kStagingBytes, "files pass through it on their way to the GPU");
  if (in.trains())
    table.host("save buffers", save_buffer_bytes(in.layout, n, p, in.config.optimizer.clip),
               "state passes through them to a checkpoint");
  add_starts(in, sizes.arena, table);
  if (const int64_t list = step_list_bytes(in, sizes.step); list > 0)
    table.host("list of a step", list, fmt::format("{} micro-batches through every layer", n.micro_batches));
  if (in.world.ranks > 1)
    table.host("shared memory", shared_memory_bytes(in, plan), "what ranks send to each other");
  if (const int64_t bytes = expert_exchange_bytes(in.spec, in.layout.experts, n.dtype); bytes > 0)
    table.device("rows of experts", bytes, "a round of those that leave for other ranks");
  if (in.trains() && n.two_levels())
    table.device("partial sums", partial_sum_bytes(in.device), "of a machine, for the other machines");
  if (!cpu && in.world.ranks > 1) {
    const int64_t sums = n.gradient_dtype == DType::kF32 ? 0 : 2 * kDeviceRankStagingBytes / in.world.ranks;
    table.device("exchange", kDeviceRankStagingBytes + sums, "what comes from other GPUs to be added");
    table.device("NCCL", kNcclBytes, "its channels");
  }
  if (in.trains()) add_streamed(in, table);
  add_libraries(in, plan, sizes.gemm_shapes, table);
  return table.take();
}

Tier make_tier(const PlanInput& in, const std::vector<ClassBytes>& classes, TierId tier_id) {
  const TierSpace space = tier_space(in, tier_id);
  Tier tier{.tier_id = tier_id, .capacity = space.capacity, .allowed = spend(space.budget, space.capacity)};
  for (const ClassBytes& row : classes) {
    if (row.tier_id == tier_id) tier.bytes += row.bytes;
  }
  tier.usable = space.free_now > 0 ? std::min(tier.allowed, space.free_now) : tier.allowed;
  return tier;
}

// Only where room is left: no plan is refused for it.
void spare_disk(const PlanInput& in, int64_t io_block, Tier& disk, PlanSizes& sizes) {
  const int64_t blocks = std::min(kSpareBlocks * io_block, kLeastSpare);
  const int64_t spare = round_up(std::max(disk.bytes / kSpareShare, blocks), kSlotAlignment);
  const int64_t all = spare * std::ssize(in.machine.disks);
  if (all > disk.usable - disk.bytes) return;
  sizes.swap_spare = spare;
  sizes.classes.push_back({"spare room", all, "for writes that their place refuses", disk.tier_id});
  disk.bytes += all;
}

// Of which the CPU's library keeps code.
int64_t kept_gemm_shapes(const PlanInput& in, const PlacedPlan& plan, const StepConfig& step) {
  const NumericsPlan& n = plan.numerics;
  int64_t out = 0;
  if (n.round_rows) {
    const auto tokens = static_cast<double>(micro_tokens(in, n)),
               longest = static_cast<double>(in.config.data.max_length);
    const GemmShapes shapes =
        kept_shapes(in.dry_runs->gemm_shapes(in, n, step),
                    necessary_flops(in.spec, in.layout, uniform_work(tokens, longest)), in.trains());
    out = plan.placement.every_gemm_shape ? shapes.wanted : shapes.least;
  }
  if (in.device == DeviceType::kCpu && in.trains() && is_muon(n.rule)) {
    std::set<GemmShape> gemms;
    for (const BlockLayout& block : in.layout.blocks)
      update_products(block, 0, block.flat_elements, n.rule, in.device, &gemms);
    out += std::ssize(gemms);
  }
  return out;
}

bool all_memory(const PlanSizes& sizes, int64_t Tier::*limit) {
  return std::all_of(sizes.tiers.begin(), sizes.tiers.end(), [&](const Tier& tier) {
    return tier_row(tier.tier_id).medium == Medium::kDisk || tier.bytes <= tier.*limit;
  });
}

}  // namespace

int64_t micro_documents(const PlanInput& in, const NumericsPlan& numerics) {
  // A document has at least two tokens, and one that is scored at least one; without packing a sequence is
  // one document, or a pair of them.
  const int64_t least = trains_scores(in.config) ? 1 : 2;
  const int64_t of_sequence = in.config.train.objective == ObjectiveChoice::kReward ? 2 : 1;
  return numerics.micro_batch * (in.config.data.packing ? in.config.data.max_length / least : of_sequence);
}

StepConfig step_config(const ModelSpec& spec, const ModelLayout& layout, const PlacedPlan& plan,
                       int64_t micro_tokens, Clip clip) {
  const NumericsPlan& n = plan.numerics;
  const PlacementPlan& p = plan.placement;
  return {.units = p.units(),
          .micro_batches = n.micro_batches,
          .tied = spec.tied,
          .recompute = plan.recompute(),
          .keep_norms = p.keep_norms,
          .clip = clip,
          .group = p.group,
          .ranks = p.ranks,
          .sharded = p.sharded,
          .copies = p.copies,
          .whole_tensors = p.whole_tensors,
          .in_backward = p.in_backward(),
          .defer_tied_gradient = p.defer_tied_gradient,
          .layer_inputs = spec.embedding.inputs.width > 0,
          .embedding_adapted =
              layout.blocks.front().trains("prompt") || layout.blocks.front().trains("embed.lora_A"),
          .pools = {p.through(Pool::kWeights), p.through(Pool::kGradients), p.through(Pool::kOptimizer),
                    p.through(Pool::kActivations), p.through(Pool::kWeightShards),
                    p.through(Pool::kGradientShards)},
          .first_tile = p.first_tile,
          .device = p.device,
          .arithmetic = n,
          .micro_rows = n.rows(micro_tokens),
          .machine_ranks = n.two_levels() ? n.machine_ranks : 1};
}

OffloadConfig PlanInput::offload() const {
  OffloadConfig out = config.offload;
  if (!trains()) out.optimizer = out.gradients = out.activations = OffloadTier::kNone;
  const bool own_stay = layout.experts.parallel() && config.zero.stage == 3;
  if (purpose == PlanPurpose::kExport || own_stay) out.weights = OffloadTier::kNone;
  return out;
}

int64_t micro_tokens(const PlanInput& in, const NumericsPlan& numerics) {
  if (in.purpose != PlanPurpose::kGenerate) return numerics.micro_batch * in.config.data.max_length;
  // A batch of texts has a token, a document and three numbers of attention for each.
  const int64_t least = std::max(kLeastPrompt, 4 * numerics.micro_batch);
  return std::clamp(in.config.data.max_length, least, std::max(least, kPromptTokens));
}

PlanSizes size_plan(const PlanInput& in, const PlacedPlan& plan) {
  const NumericsPlan& n = plan.numerics;
  PlanSizes out;
  out.micro_tokens = micro_tokens(in, n);
  out.cache_positions = cache_positions(in);
  out.cache_texts = cache_texts(in, n);
  out.step = step_config(in.spec, in.layout, plan, out.micro_tokens, in.config.optimizer.clip);
  out.step.weighted = in.data.weighted;
  out.step.first_trained = in.first_trained();
  out.gemm_shapes = kept_gemm_shapes(in, plan, out.step);
  if (in.device == DeviceType::kCuda) {
    // Two steps', where the next one may be enqueued meanwhile (model/uploads.h). A second backward sends
    // what it needs behind what the first one has sent, and so does a table's gradient; the pass that counts
    // routers' choices sends it before.
    const int passes = (out.step.two_pass_clip() || out.step.defer_tied_gradient ? 2 : 1) +
                       (has_router_pass(in.config.train, in.spec, out.step) ? 1 : 0);
    out.upload_bytes = (out.step.may_run_ahead() ? 2 : 1) * upload_bytes(in, n, out.micro_tokens) * passes;
    const Gpu& gpu = in.machine.gpus.front();
    const AttentionShape shape{.tokens = std::max(out.micro_tokens, out.cache_positions),
                               .processors = gpu.processors,
                               .deterministic = in.config.run.deterministic,
                               .dtype = n.dtype,
                               .flash = !gpu.capability.known() || gpu.capability.major >= kFlashCapability};
    out.library_device_bytes = library_device_bytes(in.spec, shape);
    // The loss and what follows from it, and the granules' norms.
    out.result_bytes = kStepResultBytes + (in.trains() ? in.layout.flat_elements / kGranule * 8 : 0);
  }
  out.arena = in.dry_runs->arena(in, n, out.step);
  out.classes = classes_of(in, plan, out);
  for (size_t t = tier_index(nearest_tier(in.device)); t < kTierCount; ++t) {
    const auto tier_id = static_cast<TierId>(t);
    if (tier_id > TierId::kHost && !plan.placement.uses(tier_id)) continue;
    Tier& tier = out.tiers.emplace_back(make_tier(in, out.classes, tier_id));
    if (tier_row(tier_id).medium == Medium::kDisk) spare_disk(in, plan.placement.io_block, tier, out);
    out.peak.of(tier_row(tier_id).medium) += tier.bytes;
  }
  out.fits = std::all_of(out.tiers.begin(), out.tiers.end(),
                         [](const Tier& tier) { return tier.bytes <= tier.usable; });
  return out;
}

SizedPlan sized(const PlanInput& in, PlacedPlan plan) {
  PlanSizes sizes = size_plan(in, plan);
  return {std::move(plan), std::move(sizes)};
}

bool fits_capacity(const PlanSizes& sizes) {
  return all_memory(sizes, &Tier::allowed);
}

bool fits_memory(const PlanSizes& sizes) {
  return all_memory(sizes, &Tier::usable);
}

}  // namespace lm
